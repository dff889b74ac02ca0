"""Decides what the next step computes, and plans it. Pure Python: nothing here imports torch."""
