"""Ranks that read a checkpoint together: each byte once, and the same weights as ranks alone."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.test_sharded_loading import QUANTISED, loaded, opened, tensors
from tests.support.official_config import config_json
from tests.support.tiny import random_weights
from tests.support.writer import write_checkpoint

from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import WeightSpec
from finwhale.checkpoint.stored import StoredWeight
from finwhale.checkpoint.writer import write_stored
from finwhale.distributed.rank import Rank
from finwhale.errors import CheckpointError, OtherRankError
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.weights.destinations import Destinations
from finwhale.weights.dummy import DummySource
from finwhale.weights.joint import JointReader
from finwhale.weights.joint_ranks import JointRanks, Lane, PiecePart
from finwhale.weights.source import WeightSource


class Threads:
    """What the threads of all ranks share: their destinations, and their faults."""

    def __init__(self, size: int, can_share: bool = True) -> None:
        self.size, self.can_share = size, can_share
        self.destinations = [Destinations() for _ in range(size)]
        self.faults: list[str | None] = [None] * size
        self.barrier = threading.Barrier(size)

    def rank(self, index: int) -> "ThreadRank":
        return ThreadRank(self, index)


class ThreadRank(JointRanks):
    """A rank that is a thread."""

    def __init__(self, threads: Threads, index: int) -> None:
        self._threads, self.index, self.size = threads, index, threads.size
        self.closed = 0

    def open(self, destinations: Destinations) -> bool:
        self._threads.destinations[self.index] = destinations
        self._threads.barrier.wait(120)
        return self._threads.can_share

    def lane(self, piece_bytes: int) -> "ThreadLane":
        return ThreadLane(piece_bytes, self._threads)

    def begin_thread(self) -> None:
        pass

    def has_failed(self) -> bool:
        return any(self._threads.faults)

    def close(self, fault: str | None) -> None:
        self.closed += 1
        self._threads.faults[self.index] = fault
        self._threads.barrier.wait(120)
        for index, text in enumerate(self._threads.faults):
            if text is not None and fault is None:
                raise OtherRankError(f"rank {index}: {text}")


class ThreadLane(Lane):
    def __init__(self, piece_bytes: int, threads: Threads) -> None:
        self.buffer, self._threads = np.empty(piece_bytes, np.uint8), threads

    def wait(self) -> None:
        pass

    def send(self, num_bytes: int, parts: Iterable[PiecePart]) -> None:
        piece = torch.from_numpy(self.buffer[:num_bytes])
        for part in parts:
            for one in part.copies:
                target = self._threads.destinations[one.rank][part.name][one.to :]
                target = target[: one.rows * one.width].view(one.rows, one.width)
                rows = piece[part.begin + one.begin :]
                target.copy_(rows.as_strided((one.rows, one.width), (one.pitch, 1)))


class JointSource(WeightSource):
    """Reads as for a GPU."""

    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        return self._staged(destinations, ranks)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("joint")
    source = DummySource(weight_specs(QUANTISED), "cpu", seed=3)
    write_stored(path, config_json(QUANTISED), source, max_shard_bytes=1_000_000)
    return path


@pytest.fixture(params=[1 << 13, 1 << 24])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones: most tensors take several. Large: hundreds of tensors share one.

    Unquantised weights of any size have destinations.
    """
    monkeypatch.setattr("finwhale.weights.allocation.LARGE_BYTES", 0)
    reader = partial(JointReader, piece_bytes=request.param)
    monkeypatch.setattr("finwhale.weights.source.JointReader", reader)


def destinations_of(stream: WeightSource) -> Destinations:
    return Destinations(
        {
            info.name: torch.empty(info.num_bytes, dtype=torch.uint8)
            for name in stream.storages
            for info in stream._parts(name)
            if ".ffn.experts." in name
        }
    )


def all_ranks(threads: Threads, load: Callable[[ThreadRank], Any]) -> list[Any]:
    return in_threads(threads.size, lambda index: load(threads.rank(index)))


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` with each of the indices below `size`, each in its own thread.

    Returns:
        For each index, the result of the call, or the exception that it raised.
    """

    def result(index: int) -> Any:
        try:
            return work(index)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(result, range(size)))


def weights_of(files: Path, rank: Rank, ranks: JointRanks | None) -> ModelWeights:
    config, stream = opened(files, rank, JointSource)
    return loaded(config, stream, rank, packed=True, ranks=ranks)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("whole_attention", (False, True))
@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.long), 8))
def test_weights_are_those_of_ranks_that_read_alone(
    files: Path, size: int, whole_attention: bool
) -> None:
    """With whole_attention, some weights have two targets; only the first is a destination."""

    def load(ranks: ThreadRank) -> ModelWeights:
        return weights_of(files, Rank(ranks.index, size, whole_attention), ranks)

    for index, weights in enumerate(all_ranks(Threads(size), load)):
        rank = Rank(index, size, whole_attention)
        alone = dict(tensors(loaded(*opened(files, rank), rank, packed=True)))
        joint = dict(tensors(weights))
        assert joint.keys() == alone.keys()
        for path, tensor in joint.items():
            assert torch.equal(tensor.float(), alone[path].float()), (index, path)


def test_ranks_read_weights_with_float32_scales(tmp_path: Path) -> None:
    """They need no conversion of E8M0 scales, so they are not read directly."""
    config = config_json(QUANTISED)
    specs, weights = weight_specs(QUANTISED), random_weights(config, 1)
    write_checkpoint(tmp_path, config, weights.items(), specs, scale_dtype=torch.float32)
    rank = Rank(1, 2)
    wanted = dict(tensors(loaded(*opened(tmp_path, rank), rank, packed=True)))
    found = all_ranks(Threads(2), lambda one: weights_of(tmp_path, Rank(one.index, 2), one))[1]
    for path, tensor in tensors(found):
        assert torch.equal(tensor.float(), wanted.pop(path).float()), path
    assert not wanted


@pytest.mark.parametrize("slab_bytes", (256, 100_000))
def test_weights_in_slabs_are_those_with_separate_memory(
    files: Path, monkeypatch: pytest.MonkeyPatch, slab_bytes: int
) -> None:
    rank = Rank(1, 2)
    separate = dict(tensors(weights_of(files, rank, None)))
    monkeypatch.setattr("finwhale.weights.allocation.SLAB_DEVICES", ("cpu",))
    monkeypatch.setattr("finwhale.weights.allocation.FIRST_SLAB_BYTES", slab_bytes)
    monkeypatch.setattr("finwhale.weights.allocation.SLAB_BYTES", 2 * slab_bytes)
    weights = dict(tensors(weights_of(files, rank, None)))
    assert weights.keys() == separate.keys()
    for path, tensor in weights.items():
        assert torch.equal(tensor.float(), separate[path].float()), path
    memories = {t.untyped_storage().data_ptr() for t in weights.values()}
    assert len(memories) < len(weights) / (2 if slab_bytes > 256 else 1)
    layers = [path.split(".experts.")[0] for path in weights if path.endswith(".ffn.experts.w13")]
    for layer in layers:
        parts = [t for path, t in weights.items() if path.startswith(f"{layer}.experts.")]
        assert len({t.untyped_storage().data_ptr() for t in parts}) == 1, layer
    assert layers


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("size", (2, 8))
def test_the_ranks_read_each_byte_of_their_destinations_once(
    files: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    read_at, lock = os.preadv, threading.Lock()
    reads = {f.name: np.zeros(f.stat().st_size) for f in files.iterdir()}

    def preadv(number: int, views: list[memoryview], offset: int) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{number}")).name
        with lock:
            reads[name][offset : offset + len(views[0])] += 1
        return read_at(number, views, offset)

    monkeypatch.setattr("finwhale.weights.staging.os.preadv", preadv)

    def load(ranks: ThreadRank) -> ModelWeights:
        return weights_of(files, Rank(ranks.index, size, whole_attention=size == 2), ranks)

    all_ranks(Threads(size), load)
    once = ("embed.weight", "head.weight", ".ffn.experts.", ".compressor.wkv.weight", ".attn.wo_b.")
    found = dict.fromkeys(once, 0)
    for name, info in Checkpoint.open(files).tensors.items():
        counts = reads[info.file][info.offset :][: info.num_bytes]
        kind = next((one for one in once if one in name), None)
        assert (counts == 1).all() if kind else (counts >= 1).all(), name
        if kind:
            found[kind] += 1
    assert all(found.values()), found


@pytest.mark.usefixtures("pieces")
def test_ranks_that_cannot_share_read_alone(files: Path) -> None:
    def load(ranks: ThreadRank) -> ModelWeights:
        weights = weights_of(files, Rank(ranks.index, 2), ranks)
        assert not ranks.closed
        return weights

    for index, weights in enumerate(all_ranks(Threads(2, can_share=False), load)):
        alone = dict(tensors(weights_of(files, Rank(index, 2), None)))
        for path, tensor in tensors(weights):
            assert torch.equal(tensor.float(), alone[path].float()), (index, path)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("failing", (0, 1))
@pytest.mark.parametrize("error", [None, MemoryError()])
def test_a_fault_of_one_rank_stops_all(
    files: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: Exception | None
) -> None:
    """Each rank closes once, and all tell the same cause, also if the error has no message."""
    monkeypatch.setattr("finwhale.weights.joint.PIECES_A_CHECK", 1)
    read = JointReader._read

    def failing_read(self: JointReader, piece: Any, buffer: Any) -> None:
        if self._ranks.index == failing:
            if error is not None:
                raise error
            piece = replace(piece, file="missing")
        read(self, piece, buffer)

    monkeypatch.setattr(JointReader, "_read", failing_read)
    closed = []

    def load(ranks: ThreadRank) -> ModelWeights:
        try:
            return weights_of(files, Rank(ranks.index, 2), ranks)
        finally:
            closed.append(ranks.closed)

    errors = all_ranks(Threads(2), load)
    assert closed == [1, 1]
    assert "No such file" in str(errors[failing]) if error is None else errors[failing] is error
    assert isinstance(errors[1 - failing], OtherRankError)
    cause = str(errors[failing]) or "MemoryError"
    assert str(errors[1 - failing]) == f"rank {failing}: {cause}"


def test_an_error_of_the_last_pieces_is_not_lost(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may notice it only when the pieces should have arrived."""

    own_turns, thread = JointReader._own_turns, threading.local()

    def noted(self: JointReader) -> Iterator[Any]:
        thread.has_read = False
        yield from own_turns(self)
        thread.has_read = True

    def wait(lane: ThreadLane) -> None:
        if thread.has_read:
            raise CheckpointError("error 719")

    monkeypatch.setattr(JointReader, "_own_turns", noted)
    monkeypatch.setattr(ThreadLane, "wait", wait)

    def load(ranks: ThreadRank) -> Any:
        return weights_of(files, Rank(ranks.index, 2), ranks)

    # Otherwise the slower rank might stop before it has an error of its own.
    monkeypatch.setattr(ThreadRank, "has_failed", lambda self: False)
    for error in all_ranks(Threads(2), load):
        assert isinstance(error, CheckpointError) and str(error) == "error 719"


def test_a_rank_does_not_read_on_after_another_has_failed(files: Path) -> None:
    """It stops in the middle of what it reads alone."""
    counts = [0, 0]

    def load(ranks: ThreadRank) -> Any:
        _, stream = opened(files, Rank(ranks.index, 2), JointSource)
        destinations = destinations_of(stream)
        for _ in stream.into(destinations, ranks):
            counts[ranks.index] += 1
            if not ranks.index:
                raise CheckpointError("no room")
            while not ranks.has_failed():
                time.sleep(0.001)
        return None

    first, second = all_ranks(Threads(2), load)
    assert str(first) == "no room"
    assert isinstance(second, OtherRankError)
    assert counts[0] == 1 and counts[1] < 60


def test_a_consumer_that_stops_tells_the_other_ranks(files: Path) -> None:
    def load(ranks: ThreadRank) -> Any:
        _, stream = opened(files, Rank(ranks.index, 2), JointSource)
        stopped: Any = stream.into(destinations_of(stream), ranks)
        next(stopped)
        if ranks.index:
            return list(stopped)
        stopped.close()
        return ranks.closed

    closed, error = all_ranks(Threads(2), load)
    assert closed == 1
    assert isinstance(error, OtherRankError) and "rank 0: loading stopped" in str(error)
