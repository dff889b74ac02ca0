"""Benchmarks. Each prints a table, and appends its results with the hardware to a JSONL file."""
