"""What the process of one GPU owns: weights, cache, captured graphs, sampling."""
