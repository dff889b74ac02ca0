"""Mixed load with aborts, on two GPUs if there are two: every token is that of the request alone.

Requests of Flash's first layers with random weights, MTP drafts and a cache that is too small for
all of them. FINWHALE_MIXED_SECONDS is the length of the load in seconds: 15, or for example 600.
FINWHALE_MIXED_DEVICE names other devices, for example cuda:0,0 for two ranks that share a GPU.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from tests.support.integrity import check_engine
from tests.support.processes import importable_tests

from finwhale import RequestOutput, SamplingParams
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.ranks.ranks import Ranks
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights

pytestmark = pytest.mark.alone
SECONDS = float(os.environ.get("FINWHALE_MIXED_SECONDS", "15"))
DEVICE = os.environ.get("FINWHALE_MIXED_DEVICE")
LONGEST, AT_ONCE = 12_000, 24
FREE = {"ignore_eos": True}
SHARED = 700  # tokens with which the prompts of every third request begin
MOST_GROWTH = 64 * 2**20  # bytes
PARAMS = (
    SamplingParams(temperature=0, max_tokens=150, **FREE),
    SamplingParams(temperature=0.9, seed=4, logprobs=2, max_tokens=90, **FREE),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, n=2, max_tokens=60, **FREE),
    SamplingParams(temperature=0.9, seed=6, presence_penalty=0.4, max_tokens=120, **FREE),
    SamplingParams(temperature=0, max_tokens=5, **FREE),
)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to LONGEST tokens, and how to continue them."""
    draw, found = random.Random(0), []
    shared = [draw.randrange(4000) for _ in range(SHARED)]
    for number in range(3 * len(PARAMS)):
        own = [draw.randrange(4000) for _ in range(int(LONGEST ** draw.random() ** 0.5))]
        found.append((shared + own if number % 3 == 0 else own, PARAMS[number % len(PARAMS)]))
    return found


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with importable_tests():  # the ranks import this module
        model = published("flash").with_layers(4)
        config = EngineConfig(
            device=DEVICE,
            tensor_parallel_size=None if DEVICE else min(2, torch.cuda.device_count()),
            draft_tokens=2,
            batch_invariant=True,
            max_num_seqs=16,
            max_model_len=16_384,
            max_num_batched_tokens=1024,
            cache_memory_bytes=57 * 10**6,  # 26,000 tokens: some sequences are preempted
        )
        engine = start_engine(config, model, Weights(model), None)
        yield engine
        if isinstance(engine.executor, Ranks):
            engine.executor.close()


def tokens(result: RequestOutput) -> list[list[int]]:
    return [list(output.token_ids) for output in result.outputs]


def used_bytes() -> list[int]:
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(total - free)
    return found


def test_mixed_load_with_aborts(engine: Engine) -> None:
    kinds, wanted = requests(), []
    for number, (prompt, params) in enumerate(kinds):
        result = engine.add_request(f"alone-{number}", prompt, params)
        while engine.has_work:
            engine.step()
        wanted.append(tokens(result))
    before, draw, counts = used_bytes(), random.Random(1), Counter[str]()
    running: dict[str, tuple[int, RequestOutput, int]] = {}
    end, longest = time.monotonic() + SECONDS, 0.0
    while running or time.monotonic() < end:
        while len(running) < AT_ONCE and time.monotonic() < end:
            kind = draw.randrange(len(kinds))
            name = f"load-{counts['started']}"
            counts["started"] += 1
            leaves = counts["steps"] + (draw.randrange(80) if draw.random() < 0.3 else 10**9)
            running[name] = kind, engine.add_request(name, *kinds[kind]), leaves
        began = time.monotonic()
        engine.step()
        longest = max(longest, time.monotonic() - began)
        counts["steps"] += 1
        for name, (kind, result, leaves) in list(running.items()):
            if result.finished:
                counts["finished"] += 1
                assert tokens(result) == wanted[kind], (name, kind)
            elif counts["steps"] >= leaves:
                counts["aborted"] += 1
                engine.abort(name)
                for found, whole in zip(tokens(result), wanted[kind], strict=True):
                    assert found == whole[: len(found)], (name, kind)
            else:
                continue
            del running[name]
    while engine.has_work:
        engine.step()
    check_engine(engine)
    metrics = engine.metrics()
    counts["preempted"], counts["drafts"] = metrics.preemptions, sum(metrics.drafts_accepted)
    print(json.dumps(dict(counts) | {"seconds": SECONDS, "longest_step_s": round(longest, 3)}))
    assert all(counts[what] for what in ("finished", "aborted", "preempted"))
    assert not any(metrics.late_compilations.values())
    growth = [after - first for after, first in zip(used_bytes(), before, strict=True)]
    assert max(growth) < MOST_GROWTH, growth
