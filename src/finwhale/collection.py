"""Keeps Python's garbage collector from visiting objects that stay alive."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the collector while a checkpoint's tens of thousands of tensors are listed.

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


def freeze_heap() -> None:
    """Exclude every object that exists now from collection.

    Objects that exist when an engine is ready live as long as the engine. A full collection would
    visit all of them, during a step.
    """
    gc.collect()
    gc.freeze()
