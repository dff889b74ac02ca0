"""Writes the stack of every thread if a step takes too long."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
import weakref
from typing import TextIO

CHECKS = 8  # Checks per time limit. The watchdog notices a hang up to 1/CHECKS of the limit late.

# Seconds, beyond twice the time limit, that Python must have stood still before faulthandler's
# timer writes the stacks. It reads them without the interpreter's lock, so it can crash if
# Python runs.
STANDSTILL_S = 30.0


class Watchdog:
    """A context manager around each step. It costs a step only one clock read.

    A thread checks the elapsed time at intervals. If the interpreter itself is blocked, so that no
    Python thread runs, faulthandler's timer writes the stacks. A process has only one such timer,
    which the watchdog then occupies.

    Args:
        seconds: the longest time of a step; None: no limit.
        file: destination of the stacks; None, or not a real file: the process's stderr.
    """

    def __init__(self, seconds: float | None, file: TextIO | None = None) -> None:
        self.seconds = seconds
        self._began: float | None = None
        if seconds is not None:
            # Duplicate the descriptor for the thread, because the file's owner may close it.
            number = os.dup(_number(file or sys.stderr))
            threading.Thread(
                target=_watch,
                args=(weakref.ref(self), seconds, number),
                name="watchdog",
                daemon=True,
            ).start()

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began = None

    @property
    def elapsed(self) -> float:
        """Seconds that the current step has taken so far; 0 if no step runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _check(self, reported: float | None, file: int) -> float | None:
        """Write the stacks if the current step takes too long, but only once for each step.

        Args:
            reported: start time of the last step whose stacks were written.

        Returns:
            The value of `reported` for the next call.
        """
        began = self._began
        assert self.seconds is not None
        faulthandler.dump_traceback_later(2 * self.seconds + STANDSTILL_S, file=file)
        if began is None or began == reported or time.monotonic() - began < self.seconds:
            return reported
        with contextlib.suppress(BlockingIOError):  # the log's pipe is full
            text = f"finwhale: a step has taken {self.seconds:g} seconds; stacks:\n"
            os.write(file, text.encode())
        faulthandler.dump_traceback(file)
        return began


def _watch(watchdog: "weakref.ref[Watchdog]", seconds: float, file: int) -> None:
    reported: float | None = None
    while True:
        strong = watchdog()
        if strong is None:
            faulthandler.cancel_dump_traceback_later()
            os.close(file)
            return
        reported = strong._check(reported, file)
        del strong
        time.sleep(seconds / CHECKS)


def _number(file: TextIO) -> int:
    try:
        return file.fileno()
    except (OSError, ValueError):
        return 2
