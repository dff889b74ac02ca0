"""The ring: every reader gets every message, whole and in order."""

import random
import threading
import time

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
    views = [Ring(ring.file, 2) for _ in range(2)]
    found: list[list[bytes]] = [[], []]

    def read(reader: int) -> None:
        for _ in messages:
            found[reader].append(views[reader].read(reader))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        ring.write(message, wait)
    for thread in threads:
        thread.join(60)
    assert found == [messages, messages]


def test_a_reader_that_takes_nothing_holds_up_the_writer() -> None:
    """The writer can give up."""

    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    ring = Ring.create(2, 256)
    view = Ring(ring.file, 2)
    ring.write(b"x" * 100, give_up)
    assert view.read(0) == b"x" * 100
    with pytest.raises(GivenUpError):
        ring.write(b"y" * 200, give_up)


def test_heartbeats_are_counted_for_each_reader() -> None:
    ring = Ring.create(2)
    Ring(ring.file, 2).beat(1)
    Ring(ring.file, 2).beat(1)
    assert [ring.beats(0), ring.beats(1)] == [0, 2]
