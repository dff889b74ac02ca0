"""The engine's process, and the pipe to it."""
