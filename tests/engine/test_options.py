"""Options of which no other test starts an engine (docs/testing.md)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finwhale import LLM, SamplingParams

TEXT = [(7 * i) % 390 for i in range(300)]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def keys(llm: LLM) -> list[bytes]:
    """The keys of the blocks that a prompt has left in the prefix index."""
    prefix = llm._engine.scheduler.prefix
    assert prefix is not None
    return sorted(prefix.blocks)


def test_options_together(
    new_llm: Callable[..., LLM], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The options that only a GPU uses change nothing on a CPU."""
    salt = {"prefix_salt": "sesame"}
    options: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "distributed_executor": "spawn",
        "whole_attention": False,
        "batch_invariant": True,
        "enforce_eager": True,
        "graph_sizes": (1, 2),
        "gpu_memory_utilization": 0.5,
        "cache_dir": str(tmp_path / "cache"),
        "watchdog_seconds": 0.002,
    }
    plain, salted, llm = new_llm(), new_llm(**salt), new_llm(**salt, **options)
    found = [one.generate([TEXT], GREEDY)[0].outputs[0].token_ids for one in (plain, salted, llm)]
    assert found == [found[0]] * 3
    assert keys(llm) == keys(salted) != keys(plain)
    assert "a step has taken 0.002 seconds; stacks:" in capfd.readouterr().err


def test_min_p_of_1_keeps_the_best_token(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, min_p=1.0, max_tokens=5, ignore_eos=True)
    one, other = (llm.generate([TEXT], p)[0].outputs[0].token_ids for p in (params, GREEDY))
    assert one == other
