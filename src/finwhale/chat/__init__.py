"""Prompts and output streams: the tokenizer, the chat format, the output parser. No torch."""
