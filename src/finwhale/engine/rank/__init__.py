"""One rank: the process that owns a GPU's weights, cache and captured graphs, and samples."""
