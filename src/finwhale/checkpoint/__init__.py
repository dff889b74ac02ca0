"""Reads, writes and generates checkpoints: official names, FP8, FP4 and E8M0 formats."""
