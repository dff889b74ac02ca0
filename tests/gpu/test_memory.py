"""What an engine holds on a GPU beside weights and cache."""

import gc
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from finwhale.config import EngineConfig
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.start.memory import GRAPH_BYTES
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights

pytestmark = pytest.mark.alone
# Allocator segments are rounded up. A process keeps its cuBLAS workspaces (32 MiB a stream): they
# count for its first engine alone.
SLACK = 160 * 2**20
# Barely more than the weights of four layers, with the bytes that may stay unused.
BARELY, UNUSED = 19.6 * 2**30, 1.4 * 2**30


def held(num_layers: int, **options: Any) -> dict[str, int]:
    """Open an engine on Flash, cut to `num_layers`, and return the bytes that it holds."""
    model = published("flash").without_draft_head().with_layers(num_layers)
    config = EngineConfig(device="cuda", max_num_seqs=16, max_model_len=8192, **options)
    source = Weights(model)
    # A workspace of cuBLAS may lie in a segment that an earlier engine left. torch keeps the whole
    # segment, and this engine fills it without reserving more.
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    memory = start_engine(config, model, source, None).memory
    free, total = torch.cuda.mem_get_info()
    return {"workspace": memory.workspace + left, "used": total - free, "gpu": total}


def in_a_new_process(num_engines: int, num_layers: int, **options: Any) -> list[dict[str, int]]:
    """Open engines in a new process, one after the other, and return the bytes that each holds.

    Their budget counts what other processes hold, so this process first frees what it can.
    """
    gc.collect()
    torch.cuda.empty_cache()
    call = [sys.executable, __file__, str(num_engines), str(num_layers), json.dumps(options)]
    done = subprocess.run(call, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_workspace_does_not_grow_with_the_layers() -> None:
    """One layer's temporaries lie where the previous layer's lay, captured or not."""
    (few,) = in_a_new_process(1, 4, cache_memory_bytes=2**30)
    (many,) = in_a_new_process(1, 12, cache_memory_bytes=2**30)
    growth = many["workspace"] - few["workspace"]
    assert few["workspace"] > 0
    # The driver keeps some memory for each node of a captured graph, so a little growth remains.
    assert -SLACK < growth < 8 * GRAPH_BYTES, (few, many)


def test_the_first_engine_holds_what_the_next_one_does() -> None:
    found = [one["workspace"] for one in in_a_new_process(3, 4, cache_memory_bytes=2**30)]
    assert max(found) - min(found) < SLACK, found


def test_the_first_engine_stays_within_its_budget() -> None:
    """The cache is sized by the budget: the whole engine uses no more of the GPU than allowed."""
    gc.collect()
    torch.cuda.empty_cache()
    free, gpu = torch.cuda.mem_get_info()
    barely = gpu - free + BARELY  # the budget counts what this process holds
    # With little memory the budget decides, with most of the GPU's the cache's own limit.
    for allowed in (barely, 0.9 * gpu):
        (found,) = in_a_new_process(1, 4, gpu_memory_utilization=allowed / gpu)
        assert found["used"] <= allowed, found
        if allowed == barely:
            assert found["used"] > allowed - UNUSED, found


def main() -> None:
    num_engines, num_layers, options = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    found = []
    for _ in range(num_engines):
        found.append(held(num_layers, **options))
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
