"""How ranks open each other's memory to load together. Threads stand for ranks, and a memory of
the host for a GPU's; tests/gpu/test_joint_loading.py runs processes and GPUs.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.test_joint_loading import files as files
from tests.models.test_joint_loading import in_threads, weights_of
from tests.models.test_sharded_loading import tensors
from torch import Tensor

from finwhale.distributed.cuda_ipc import IpcHandle
from finwhale.distributed.peers import Peers, join_store, serve_store
from finwhale.distributed.rank import Rank
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.weights import joint_ranks
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint_ranks import JointRanks, PiecePart

CPU = torch.device("cpu")
THREAD = threading.local()


class Handle:
    """A handle of a memory, which must be opened or discarded once."""

    def __init__(self, form: list[int]) -> None:
        self.number, self.size_bytes = form

    def to_json(self) -> list[int]:
        return [self.number, self.size_bytes]


class Driver:
    """Shares memory among threads as CUDA IPC shares it among processes.

    Attributes:
        unused: numbers of the handles that were neither opened nor discarded.
        refuses: tells, for the number of a handle, whether it cannot be opened.
    """

    def __init__(self) -> None:
        self.memories: list[Tensor] = []
        self.unused: set[int] = set()
        self.refuses: Callable[[int], bool] = lambda number: False
        self.most = 10**9  # handles
        self.lock = threading.Lock()

    def export_handle(self, memory: Tensor) -> tuple[str, Handle]:
        if len(self.memories) >= self.most:
            raise RuntimeError("no such thing\nand more")
        with self.lock:
            self.memories.append(memory)
            self.unused.add(len(self.memories) - 1)
            return "uuid", Handle([len(self.memories) - 1, memory.nbytes])

    def open(self, handles: dict[str, Handle], device: torch.device) -> Tensor:
        number = handles["uuid"].number
        if self.refuses(number):
            raise FinwhaleError("no access")
        with self.lock:
            self.unused.remove(number)
        return self.memories[number]

    def discard(self, handle: Handle) -> None:
        with self.lock:
            self.unused.remove(handle.number)


class HostLane:
    """A lane that copies within the host's memory."""

    def __init__(self, ranks: JointRanks, device: torch.device, piece_bytes: int) -> None:
        self.buffer, self._ranks = np.empty(piece_bytes, np.uint8), ranks

    def wait(self) -> None:
        pass

    def send(self, num_bytes: int, parts: Iterable[PiecePart]) -> None:
        piece = self.buffer.ctypes.data
        for part in parts:
            addresses = self._ranks.addresses(part.name)
            for one in part.copies:
                for row in range(one.rows):
                    target = addresses[one.rank] + one.to + row * one.width
                    source = piece + part.begin + one.begin + row * one.pitch
                    ctypes.memmove(target, source, one.width)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    for name, fake in {
        "export_handle": found.export_handle,
        "open_buffer": found.open,
        "discard": found.discard,
        "uuid_of": lambda device: "uuid",
        "non_owning_view": lambda tensor: tensor,
        "Lane": HostLane,
    }.items():
        monkeypatch.setattr(joint_ranks, name, fake)
    monkeypatch.setattr(IpcHandle, "from_json", Handle)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    yield found
    assert not found.unused, "the owner of the memory could never free it"


def on_ranks(size: int, work: Callable[[JointRanks], Any]) -> list[Any]:
    """Call `work` for each rank; see `in_threads`."""
    store, address = serve_store()

    def work_of(index: int) -> Any:
        THREAD.rank = index
        peers = Peers(Rank(index, size), store if index == 0 else join_store(address))
        return work(JointRanks(peers, CPU))

    return in_threads(size, work_of)


def check_loading(files: Path, size: int) -> None:
    def load(ranks: JointRanks) -> ModelWeights:
        return weights_of(files, Rank(ranks.index, size), ranks)

    for index, weights in enumerate(on_ranks(size, load)):
        alone = dict(tensors(weights_of(files, Rank(index, size), None)))
        assert not isinstance(weights, Exception), weights
        for path, tensor in tensors(weights):
            assert torch.equal(tensor.float(), alone[path].float()), (index, path)


@pytest.mark.parametrize("size", (2, 4))
def test_weights_are_those_of_ranks_that_read_alone(files: Path, driver: Driver, size: int) -> None:
    check_loading(files, size)
    assert len(driver.memories) % (size * (size - 1)) == 0
    assert len(driver.memories) > size * (size - 1)


@pytest.mark.parametrize("why", ["export", "view", "open"])
def test_ranks_without_access_read_alone(
    files: Path,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    def view(tensor: Tensor) -> Tensor:
        if THREAD.rank == 1:  # rank 0 must tell the cause, although it does not fail itself
            raise TypeError("no such thing")
        return tensor

    if why == "export":
        driver.most = 3
    elif why == "view":
        monkeypatch.setattr(joint_ranks, "non_owning_view", view)
    else:
        driver.refuses = lambda number: number == 0
    with caplog.at_level(logging.WARNING):
        check_loading(files, 2)
    cause = "no access" if why == "open" else "no such thing"
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"each rank reads its weights alone: {cause}"]


@pytest.mark.parametrize("error", [None, MemoryError()])
def test_an_allocation_that_cannot_be_mapped_later_ends_the_loading(
    files: Path, driver: Driver, error: Exception | None
) -> None:
    def refuses(_: int) -> bool:
        if threading.current_thread().name != "joint ranks":
            return False
        if error is not None:
            raise error
        return True

    driver.refuses = refuses
    errors = on_ranks(2, lambda ranks: weights_of(files, Rank(ranks.index, 2), ranks))
    cause = "no access" if error is None else "MemoryError"
    assert [str(error).rpartition(": ")[2] for error in errors] == [cause] * 2


def test_a_load_can_follow_one_that_failed(files: Path, driver: Driver) -> None:
    """On the same store."""

    def load(ranks: JointRanks) -> Any:
        rank = Rank(ranks.index, 2)
        driver.refuses = lambda _: threading.current_thread().name == "joint ranks"
        with pytest.raises(FinwhaleError):
            weights_of(files, rank, ranks)
        ranks._peers.barrier()
        driver.refuses = lambda _: False
        ranks._peers.barrier()
        return dict(tensors(weights_of(files, rank, ranks)))

    for index, found in enumerate(on_ranks(2, load)):
        assert not isinstance(found, Exception), found
        for path, tensor in tensors(weights_of(files, Rank(index, 2), None)):
            assert torch.equal(tensor.float(), found[path].float()), (index, path)


def test_allocations_of_other_sizes_are_not_written(files: Path, driver: Driver) -> None:
    def open_(ranks: JointRanks) -> bool:
        return ranks.open(Destinations({"x": torch.zeros(64 + ranks.index, dtype=torch.uint8)}))

    assert on_ranks(2, open_) == [False, False]


def test_ranks_of_several_hosts_read_alone(
    files: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peers, "on_this_host", lambda self: 1)
    check_loading(files, 2)
    assert not driver.memories
