"""Non-blocking stderr: drops lines that a slow reader does not take, and counts them.

A process that writes to a full pipe, or to a stopped terminal, waits until somebody reads. A server
must not wait, so a thread writes, and drops the lines that it cannot write in time.

Libraries, ranks and compilers write to the same file descriptor without this thread. Therefore the
descriptor itself becomes non-blocking: they lose what a full pipe does not take.
"""

import contextlib
import io
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import util

MOST_BYTES = 4 << 20  # maximum size of the text that waits to be written
PAUSE_S = 0.01  # pause before the next attempt to write to a slow reader
EXIT_S = 1.0  # time limit for the last writes at the end of a process


class LossyStderr(io.TextIOBase):
    """Text for a file descriptor, which a thread of its own writes. `notice`: makes the line that
    says how many lines were lost."""

    def __init__(self, number: int, notice: Callable[[int], str]) -> None:
        self._number, self._notice = number, notice
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = self._num_lost = 0
        self._writer: threading.Thread | None = None
        # Also runs at the end of a process of multiprocessing, which has no atexit.
        util.Finalize(self, self.drain, exitpriority=0)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > MOST_BYTES:
                self._num_lost += max(1, text.count("\n"))
                return len(text)
            self._waiting.append(data)
            self._num_bytes += len(data)
            if self._writer is None:
                self._writer = threading.Thread(target=self._run, name="stderr", daemon=True)
                self._writer.start()
            self._changed.notify_all()
        return len(text)

    def drain(self, seconds: float = EXIT_S) -> bool:
        """Wait until everything is written, but no longer than this; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) > 0)
                data = self._waiting[0]
                if len(self._waiting) == 1 and self._num_lost:
                    data += self._notice(self._num_lost).encode()
                    self._num_lost = 0
            self._write_out(data)
            with self._changed:
                self._num_bytes -= len(self._waiting.popleft())
                self._changed.notify_all()

    def _write_out(self, data: bytes) -> None:
        writable = select.poll()
        writable.register(self._number, select.POLLOUT)
        while data:
            try:
                data = data[os.write(self._number, data) :]
            except BlockingIOError:
                writable.poll()
                time.sleep(PAUSE_S)
            except OSError:
                return  # nobody will ever read it


def never_block(notice: Callable[[int], str]) -> Callable[[], None]:
    """Replace sys.stderr, if it has a file descriptor, and make standard output and error
    non-blocking, for this process and those that it starts, if they are pipes or terminals.

    Returns:
        A function that makes standard error as it was before. If nobody reads standard error,
        the function changes nothing.
    """
    before = sys.stderr
    if isinstance(before, LossyStderr):
        return lambda: None
    try:
        number = before.fileno()
    except (AttributeError, OSError, ValueError):
        return lambda: None
    before.flush()
    blocking = {}
    for each in {1, 2, number}:
        with contextlib.suppress(OSError):  # it is closed
            blocking[each] = os.dup(each)
            _unblock(each)
    stream = sys.stderr = LossyStderr(number, notice)

    def restore() -> None:
        if stream.drain():
            sys.stderr = before
            for each, kept in blocking.items():
                os.dup2(kept, each)
        for kept in blocking.values():
            os.close(kept)

    return restore


def _unblock(number: int) -> None:
    """Make a pipe or a terminal non-blocking.

    Other processes, such as a shell, may share the open file, so this opens it once more. That is
    impossible without /proc, and if the file belongs to another user. Then it stays as it was.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(number).st_mode) and not os.isatty(number):
            return
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        opened = os.open(f"/proc/self/fd/{number}", flags)
    except OSError:
        return
    os.dup2(opened, number)
    os.close(opened)
