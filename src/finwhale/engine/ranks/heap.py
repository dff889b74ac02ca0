"""Freezes the heap of a process whose engine is ready."""

import gc


def freeze_heap() -> None:
    """Exclude every object that exists now from Python's garbage collection.

    Objects that exist when an engine is ready live as long as the engine. A full collection would
    visit all of them, during a step.
    """
    gc.collect()
    gc.freeze()
