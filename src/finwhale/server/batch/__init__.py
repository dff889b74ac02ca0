"""Batches of requests: files of lines in OpenAI's batch format, answered at low priority."""
