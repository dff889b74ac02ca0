"""Requests and answers of OpenAI's and Anthropic's protocols."""
