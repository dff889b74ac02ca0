"""The engine: scheduling, paged state, batching, sampling."""
