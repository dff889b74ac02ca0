"""DeepSeek-V4.1 served by an engine with its kernels: captured steps, drafts, starts, and its bits.

The embedded model has every kind of layer, and small sizes. `wide` has Flash's heads.
"""

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.v41_reference import engram_primes
from tests.support.stepping import Stepper
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.config import EngineConfig
from finwhale.demo import V41_PATH
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.graphs import Graphs
from finwhale.engine.steps.runner import ModelRunner
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.models.deepseek_v41.presets import PUBLISHED
from finwhale.models.step_inputs import Inline
from finwhale.models.weight_sources import Weights

from ..engine.dspark_steps import RunTwice, generate, same_pages  # noqa: TID252
from ..engine.test_verification import Oracle  # noqa: TID252
from .test_dspark import verifications
from .test_start import serve_every_length

SMALL: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 12,
    "max_num_batched_tokens": 256,
    "max_model_len": 2048,
    "cache_memory_bytes": 2**28,
    "exact_prefill": True,
}
LENGTHS = (3, 127, 128, 260, 61, 1, 254, 700)
TEXTS = [[19 + (3 + n) * i % 1000 for i in range(n)] for n in LENGTHS]
FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
GREEDY = [FREE] * len(TEXTS)


def new_engine(**options: Any) -> Engine:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(V41_PATH, **SMALL | options)._engine


def runner_of(engine: Engine) -> ModelRunner:
    return first_rank(engine.executor).runner


def wide() -> DeepseekV41Config:
    """A small model whose eight layers include every kind, with Flash's heads and indexers."""
    config = PUBLISHED["v4.1-flash"]
    assert config.engram is not None and config.dspark is not None
    layers = (1, 4)
    raw = {
        "engram_vocab_size": 1000,
        "engram_layer_ids": layers,
        "engram_max_ngram_size": config.engram.max_ngram_size,
        "engram_n_heads": config.engram.n_heads,
    }
    rows = tuple(sum(sizes) for sizes in engram_primes(raw).values())
    return replace(
        config,
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=8,
        q_lora_rank=256,
        o_lora_rank=128,
        moe_intermediate_size=256,
        n_routed_experts=24,
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(2, 4, 5),
        index_source_layer_ids=(2, 4, 5, 7),
        candidate_source_layer_id=5,
        engram=replace(
            config.engram,
            vocab_size=1000,
            layer_ids=layers,
            num_embeddings=rows,
            compressed_vocab_size=4000,
        ),
        dspark=replace(
            config.dspark,
            noise_token_id=4095,
            target_layer_ids=(5, 6, 7),
            n_routed_experts=16,
        ),
    )


STARTS: Mapping[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "few graphs": {"graph_sizes": (1, 4)},
    "drafting": {"draft_tokens": 5},
    "eager drafting": {"draft_tokens": "auto", "enforce_eager": True},
    "replay": {"exact_prefill": False},
    "drafting replay": {"exact_prefill": False, "draft_tokens": "auto"},
}


@pytest.mark.parametrize("start", STARTS)
def test_nothing_is_compiled_after_ready(start: str) -> None:
    options = {"exact_prefill": True, "cache_memory_bytes": 2**31} | STARTS[start]
    config = EngineConfig(
        device="cuda",
        max_num_seqs=24,
        max_num_batched_tokens=1500,
        max_model_len=40000,
        **options,
    )
    gc.collect()
    torch.cuda.empty_cache()
    model = wide() if config.draft_tokens else wide().without_draft_head()
    engine = start_engine(config, model, Weights(model), None)
    assert engine.executor.description.kernels > 100
    serve_every_length(engine, 60)
    late = engine.metrics().late_compilations
    assert not any(late.values()), late


class RunDecodesTwice:
    """Runs every captured decode again, kernel by kernel from the same state."""

    def __init__(self, runner: ModelRunner) -> None:
        assert runner.graphs is not None
        self.runner, self.graphs, self.count = runner, runner.graphs, 0
        self._run = runner.graphs.run
        runner.graphs.run = self.run  # type: ignore[method-assign]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        cache, graphs = self.runner.cache, self.graphs
        # No sequence uses page 0.
        before = {name: pages[1:].clone() for name, pages in cache.pages.items()}
        logits = self._run(plan).clone()
        after = {name: pages[1:].clone() for name, pages in cache.pages.items()}
        for name, kept in before.items():
            cache.pages[name][1:] = kept
        inputs = graphs.captured(plan.num_tokens).inputs
        again, _ = self.runner.model.forward_with_logits(inputs, cache, Inline())
        assert logits.isfinite().all()
        assert torch.equal(again[: len(logits)], logits)
        same_pages(after, {name: pages[1:] for name, pages in cache.pages.items()})
        self.count += 1
        return logits


def test_captured_decodes_have_the_eager_bits() -> None:
    engine = new_engine()
    runner = runner_of(engine)
    assert isinstance(runner.graphs, Graphs) and isinstance(runner.prefill_graphs, Graphs)
    twice = RunDecodesTwice(runner)
    generate(engine, TEXTS, GREEDY)
    assert twice.count > 30
    assert not any(engine.metrics().late_compilations.values())


def test_captured_prefills_have_the_eager_bits() -> None:
    engine = new_engine()
    runner, ids = runner_of(engine), TEXTS[-1][:250]
    stepper = Stepper(engine)
    with torch.inference_mode():
        wanted = stepper.read(ids, (100,))
        assert runner.prefill_graphs is not None
        runner.forward = captured(runner)  # type: ignore[method-assign]
        assert torch.equal(stepper.read(ids, (100,)), wanted)


def captured(runner: ModelRunner) -> Any:
    def forward(plan: StepPlan) -> Any:
        assert runner.prefill_graphs is not None
        return runner.batch(plan), runner.prefill_graphs.run(plan).clone()

    return forward


@pytest.mark.parametrize("draft_tokens", [5, "auto"])
def test_captured_drafts_have_the_eager_bits(draft_tokens: Any) -> None:
    engine = new_engine(draft_tokens=draft_tokens)
    twice = RunTwice(engine, verifications(engine))
    Oracle(engine, twice.verifications, generate(engine, TEXTS, GREEDY), 0.8)
    generate(engine, TEXTS, GREEDY)
    assert len(twice.steps) > 20
    assert not any(engine.metrics().late_compilations.values())


@pytest.mark.parametrize("draft_tokens", [0, 5])
def test_a_step_waits_for_tokens_alone(draft_tokens: int) -> None:
    """The host waits for no kernel or copy."""
    engine = new_engine(draft_tokens=draft_tokens)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=400, ignore_eos=True)
    for i in range(5):
        engine.add_request(str(i), [25 + i] * (20 + i), params)
    for _ in range(30):
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i in range(5):
        engine.abort(str(i))


def logits(engine: Engine) -> Tensor:
    """[T,V] of a text of 900 tokens in three chunks, on the CPU."""
    ids = torch.randint(19, 1024, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        streams = Stepper(engine).read(ids, (300, 301))
        return runner_of(engine).model.compute_logits(streams).float().cpu()


def test_logits_are_as_close_as_those_of_the_definitions() -> None:
    """As in tests/ops/test_triton_v41_model.py: rounding to FP4 makes all of them far."""
    found, defined = logits(new_engine()), logits(new_engine(reference=True))
    wanted = logits(new_engine(device="cpu"))

    def distance(one: Tensor, other: Tensor) -> float:
        return float(((one - other).norm(dim=1) / other.norm(dim=1)).median())

    spread, found_spread = distance(defined, wanted), distance(found, wanted)
    print(f"from float32: the definitions {spread:.3f}, the kernels {found_spread:.3f}")
    assert found_spread < 1.5 * spread and distance(found, defined) < 1.5 * spread


def test_tables_are_pinned() -> None:
    model = runner_of(new_engine()).model
    assert isinstance(model, DeepseekV41)
    tables = [layer.engram.weights.embed for layer in model.layers if layer.engram is not None]
    assert len(tables) == 2
    for table in tables:
        assert table.rows.is_pinned() and table.scale is not None and table.scale.is_pinned()
