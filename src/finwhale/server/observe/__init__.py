"""What is told of a server: its log, metrics and traces."""
