"""Tables whose rows a model looks up: once in host memory for all ranks, outside their weights."""

import ctypes
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finwhale import LLM, CheckpointError, FinwhaleError, ResourceError, SamplingParams
from finwhale.demo import V41_PATH
from finwhale.distributed.peers import Peers
from finwhale.engine.ranks import memory_checks, staged_weights
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start import decisions
from finwhale.models.deepseek_v41 import host_tables
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.weights import table
from finwhale.weights.source import WeightSource
from finwhale.weights.table import LookupTable
from finwhale.weights.tree import leaves

pytestmark = pytest.mark.usefixtures("forked_ranks")
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 2,
    "max_model_len": 512,
    "cache_memory_bytes": 2**24,
}
TABLES = "layers.1.engram.embed.weight", "layers.4.engram.embed.weight"


def opened(path: Path, **options: Any) -> LLM:
    return LLM(path, **OPTIONS, **options)


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    (result,) = llm.generate([{"prompt_token_ids": list(range(20, 60))}], params)
    assert result.error is None
    return [hash(str(result.outputs[0].logprobs)), *result.outputs[0].token_ids]


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    """Two ranks that can sleep."""
    with opened(V41_PATH, tensor_parallel_size=2, enable_sleep_mode=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def before(two: LLM) -> list[int]:
    return tokens(two)


def changed_tensors() -> dict[str, Tensor]:
    """The embedded checkpoint's, with the rows of the tables in another order."""
    tensors = load_file(V41_PATH / "model.safetensors")
    return tensors | {name: tensors[name].flip(0).contiguous() for name in TABLES}


@pytest.fixture(scope="module")
def changed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(V41_PATH, path)
    save_file(changed_tensors(), path / "model.safetensors")
    return path


def maps(executor: LocalExecutor) -> tuple[int, set[str]]:
    """The process of a rank, and the inodes of the tables that it maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = (re.search(r" (\d+) */memfd:finwhale-tables", line) for line in lines)
    return os.getpid(), {match[1] for match in found if match}


def tables_are_there(executor: LocalExecutor) -> bool:
    """Whether this rank's tables have values while its weights do not."""
    weights = executor.runner.model.weights
    tables = [table for table in leaves(weights, LookupTable) if isinstance(table, LookupTable)]
    return len(tables) == 2 and all(table.rows.float().any() for table in tables)


def test_ranks_map_the_same_memory(two: LLM, before: list[int]) -> None:
    """Two tables and their scales, in two processes. This one may map those of other tests."""
    (one, inodes), (other, others) = two._engine.executor.call_ranks(maps)
    assert one != other and len(others) == 4 and others <= inodes
    with opened(V41_PATH) as alone:
        assert tokens(alone)[1:] == before[1:]
    two.sleep()
    two.wake()
    assert tokens(two) == before


def test_updates(two: LLM, before: list[int], changed_path: Path) -> None:
    """From files with the tables, of which each rank writes a part; in place without them."""
    two.update_weights(changed_path)
    with opened(changed_path, tensor_parallel_size=2) as fresh:
        wanted = tokens(fresh)
    assert tokens(two) == wanted != before
    tensors = load_file(V41_PATH / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed\.\w+ is a lookup table: leave it out"):
        two.update_weights(tensors.items())
    assert tokens(two) == wanted
    names = {name.replace("weight", end) for name in TABLES for end in ("weight", "scale")}
    two.sleep(drop_weights=True)
    assert two._engine.executor.call_ranks(tables_are_there) == [True, True]
    two.wake()
    two.update_weights((n, t) for n, t in tensors.items() if n not in names)
    assert tokens(two) == wanted
    two.update_weights(V41_PATH)
    assert tokens(two) == before


def test_a_host_with_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is read. Random weights do without the memory."""
    monkeypatch.setattr(memory_checks, "available_memory", lambda: 64 * 10**9)
    monkeypatch.setattr(decisions, "table_bytes", lambda *_: 203 * 10**9)
    monkeypatch.setattr(WeightSource, "into", lambda *_: pytest.fail("a weight is read"))
    message = r"lookup tables, .* take 203\.0 GB, and 64\.0 GB of memory are free"
    with pytest.raises(ResourceError, match=message):
        opened(V41_PATH)
    with opened(V41_PATH, load_format="dummy") as llm:
        assert len(tokens(llm)) == 13
        assert not tables_are_there(first_rank(llm._engine.executor))


def test_random_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens look up rows that exist, and no file replaces a table that is smaller than its own."""
    for module in (table, host_tables, staged_weights):
        monkeypatch.setattr(module, "DUMMY_ROWS", 90)
    with opened(V41_PATH, load_format="dummy") as llm:
        model = first_rank(llm._engine.executor).runner.model
        tables = [t for t in leaves(model.weights, LookupTable) if isinstance(t, LookupTable)]
        assert [len(each.rows) for each in tables] == [90, 90]
        assert len(tokens(llm)) == 13
        with pytest.raises(CheckpointError, match="are random and have 90 rows"):
            llm.update_weights(V41_PATH)
        assert isinstance(model, DeepseekV41)
        for layer in model.layers:
            if layer.engram is not None:
                ends = (layer.engram.hashes.starts + layer.engram.hashes.sizes).flatten()
                assert ends.tolist() == list(range(15, 91, 15))


class FakeCuda:
    """In place of CUDA's runtime: notes which memory is pinned."""

    def __init__(self, result: int) -> None:
        self.result, self.calls = result, list[tuple[int, ...]]()

    def cudaHostRegister(self, *call: int) -> int:
        self.calls.append(call)
        return self.result

    def cudaHostUnregister(self, address: int) -> None:
        ctypes.string_at(address, 1)  # it is still mapped
        self.calls.append((address,))

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


def test_memory_is_pinned_until_no_tensor_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    memory = host_tables.shared_zeros(Peers(), 8192)
    part = torch.frombuffer(memory, dtype=torch.uint8)[4096:]
    memory.pin()
    del memory
    (call,) = cuda.calls
    assert call == (part.data_ptr() - 4096, 8192, 3)
    del part
    assert cuda.calls == [call, call[:1]]
    cuda.result = 2
    with pytest.raises(FinwhaleError, match=r"pin 4,096 bytes of host memory.*: error 2"):
        host_tables.shared_zeros(Peers(), 4096).pin()
    assert len(cuda.calls) == 3  # what is not pinned is not freed


def test_a_prefix_store_knows_the_tokenizer(tmp_path: Path) -> None:
    """Engram's ids follow from it, so pages of another tokenizer are others."""
    shutil.copytree(V41_PATH, tmp_path / "model")
    found = set()
    for seconds in (1, 2):
        os.utime(tmp_path / "model/tokenizer.json", (seconds, seconds))
        with opened(tmp_path / "model", prefix_store=str(tmp_path / "store")) as llm:
            stored = llm._engine.scheduler.admission.stored
            assert stored is not None and stored.name is not None
            found.add(stored.name.fingerprint)
    assert len(found) == 2
