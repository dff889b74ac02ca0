"""Benchmarks. Each prints a table.

With --record, it also appends its results and the hardware to a JSONL file.
"""
