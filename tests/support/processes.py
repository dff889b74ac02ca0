"""Processes that import this package, which pytest imports without a path."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = str(Path(__file__).parents[2])


@contextmanager
def importable_tests() -> Iterator[None]:
    """A process that starts inside, and later its own ones, can import `tests`."""
    sys.path.insert(0, ROOT)
    try:
        yield
    finally:
        sys.path.remove(ROOT)
