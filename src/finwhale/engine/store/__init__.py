"""Prefixes outside the GPU: where records are kept, and what they depend on."""
