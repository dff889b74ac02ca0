"""DeepSeek-V4. Read model.py first."""
