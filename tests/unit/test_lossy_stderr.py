"""Standard error that makes no writer wait."""

import contextlib
import faulthandler
import os
import sys
import termios
import threading
import tty
from collections.abc import Iterator

import pytest

from finwhale.engine.loop.watchdog import Watchdog
from finwhale.server.observe import lossy_stderr
from finwhale.server.observe.lossy_stderr import LossyStderr, never_block


def test_lines_that_nobody_reads_are_lost_and_counted() -> None:
    reader, writer = os.pipe()
    stream = LossyStderr(writer, lambda lost: f"{lost} lost\n")
    line = "x" * 999 + "\n"
    most = lossy_stderr.MOST_BYTES // len(line)
    for _ in range(3 * most):
        print(line, end="", file=stream, flush=True)
    stream.drain(0.01)  # it does not wait for ever
    found: list[bytes] = []

    def read() -> None:
        while part := os.read(reader, 1 << 20):
            found.append(part)

    reading = threading.Thread(target=read)
    reading.start()
    stream.drain(120)
    print("again", file=stream)
    stream.drain(120)
    os.close(writer)
    reading.join(120)
    os.close(reader)
    *lines, notice, last = b"".join(found).decode().splitlines()
    assert set(lines) == {line[:-1]} and last == "again"
    assert notice == f"{3 * most - len(lines)} lost"
    # Besides what waits, the pipe holds some, and the writer has a line.
    assert most <= len(lines) <= most + 200


def test_a_closed_reader_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = LossyStderr(writer, str)
    assert stream.write("nobody reads this\n") == 18
    stream.drain(120)
    os.close(writer)
    assert not stream.isatty()


@contextlib.contextmanager
def as_stderr(number: int) -> Iterator[None]:
    """Make a file this process's standard error."""
    file, kept = sys.stderr, os.dup(2)
    os.dup2(number, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    try:
        yield
    finally:
        sys.stderr = file
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_no_write_to_the_file_waits(kind: str) -> None:
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = os.openpty()
        tty.setraw(writer)
        termios.tcflow(writer, termios.TCOOFF)
    with as_stderr(writer):
        before, restore = sys.stderr, never_block("{} lost\n".format)
        stream = sys.stderr
        assert isinstance(stream, LossyStderr)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(2, b"." * 1000)
        faulthandler.dump_traceback(2)
        watchdog = Watchdog(None)
        watchdog.seconds, watchdog._began = 60.0, 0.0
        watchdog._check(None, 2)
        faulthandler.cancel_dump_traceback_later()
        # The thread waits for a reader.
        lines = "".join(f"line {number}\n" for number in range(100))
        stream.write(lines)
        stream.drain(0.01)
        if kind == "terminal":
            termios.tcflow(writer, termios.TCOON)
        found = b""
        while b"line 99\n" not in found:
            found += os.read(reader, 1 << 16)
        assert found.endswith(lines.encode())
        assert stream.drain(120)
        restore()
        assert sys.stderr is before and os.get_blocking(2)
    assert os.get_blocking(writer), "other processes may share it"
    os.close(writer)
    os.close(reader)
