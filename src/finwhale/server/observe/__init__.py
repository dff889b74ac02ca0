"""The log, the metrics and the traces of a server."""
