"""DeepSeek-V4.1: in work, and not served yet (models/registry.py)."""
