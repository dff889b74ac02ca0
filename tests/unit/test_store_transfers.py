"""Records between files and pages: the staging buffer, its slots, and what fails."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from finwhale.engine.plan.prefix_store import Record
from finwhale.engine.plan.step_plan import PageCopy
from finwhale.engine.store.directory import DirectoryStore
from finwhale.engine.store.transfers import RecordTransfer, StoreTransfers

PAGE_BYTES = {"c4": 300, "c128": 20, "window": 70}
BLOCK, STATE = 320, 140
NUM_PAGES = 50


class Copies:
    """Copies of a device, which end when they are told to."""

    def __init__(self) -> None:
        self.ended = False

    def done(self) -> bool:
        return self.ended


class Device:
    """Pages in memory.

    Attributes:
        slow: copies end only at `end_copies`.
    """

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer = buffer
        draw = np.random.default_rng(0)
        self.pages = {
            name: draw.integers(256, size=(NUM_PAGES, size)).astype(np.uint8)
            for name, size in PAGE_BYTES.items()
        }
        self.slow = False
        self.launched: list[Sequence[PageCopy]] = []
        self._under_way: list[Copies] = []

    def copy(self, copies: Sequence[PageCopy]) -> Copies:
        self.launched.append(copies)
        for group, page, offset, load in copies:
            place = self.buffer[offset : offset + PAGE_BYTES[group]]
            if load:
                self.pages[group][page] = place
            else:
                place[:] = self.pages[group][page]
        found = Copies()
        found.ended = not self.slow
        self._under_way.append(found)
        return found

    def end_copies(self) -> None:
        for copies in self._under_way:
            copies.ended = True


class Machine:
    """A device with a store's transfers."""

    def __init__(self, path: Path, blocks: int = 4, states: int = 2) -> None:
        buffer = np.zeros(blocks * BLOCK + states * STATE, np.uint8)
        self.device = Device(buffer)
        self.store = DirectoryStore(path, "f1", {})
        slots = {
            "block": range(0, blocks * BLOCK, BLOCK),
            "state": range(blocks * BLOCK, len(buffer), STATE),
        }
        self.transfers = StoreTransfers(
            self.store, self.device.copy, memoryview(buffer), PAGE_BYTES, slots
        )

    @property
    def busy(self) -> bool:
        transfers = self.transfers
        some = transfers._waiting, transfers._to_copy, transfers._copies, transfers._files
        return any(some)

    def flush(self) -> None:
        """Wait until nothing is on its way."""
        while self.busy:
            self.transfers.advance()
            time.sleep(0.001)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.flush()
    made.transfers.close()


def block(number: int) -> Record:
    return Record(number.to_bytes(16, "big"), "block")


def pages(number: int) -> dict[str, tuple[int, ...]]:
    return {"c4": (number,), "c128": (number,)}


def content(device: Device, number: int) -> bytes:
    return b"".join(device.pages[name][number].tobytes() for name in ("c4", "c128"))


def finish(machine: Machine, *transfers: RecordTransfer | None) -> None:
    machine.flush()
    assert all(transfer is not None and transfer.done for transfer in transfers)


def test_a_record_comes_back_to_other_pages(machine: Machine, tmp_path: Path) -> None:
    before = content(machine.device, 7)
    state = Record(b"s" * 16, "state")
    windows = machine.device.pages["window"][[3, 9]].copy()
    finish(
        machine,
        machine.transfers.save(block(1), pages(7)),
        machine.transfers.save(state, {"window": (3, 9)}),
    )
    other = Machine(tmp_path)
    loads = [other.transfers.load(block(1), pages(20))]
    loads += [other.transfers.load(state, {"window": (30, 31)})]
    finish(other, *loads)
    assert not any(load.failed for load in loads)
    assert content(other.device, 20) == before
    assert (other.device.pages["window"][[30, 31]] == windows).all()
    other.transfers.close()


def test_pages_are_free_once_they_are_copied(machine: Machine) -> None:
    """The file may be written later."""
    machine.device.slow = True
    writing = threading.Event()
    write = machine.store.write
    machine.store.write = lambda *args: writing.wait(10) and write(*args)  # type: ignore
    saved = machine.transfers.save(block(1), pages(7))
    machine.transfers.advance()
    machine.transfers.advance()
    assert saved is not None and not saved.done
    machine.device.end_copies()
    machine.transfers.advance()
    assert saved.done and machine.busy
    writing.set()
    finish(machine, saved)


def test_saves_leave_slots_for_loads_and_are_given_up_beyond(machine: Machine) -> None:
    machine.device.slow = True
    saved = [machine.transfers.save(block(n), pages(n)) for n in range(4)]
    assert [s is not None for s in saved] == [True, True, False, False]
    machine.device.slow = False
    machine.flush()
    again = [machine.transfers.save(block(n), pages(n)) for n in range(2, 4)]
    finish(machine, *again)
    assert machine.store.contains([block(n) for n in range(4)]) == [True] * 4


def test_more_loads_than_slots(machine: Machine) -> None:
    for number in range(10):
        finish(machine, machine.transfers.save(block(number), pages(number)))
    wanted = [content(machine.device, number) for number in range(10)]
    loads = [machine.transfers.load(block(n), pages(20 + n)) for n in range(10)]
    finish(machine, *loads)
    assert [content(machine.device, 20 + n) for n in range(10)] == wanted
    assert not any(load.failed for load in loads)


def test_a_missing_or_damaged_record_fails_alone(machine: Machine, tmp_path: Path) -> None:
    for number in range(2):
        finish(machine, machine.transfers.save(block(number), pages(number)))
    (file,) = [p for p in tmp_path.rglob("*.block") if p.stem == block(1).key.hex()]
    file.write_bytes(b"x" + file.read_bytes()[1:])
    before = content(machine.device, 21)
    loads = [machine.transfers.load(block(n), pages(20 + n)) for n in range(3)]
    finish(machine, *loads)
    assert [load.failed for load in loads] == [False, True, True]
    assert content(machine.device, 21) == before  # nothing damaged reaches the device
    assert sum(load for copies in machine.device.launched for *_, load in copies) == 2


def test_loads_that_hang_are_given_up(machine: Machine) -> None:
    """The slot is free when the read returns, and what it read reaches no page."""
    finish(machine, machine.transfers.save(block(1), pages(7)))
    counts = machine.transfers.counts
    assert counts.read_blocks == counts.read_bytes == 0
    going_on = threading.Event()
    read = machine.store.read
    machine.store.read = lambda *args: going_on.wait(10) and read(*args)  # type: ignore
    before = content(machine.device, 20)
    loads = [machine.transfers.load(block(1), pages(20 + n)) for n in range(6)]
    machine.transfers.advance()
    machine.transfers.give_up_loads()
    assert all(load.done and load.failed for load in loads) and machine.busy
    going_on.set()
    machine.flush()
    assert content(machine.device, 20) == before
    assert counts.read_seconds > 0 and counts.read_blocks == 4 and counts.read_bytes == 4 * BLOCK
    (again,) = [machine.transfers.load(block(1), pages(20))]
    finish(machine, again)
    assert not again.failed and content(machine.device, 20) != before


def test_find(machine: Machine) -> None:
    """Without the first block, the others are of no use."""
    for number in (1, 3):
        finish(machine, machine.transfers.save(block(number), pages(number)))
    assert machine.transfers.find([block(1), block(2), block(3)]).result(10) == [True, False, True]
    assert machine.transfers.find([block(2), block(3)]).result(10) == [False, False]


def test_close_waits_for_what_is_written(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    write = machine.store.write

    def slowly(record: Record, data: memoryview) -> bool:
        time.sleep(0.1)
        return write(record, data)

    machine.store.write = slowly  # type: ignore
    machine.transfers.save(block(1), pages(1))
    machine.transfers.advance()
    machine.transfers.advance()
    machine.transfers.close()
    assert machine.store.contains([block(1)]) == [True]


def test_a_read_that_fails_counts_no_seconds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a peer that was silent for some seconds would make the store look slow."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for found in (False, True):

        def read(record: Record, into: memoryview, found: bool = found) -> bool:
            clock[0] += 7
            return found

        monkeypatch.setattr(machine.store, "read", read)
        machine.transfers._read([machine.transfers.load(block(1), pages(1))])
        assert machine.transfers.counts.read_seconds == (7 if found else 0)
