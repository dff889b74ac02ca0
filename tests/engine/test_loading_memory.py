"""Loading reads a file at a time: peak memory, progress, every tensor once."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.tiny import (
    QUANTISATION,
    random_weights,
    tiny_config,
    write_quantised_checkpoint,
)
from tests.support.writer import write_checkpoint
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.checkpoint.reader import Checkpoint, TensorReader
from finwhale.checkpoint.spec import WeightSpec
from finwhale.config import DtypeName
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs

SHARD_BYTES = 24_000_000
MB = 1_000_000


def cheap_weights(specs: dict[str, WeightSpec]) -> Iterator[tuple[str, Tensor]]:
    """One row of noise, repeated: quick to make, and no model would tell."""
    generator = torch.Generator().manual_seed(0)
    for name, spec in specs.items():
        if spec.storage == "i64":
            yield name, torch.zeros(spec.shape, dtype=torch.int64)
        else:
            row = torch.randn(spec.shape[-1], generator=generator) / spec.shape[-1] ** 0.5
            yield name, row.expand(spec.shape)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of about 260 MB in FP8, in files of 24 MB."""
    config = tiny_config(3) | {
        "hidden_size": 1024,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 16,
        "num_hidden_layers": 4,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 4, 0],
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp8",
        "quantization_config": QUANTISATION,
    }
    specs = weight_specs(config_of(config))
    path = tmp_path_factory.mktemp("large") / "model"
    write_checkpoint(path, config, cheap_weights(specs), specs, max_shard_bytes=SHARD_BYTES)
    return path


LOAD = """
import json, sys
import torch
from finwhale import LLM
import finwhale.engine.loop.engine, finwhale.models.deepseek_v4.weights

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

torch.zeros(100, 100) @ torch.zeros(100, 100)
before = status("VmRSS")
seen = []
llm = LLM(sys.argv[1], device="cpu", dtype=sys.argv[2], max_num_seqs=1, max_num_batched_tokens=64,
          progress=lambda done, total: seen.append((done, total)))
print(json.dumps({"peak": status("VmHWM") - before, "held": status("VmRSS") - before,
                  "cache": llm._engine.memory.cache, "progress": seen}))
"""


def weight_bytes(config: DeepseekV4Config, itemsize: int) -> int:
    """As the engine holds them: projections in its dtype, what must be exact in float32."""
    total = 0
    for spec in weight_specs(config).values():
        exact = spec.storage == "f32" or "norm" in spec.name or "gate" in spec.name
        exact = exact or ".compressor." in spec.name or "weights_proj" in spec.name
        size = 8 if spec.storage == "i64" else 4 if exact else itemsize
        count = 1
        for length in spec.shape:
            count *= length
        total += count * size
    return total


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_peak_memory_while_loading(large: Path, dtype: DtypeName) -> None:
    """Model bytes, a file's mapped pages, and one dequantised tensor: not a second model."""
    checkpoint = Checkpoint.open(large)
    assert len(checkpoint.shards()) > 8 and checkpoint.total_bytes > 250 * MB
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(large), dtype],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    config = config_of(checkpoint.config)
    model = weight_bytes(config, 2 if dtype == "bfloat16" else 4)
    peak = report["peak"] - report["cache"]
    assert report["held"] > 0.9 * model, "the weights are not in memory yet: nothing is measured"
    assert peak < model + 2 * SHARD_BYTES + 50 * MB, f"{peak / MB:.0f} over {model / MB:.0f} MB"
    steps = [step for step, _ in report["progress"]]
    assert steps == sorted(set(steps))
    assert {total for _, total in report["progress"]} == {checkpoint.total_bytes}
    assert steps[-1] == checkpoint.total_bytes


def test_every_tensor_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Scales too; and in the quantised layout the model runs."""
    config = tiny_config(1, quantised=True)
    write_quantised_checkpoint(tmp_path / "model", config, random_weights(config, 1))
    reads: Counter[str] = Counter()
    read = TensorReader.read

    def counting(self: TensorReader, name: str) -> Tensor:
        reads[name] += 1
        return read(self, name)

    monkeypatch.setattr(TensorReader, "read", counting)
    for dtype in ("float32", "bfloat16"):
        reads.clear()
        llm = LLM(tmp_path / "model", device="cpu", dtype=dtype)  # type: ignore[arg-type]
        assert set(reads) == set(Checkpoint.open(tmp_path / "model").tensors)
        assert set(reads.values()) == {1}
        assert first_rank(llm._engine.executor).runner.model.draft_head is not None
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (result,) = llm.generate([[5, 6, 7]], params)
        assert result.error is None and len(result.outputs[0].token_ids) == 4
