"""What the next step is. Pure Python: nothing here imports torch."""
