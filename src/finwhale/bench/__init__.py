"""Measurements: each prints a table and appends JSONL records with a hardware stamp."""
