"""The fixture of modules that start several ranks."""

from tests.support.forked_ranks import forked_ranks

__all__ = ["forked_ranks"]
