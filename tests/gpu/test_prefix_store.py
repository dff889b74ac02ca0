"""A prefix store on a GPU: loaded pages have the saved bytes, and requests the same tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stored_pages import digests, run, saved

from finwhale import SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.config import EngineConfig
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop import control
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.start.kv_cache import CachePlan, allocate_cache
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights

PROMPTS = [
    [2 + (31 * i * i + 7 * n) % 4000 for i in range(size)] for n, size in ((0, 630), (1, 890))
]
CACHED = [512, 768]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@dataclass
class Server:
    """Starts an engine with a store."""

    model: str
    options: dict[str, Any]

    def open(self, store: Path) -> Engine:
        options = {"max_num_seqs": 4, "max_model_len": 2048, "cache_memory_bytes": 2**30}
        config = EngineConfig(device="cuda", prefix_store=str(store), **options, **self.options)
        if self.model == "flash":
            model = published("flash").without_draft_head().with_layers(4)
            return start_engine(config, model, Weights(model), None)
        checkpoint = Checkpoint.open(DEMO_PATH)
        model = config_of(checkpoint.config)
        return start_engine(config, model, Weights(model, checkpoint), None)


@pytest.fixture(
    params=[
        pytest.param(("flash", {}), id="flash"),
        pytest.param(("flash", {"batch_invariant": True, "enable_sleep_mode": True}), id="exact"),
        pytest.param(("demo", {"batch_invariant": True, "draft_tokens": 1}), id="drafts"),
    ]
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield Server(*request.param)


def test_bytes_that_no_step_has_written_are_zero() -> None:
    """Otherwise, ranks and stores would hold pages that differ."""
    torch.full((2**28,), 255, dtype=torch.uint8, device="cuda")  # torch reuses this memory
    groups = cache_spec(published("flash").with_layers(4))
    plan = CachePlan({group.name: 100 for group in groups}, 0, 0, 0)
    cache = allocate_cache(groups, plan, torch.bfloat16, torch.device("cuda"), packed=True)
    assert not any(pages.any() for pages in cache.pages.values())


def answers(engine: Engine, cached: Sequence[int]) -> Sequence[object]:
    """Run each prompt alone; returns its tokens and logprobs. `cached`: how many tokens of each
    prompt must be found in the cache.
    """
    found = []
    for prompt, count in zip(PROMPTS, cached, strict=True):
        result = run(engine, prompt, PARAMS)
        assert result.num_cached_tokens == count
        (output,) = result.outputs
        tables = output.logprobs or []
        found.append((output.token_ids, [{i: p.logprob for i, p in t.items()} for t in tables]))
    saved(engine)
    return found


def test_what_comes_back(server: Server, tmp_path: Path) -> None:
    """After an eviction, after sleep, and after a restart."""
    engine = server.open(tmp_path)
    computed = answers(engine, [0, 0])
    pages = [digests(engine, prompt) for prompt in PROMPTS]
    hit = answers(engine, CACHED)
    if engine.config.batch_invariant:
        assert hit == computed
    engine.reset_prefix_cache()
    assert answers(engine, CACHED) == hit
    assert [digests(engine, prompt) for prompt in PROMPTS] == pages
    if engine.config.enable_sleep_mode:
        control.sleep(engine)
        control.wake(engine)
        assert answers(engine, CACHED) == hit
        assert [digests(engine, prompt) for prompt in PROMPTS] == pages
    assert not any(engine.metrics().late_compilations.values())
    engine.close()
    engine = server.open(tmp_path)
    assert answers(engine, CACHED) == hit
    assert [digests(engine, prompt) for prompt in PROMPTS] == pages
    counts = engine.metrics().store
    assert counts is not None and counts.failed == 0 and counts.loads == 2
    engine.close()


def test_loads_and_saves_beside_running_requests(tmp_path: Path) -> None:
    """While four requests decode, others save and load; none has another token than alone."""
    server = Server("flash", {"batch_invariant": True})
    engine = server.open(tmp_path)
    wanted = [run(engine, prompt, PARAMS).outputs[0].token_ids for prompt in PROMPTS]
    long = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    alone = [run(engine, prompt[:9], long).outputs[0].token_ids for prompt in PROMPTS]
    saved(engine)
    running = [engine.add_request(f"r{n}", p[:9], long) for n, p in enumerate(PROMPTS)]
    for number in range(12):
        engine.reset_prefix_cache()
        result = engine.add_request(f"l{number}", PROMPTS[number % 2], PARAMS)
        while not result.finished:
            engine.step()
        assert result.num_cached_tokens == CACHED[number % 2]
        assert result.outputs[0].token_ids == wanted[number % 2]
    while engine.has_work:
        engine.step()
    assert [result.outputs[0].token_ids for result in running] == alone
    counts = engine.metrics().store
    assert counts is not None and counts.failed == counts.skipped == 0 and counts.loads == 12
    engine.close()
