"""The engine and its step loops, which turn requests into tokens."""
