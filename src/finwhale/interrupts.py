"""Lets Ctrl-C wait until it can do no harm, and SIGTERM do what Ctrl-C does."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt at the end of this block. A second Ctrl-C raises at once.

    Raised at any other line, it would leave the engine's state half changed, and end the other
    ranks. Does nothing on threads that Ctrl-C does not reach, nor if the program has a handler of
    its own.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    waits = False

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal waits
        if waits:
            raise KeyboardInterrupt
        waits = True

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if waits:
            raise KeyboardInterrupt


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that temporary files and processes are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in a shell's background
            raise KeyboardInterrupt
        # asyncio has its own handler of SIGINT.
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
