"""Sleep gives memory back, and nothing changes after wake."""

import ctypes
import io
import mmap
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine

from finwhale import LLM, RequestError, SamplingParams
from finwhale.engine.ranks.arena import CHUNK_BYTES, Arena
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.ranks.sleep import check_can_save
from finwhale.errors import ResourceError

from .weights import bits_of, forms_of, weights_of

LONG = [7 * i % 400 for i in range(300)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
outputs = partial(bits_of, prompts=[LONG, [1, 2, 3]], params=PARAMS)


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> LLM:
    options = {"device": "cpu", "activations": "exact", "cache_memory_bytes": 2**25}
    return LLM(tiny_path, max_num_seqs=4, enable_sleep_mode=True, **options)  # type: ignore[arg-type]


@pytest.fixture
def engine(shared: LLM, one_thread: None) -> Iterator[LLM]:
    yield shared
    assert not shared._engine.stops
    check_engine(shared._engine)


@pytest.fixture(scope="module")
def before(shared: LLM, llm_bits: list[object]) -> list[object]:
    assert outputs(shared) == llm_bits  # the arena changes no bit
    return llm_bits


@pytest.fixture(scope="module")
def llm_bits(shared_llm: LLM) -> list[object]:
    return outputs(shared_llm)


def resident(llm: LLM, tag: str) -> int:
    """Bytes of an arena that are in memory, as the system counts them."""
    libc, count = ctypes.CDLL(None), 0
    for chunk in first_rank(llm._engine.executor).arenas[tag]._chunks:
        address, size = chunk.bytes.data_ptr(), chunk.bytes.nbytes
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert not libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
        count += sum(page & 1 for page in pages)
    return count * mmap.PAGESIZE


@pytest.mark.parametrize("tags", [("weights", "cache"), ("weights",), ("cache",)])
def test_sleep_changes_nothing(tags: tuple[str, ...], engine: LLM, before: list[object]) -> None:
    held = {tag: resident(engine, tag) for tag in tags}
    addresses = [tensor.data_ptr() for tensor in weights_of(engine)]
    # Weights that stay awake are not dropped.
    engine.sleep(tags, drop_weights="weights" not in tags)  # type: ignore[arg-type]
    for tag, size in held.items():
        assert size > 2**17 and resident(engine, tag) < size // 20
    assert "weights" not in tags or not forms_of(engine)
    (refused,) = engine.generate([1, 2, 3], PARAMS)
    assert "is asleep" in str(refused.error)
    engine.wake(tags)  # type: ignore[arg-type]
    assert [tensor.data_ptr() for tensor in weights_of(engine)] == addresses
    assert engine.generate(LONG, PARAMS)[0].num_cached_tokens == 0
    assert outputs(engine) == before


def test_dropped_weights_need_an_update(engine: LLM, before: list[object], tiny_path: Path) -> None:
    engine.sleep(drop_weights=True)
    with pytest.raises(RequestError, match="the weights are asleep"):
        engine.update_weights(tiny_path)
    engine.wake(["weights"])
    with pytest.raises(RequestError, match="all of them"):
        engine.update_weights([], partial=True)
    assert engine._engine.stops
    engine.update_weights(tiny_path)
    assert engine._engine.stops  # the cache does
    engine.wake(["cache"])
    assert outputs(engine) == before
    engine.sleep(["weights"], drop_weights=True)
    engine.wake()
    with pytest.raises(RequestError, match="update_weights"):
        engine._engine.add_request("refused", [1, 2, 3], PARAMS)
    engine.update_weights(tiny_path)
    assert outputs(engine) == before


def test_an_update_goes_on_when_it_cannot_finish_yet(
    engine: LLM, before: list[object], tiny_path: Path
) -> None:
    engine._updates.begin()
    engine._updates.add(tiny_path)
    engine.sleep(["weights"], drop_weights=True)
    with pytest.raises(RequestError, match="the weights are asleep"):
        engine._updates.finish()
    engine.wake()
    with pytest.raises(RequestError, match="requests must be"):
        engine._updates.finish(requests="drop")  # type: ignore[arg-type]
    engine._updates.finish()
    assert outputs(engine) == before


def test_running_requests_wait_or_end(engine: LLM, before: list[object]) -> None:
    results = []
    for name, requests in (("kept", "recompute"), ("ended", "abort")):
        result = engine._engine.add_request(name, LONG, PARAMS)
        while len(result.outputs[0].token_ids) < 3:
            engine._engine.step()
        engine.sleep(requests=requests)  # type: ignore[arg-type]
        assert engine._engine.step() == ([result] if requests == "abort" else [])
        engine.wake()
        while not result.finished:
            engine._engine.step()
        results.append(result.outputs[0])
    assert results[0].token_ids == before[0][0]  # type: ignore[index]
    assert results[1].finish_reason == "abort" and len(results[1].token_ids) == 3


def test_a_paused_engine_sleeps_and_remains_paused(engine: LLM) -> None:
    engine.pause()
    engine.sleep(["cache"])
    engine.wake()
    assert engine._engine.stops
    engine.resume()


def test_weights_that_do_not_fit_the_host_stay_on_the_gpu(
    engine: LLM, before: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check alone sees a GPU."""
    gpu: Any = SimpleNamespace(
        runner=SimpleNamespace(device=torch.device("cuda")),
        arenas=first_rank(engine._engine.executor).arenas,
        weights=SimpleNamespace(ranks_on_host=2),
    )
    monkeypatch.setattr(
        "finwhale.engine.loop.control.check_can_save", lambda executor: check_can_save(gpu)
    )
    needed = 2 * gpu.arenas["weights"].num_bytes
    memory = "finwhale.engine.ranks.memory_checks.available_memory"
    monkeypatch.setattr(memory, lambda: needed - 1)
    with pytest.raises(ResourceError, match="sleep saves in host memory, take"):
        engine.sleep()
    assert not engine._engine.stops and outputs(engine) == before
    engine.sleep(["cache"])
    engine.wake()
    monkeypatch.setattr(memory, lambda: needed)
    engine.sleep()
    engine.wake()


def test_weights_that_do_not_fit_the_disk_stay_in_memory(
    engine: LLM, before: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = first_rank(engine._engine.executor).arenas["weights"].num_bytes
    usage = "finwhale.engine.ranks.memory_checks.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(ResourceError, match=r"sleep saves in temporary files, take .* TMPDIR"):
        engine.sleep()
    assert not engine._engine.stops and outputs(engine) == before
    engine.sleep(["cache"])
    engine.wake()
    monkeypatch.setattr(usage, lambda _: SimpleNamespace(free=needed))
    engine.sleep()
    engine.wake()


def test_wrong_uses_are_refused(engine: LLM, llm: LLM) -> None:
    with pytest.raises(RequestError, match="enable_sleep_mode"):
        llm.sleep()
    for tags in ("weights", [], ["kv"]):
        with pytest.raises(RequestError, match="tags"):
            engine.sleep(tags)  # type: ignore[arg-type]
    engine.sleep(["cache"])
    with pytest.raises(RequestError, match="already"):
        engine.sleep()
    engine.wake()
    engine.wake()  # nothing to do


def test_an_arena_keeps_views_of_one_memory() -> None:
    whole = torch.arange(1000, dtype=torch.float32)
    parts = [whole[:100].view(10, 10).mT, whole[100:], torch.empty(0)]
    copies = [part.clone() for part in parts]
    arena = Arena(torch.device("cpu"))
    arena.adopt(parts)
    for _ in range(2):
        assert all(map(torch.equal, parts, copies))
        assert parts[0].stride() == (1, 10)
        assert parts[1].data_ptr() == parts[0].data_ptr() + 400
        arena.release(keep=True)
        assert not parts[1].any()
        arena.restore()
    assert arena.num_bytes % mmap.PAGESIZE == 0


class ShortFile(io.FileIO):
    """A file of which each call reads or writes at most 1,000 bytes, as Linux does with 2 GiB."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:1000])

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:1000])


def test_an_arena_is_restored_by_several_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    monkeypatch.setattr("tempfile.TemporaryFile", lambda buffering: ShortFile(path, "w+"))
    arena = Arena(torch.device("cpu"))
    tensor = arena.empty(CHUNK_BYTES // 2)
    tensor.random_(generator=torch.Generator().manual_seed(0))
    kept = tensor.clone()
    arena.release(keep=True)
    assert not tensor.any()
    arena.restore()
    assert torch.equal(tensor, kept)
    arena.release(keep=True)
    os.truncate(path, 5000)
    with pytest.raises(ResourceError, match="lacks a part of the saved weights"):
        arena.restore()
