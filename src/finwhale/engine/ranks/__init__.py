"""The ranks of a model: one in this process, others in worker processes, and their calls."""
