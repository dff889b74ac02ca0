"""The DeepSeek-V4 model. Start with model.py."""
