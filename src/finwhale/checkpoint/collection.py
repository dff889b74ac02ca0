"""Pauses the garbage collector while a checkpoint's tens of thousands of tensors are listed."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause Python's garbage collector.

    Loading creates many small objects that stay alive, so Python would repeatedly visit every
    object of the process, including torch's.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
