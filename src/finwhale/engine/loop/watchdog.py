"""Says where an engine hangs: every thread's stack, when a step takes absurdly long."""

import faulthandler
import os
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import TextIO

CHECKS = 8  # a step may take this part longer before it is noticed


class Watchdog:
    """A context around each step. Costs a step nothing but two looks at the clock.

    A thread looks at it from time to time. Where the interpreter itself is held, so that no Python
    thread runs, faulthandler's timer writes the stacks; the process has one, which is then taken.

    Args:
        seconds: how long a step may take; None: as long as it likes.
        file: what the stacks are written to; None, or not a real file: the process's stderr.
    """

    def __init__(self, seconds: float | None, file: TextIO | None = None) -> None:
        self.seconds = seconds
        self._began: float | None = None
        if seconds is not None:
            # The thread's own: whoever opened the file may close it.
            number = os.dup(_number(file or sys.stderr))
            threading.Thread(
                target=_watch,
                args=(weakref.ref(self), seconds, number),
                name="watchdog",
                daemon=True,
            ).start()

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._began = None

    @property
    def elapsed(self) -> float:
        """Seconds that the step which runs now has taken; 0 where none runs."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _look(self, told: float | None, file: int) -> float | None:
        """Write the stacks if the step takes too long; the step of which that was told last."""
        began = self._began
        assert self.seconds is not None
        faulthandler.dump_traceback_later(2 * self.seconds, file=file)
        if began is None or began == told or time.monotonic() - began < self.seconds:
            return told
        os.write(file, f"finwhale: a step has taken {self.seconds:g} seconds; stacks:\n".encode())
        faulthandler.dump_traceback(file)
        return began


def _watch(watchdog: "weakref.ref[Watchdog]", seconds: float, file: int) -> None:
    told: float | None = None
    while True:
        strong = watchdog()
        if strong is None:
            faulthandler.cancel_dump_traceback_later()
            os.close(file)
            return
        told = strong._look(told, file)
        del strong
        time.sleep(seconds / CHECKS)


def _number(file: TextIO) -> int:
    try:
        return file.fileno()
    except (OSError, ValueError):
        return 2
