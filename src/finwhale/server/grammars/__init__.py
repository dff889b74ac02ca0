"""Trials of grammars, before the engine sees them."""
