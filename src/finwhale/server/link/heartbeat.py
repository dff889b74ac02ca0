"""Shows the server whether the engine's process runs and its steps end, and how much of the weights
it has read, without using the pipe.

Shared memory holds two times of the machine's monotonic clock and two numbers of bytes. A thread of
the engine's process writes the first time twice a second. It cannot write if the process is
stopped, swapped out or stuck with Python's lock (GIL) held. The step loop writes the second time
when a step begins, and clears it when the step ends. A long step, such as a prefill on a CPU, is
therefore no false alarm: the thread goes on writing, and only a far longer limit applies to the
step itself.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext

INTERVAL_S = 0.5


class Heartbeat:
    """The shared numbers. The server creates it and passes it to the engine's process."""

    def __init__(self, context: BaseContext) -> None:
        # No lock is needed: the machine writes an aligned double as a whole.
        self._values = context.RawArray(ctypes.c_double, 4)

    def start(self) -> None:
        """Starts the thread, in the engine's process."""
        self._values[0] = time.monotonic()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def load(self, done: int, total: int) -> None:
        """Records the numbers of bytes read and of all bytes of the weights."""
        self._values[2], self._values[3] = done, total

    @property
    def loaded_bytes(self) -> tuple[int, int]:
        """The arguments of the last `load`; zeros before the first one."""
        return int(self._values[2]), int(self._values[3])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Marks a step of the engine."""
        self._values[1] = time.monotonic()
        try:
            yield
        finally:
            self._values[1] = 0.0

    @property
    def silent_s(self) -> float:
        """The seconds since the last beat; 0 before the first one."""
        return _since(self._values[0])

    @property
    def step_s(self) -> float:
        """The seconds that the present step has taken; 0 without a step."""
        return _since(self._values[1])

    def _beat(self) -> None:
        while True:
            self._values[0] = time.monotonic()
            time.sleep(INTERVAL_S)


def _since(moment: float) -> float:
    return max(0.0, time.monotonic() - moment) if moment else 0.0
