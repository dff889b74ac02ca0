"""From options to ranks that are ready: memory, kernels, cache, captured steps."""
