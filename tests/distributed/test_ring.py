"""The ring: every reader gets every message, whole and in order."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from finwhale.distributed.ring import Ring


def wait() -> None:
    time.sleep(1e-5)


@pytest.mark.parametrize("capacity", [64, 4096])
def test_readers_of_different_speed_get_every_message(capacity: int) -> None:
    """Many messages are longer than the ring, or pass its end."""
    draw = random.Random(capacity)
    messages = [draw.randbytes(draw.choice((0, 1, 7, 60, 64, 65, 500, 5000))) for _ in range(100)]
    ring = Ring.create(2, capacity)
    views = [Ring(ring.file, 2, reader) for reader in range(2)]
    found: list[list[bytes]] = [[], []]

    def read(reader: int) -> None:
        for _ in messages:
            found[reader].append(views[reader].read())

    def write() -> None:
        for message in messages:
            ring.write(message, wait)

    join_all([write, partial(read, 0), partial(read, 1)])
    assert found == [messages, messages]


def join_all(targets: Sequence[Callable[[], None]]) -> None:
    """Run each target in a thread. A thread that hangs fails the test and does not keep pytest."""
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 100
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("ahead", [1, 3])
def test_an_idle_ring_wraps_at_every_byte(ahead: int) -> None:
    """Messages begin and end at each place of the ring, the readers having read all before."""
    ring = Ring.create(2, 64)
    views = [Ring(ring.file, 2, reader) for reader in range(2)]

    def full() -> None:
        raise AssertionError("the ring has room")

    for start in range(0, 200, ahead):
        some = [bytes([i % 256] * (i % 12)) for i in range(start, start + ahead)]
        for message in some:
            ring.write(message, full)
        for view in views:
            assert [view.read() for _ in some] == some


@pytest.mark.parametrize("fast", [0, 1])
def test_the_writer_waits_for_the_slowest_reader(fast: int) -> None:
    """A reader that reads at once does not let the writer overwrite what the other has to read."""

    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    ring = Ring.create(2, 64)
    views = [Ring(ring.file, 2, reader) for reader in range(2)]
    ring.write(b"a" * 48, give_up)
    assert views[fast].read() == b"a" * 48
    with pytest.raises(GivenUpError):
        ring.write(b"b" * 48, give_up)
    assert views[1 - fast].read() == b"a" * 48


def test_a_reader_that_takes_nothing_holds_up_the_writer() -> None:
    """The writer can give up."""

    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    ring = Ring.create(2, 256)
    view = Ring(ring.file, 2)
    ring.write(b"x" * 100, give_up)
    assert view.read() == b"x" * 100
    with pytest.raises(GivenUpError):
        ring.write(b"y" * 200, give_up)


def test_heartbeats_are_counted_for_each_reader() -> None:
    ring = Ring.create(2)
    Ring(ring.file, 2, 1).beat()
    Ring(ring.file, 2, 1).beat()
    assert [ring.beats(0), ring.beats(1)] == [0, 2]
