"""The memory budget: the largest steps run, touch one page, and are counted."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from finwhale import LLM, FinwhaleError, SamplingParams
from finwhale.config import EngineConfig
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start import budget, memory
from finwhale.engine.start.budget import MemoryBudget
from finwhale.engine.start.memory import GRAPH_BYTES, LargestSteps
from finwhale.engine.steps.inputs import PAGE
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.deepseek_v4.compressor import C4Compressor, C128Compressor
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.step_inputs import Segments, StepInputs


def test_every_number_of_rows_has_run(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LM head's and each kind of compressor's GEMM, in steps of eight rows."""
    model = first_rank(new_llm()._engine.executor).runner.model
    assert isinstance(model, DeepseekV4)
    ran: dict[object, list[int]] = defaultdict(list)

    def watch(owner: object, name: str, key: object) -> None:
        run = getattr(owner, name)

        def watching(x: torch.Tensor) -> torch.Tensor:
            ran[key].append(len(x))
            return run(x)  # type: ignore[no-any-return]

        monkeypatch.setattr(owner, name, watching)

    watch(model, "compute_logits", "head")
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        if layer.attn.compressor is not None:
            watch(layer.attn.compressor, "project", type(layer.attn.compressor))
    with torch.inference_mode():
        model.run_library_gemms(17, 40)
    assert ran.keys() == {"head", C4Compressor, C128Compressor}
    assert ran.pop("head") == [1, 8, 9, 16, 17]
    assert all(rows == [1, 8, 9, 16, 17, 24, 25, 32, 33, 40] for rows in ran.values())


@pytest.mark.parametrize(
    "num_tokens, reference",
    [
        *((1, False), (50, False), (700, False), (1, True), (50, True)),
        pytest.param(700, True, marks=pytest.mark.long),
    ],
)
def test_the_largest_steps_touch_one_page(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, reference: bool, num_tokens: int
) -> None:
    """Prompts shorter and longer than the context, and decodes: only PAGE of each pool changes."""
    runner = first_rank(
        new_llm(reference=reference, max_model_len=300, max_num_seqs=3)._engine.executor
    ).runner
    chosen: list[torch.Tensor] = []
    sample = runner.model.sample

    def watching(logits: torch.Tensor, batch: object) -> object:
        found = sample(logits, batch)  # type: ignore[arg-type]
        chosen.append(found.valid_S)
        return found

    for pools in runner.cache.pools.values():
        for pool in pools.values():
            pool.fill_(0.5)
    monkeypatch.setattr(runner.model, "sample", watching)
    steps = LargestSteps(runner.model, runner.groups, runner.cache)
    steps.run(StepLimits(num_tokens=num_tokens, num_seqs=3, max_len=300))
    assert [len(valid) for valid in chosen] == [min(3, num_tokens), 3]
    chosen.clear()
    steps.run(StepLimits(num_tokens=num_tokens, num_seqs=3, max_len=300, draft_kinds=((3, 2),)))
    verified = 3 * min(3, max(1, num_tokens // 3))
    assert [len(valid) for valid in chosen] == [min(9, num_tokens), 3, verified]
    chosen.clear()
    # A captured verification has all its tokens, even if they are more than num_tokens.
    kinds = {"verify_graphs": (1, 3), "draft_kinds": ((3, 2),)}
    steps.run(StepLimits(num_tokens=num_tokens, num_seqs=3, max_len=300, **kinds))  # type: ignore[arg-type]
    assert [len(valid) for valid in chosen] == [min(9, num_tokens), 3, 9]
    assert all(valid.all() for valid in chosen)
    changed = 0
    for group in runner.groups:
        for field in group.fields:
            for pool in runner.cache.pools[field.name].values():
                pages = pool.view(-1, group.rows_per_page, field.width)
                others = torch.cat([pages[:PAGE], pages[PAGE + 1 :]])
                assert (others == 0.5).all()
                changed += bool((pages[PAGE] != 0).any())
    assert changed


def test_what_counts_as_workspace(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step, and for graphs a second time with what each of them gives."""
    runner = first_rank(new_llm(max_model_len=300)._engine.executor).runner
    steps = LargestSteps.alone(runner.model, runner.groups, runner.ops)
    peaks = iter([1000, 5000, 70, 900, 800, 50, 60])
    monkeypatch.setattr(steps, "_peak", lambda run: next(peaks))
    plain = StepLimits(num_tokens=64, num_seqs=4, max_len=300)
    assert steps.workspace_bytes(plain) == 1000
    graphs = StepLimits(
        num_tokens=64, num_seqs=4, max_len=300, decode_graphs=(1, 4), prefill_graphs=(16,)
    )
    assert steps.workspace_bytes(graphs) == 5000 + 900 + 3 * GRAPH_BYTES
    assert isinstance(runner.model, DeepseekV4)
    config = runner.model.config
    drafts = replace(
        graphs,
        decode_graphs=(),
        verify_graphs=(1, 4),
        prefill_graphs=(),
        draft_kinds=((2, 1),),
    )
    row = config.vocab_size * 4 + config.hc_mult * config.hidden_size * 4
    assert steps.workspace_bytes(drafts) == 800 + 60 + 5 * 2 * row + 4 * GRAPH_BYTES


def test_captured_prefills_count_once(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the largest function between their graphs allocates; no prefill runs without."""
    runner = first_rank(new_llm(max_model_len=300)._engine.executor).runner
    steps = LargestSteps.alone(runner.model, runner.groups, runner.ops)
    largest = StepLimits(num_tokens=64, num_seqs=4, max_len=300, prefill_graphs=(16, 64))
    lengths, inputs = list[list[int]](), steps._inputs

    def noting(each: Sequence[int], most: int) -> StepInputs:
        lengths.append(list(each))
        return inputs(each, most)

    monkeypatch.setattr(steps, "_inputs", noting)
    steps.run(largest)
    assert lengths == [[1] * 4]
    steps.run(replace(largest, prefill_graphs=(16,)))
    steps.run(replace(largest, draft_kinds=((2, 1),)))
    assert lengths[1:] == [[64], [1] * 4, [64], [1] * 4, [2] * 4]
    # The peak of a function is above what was allocated before. It runs with both bounds.
    tops, found = iter([1010, 1040, 1030, 1020]), list[tuple[int, int, bool]]()

    def attend(inputs: StepInputs, number: int, *, name: str) -> None:
        assert (number, name) == (5, "rows")
        tokens = inputs.tokens
        found.append((tokens.max_len, tokens.max_query, bool((tokens.positions == -1).all())))

    def two_layers(step: StepInputs, cache: object, segments: Segments) -> None:
        for _ in range(2):
            segments.eager(attend, step, 5, name="rows")

    made = inputs([64], 300)
    monkeypatch.setattr(steps, "model", two_layers)
    monkeypatch.setattr(steps, "_inputs", lambda lengths, most: made)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(tops))
    peaks = iter([20_000, 900, 5000])
    monkeypatch.setattr(steps, "_peak", lambda run: next(peaks))
    assert steps.workspace_bytes(largest) == 20_000 + 40 + 5000 + 2 * GRAPH_BYTES
    assert not list(tops) and found == [(300, 1, True), (300, 64, True)] * 2


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_ready_engine_holds(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    """All of the largest steps run; those with prefill in a graph, if graphs run all of them."""
    ran = list[object]()
    limits = StepLimits(num_tokens=64, num_seqs=4, max_len=300, prefill_graphs=(64,) * captured)
    chosen = SimpleNamespace(
        capabilities=SimpleNamespace(bounded_workspace=True),
        step_limits=lambda max_len: limits,
        groups=(),
        arenas={},
        config=EngineConfig(cache_memory_bytes=1),
        model_config=SimpleNamespace(vocab_size=64),
    )
    made = object.__new__(MemoryBudget)
    made._chosen, made._device = cast(Any, chosen), cast(Any, SimpleNamespace(type="cuda"))
    made._reserved_before = 5
    steps = SimpleNamespace(run=lambda largest: ran.append("steps"))
    monkeypatch.setattr(budget, "LargestSteps", lambda *args: steps)
    monkeypatch.setattr(budget, "hold_pinned_memory", lambda *args: None)
    for name, value in ("synchronize", None), ("memory_reserved", 100), ("mem_get_info", (1, 2)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    runner = SimpleNamespace(
        model=SimpleNamespace(run_library_gemms=lambda *args: ran.append("gemms")),
        cache=None,
        max_model_len=300,
        prefill_graphs=SimpleNamespace(hold_memory=lambda max_len: ran.append(max_len)),
    )
    assert made.reserve_workspace(cast(Any, runner), 30) == 65
    assert ran == (["steps", 300, "gemms"] if captured else ["steps", "gemms"])


@pytest.mark.parametrize(("reserved", "allocated"), [(900, 700), (300, 700)])
def test_gaps_between_the_weights_do_not_count_as_free(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, reserved: int, allocated: int
) -> None:
    """A run that fits gaps takes little from the driver. In a graph's pool it would take more."""
    runner = first_rank(new_llm(max_model_len=300)._engine.executor).runner
    steps = LargestSteps.alone(runner.model, runner.groups, runner.ops)
    held = {"reserved": 5000, "allocated": 4200}

    def run() -> None:
        held["reserved"] += reserved
        held["allocated"] += allocated

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for kind in held:
        for name in (f"memory_{kind}", f"max_memory_{kind}"):
            monkeypatch.setattr(torch.cuda, name, lambda device, kind=kind: held[kind])
    assert steps._peak(run) == max(reserved, allocated)


def test_the_cache_gets_the_rest_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others hold counts."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    device = torch.device("cuda")
    assert memory.remaining_bytes(device, 0.9) == 500
    assert memory.remaining_bytes(device, 0.3) == 0


def test_memory_use_is_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    held, runner = llm._engine.memory, first_rank(llm._engine.executor).runner
    assert held.cache == sum(pages.nbytes for pages in runner.cache.pages.values())
    assert isinstance(runner.model, DeepseekV4)
    embed = runner.model.weights.embed
    assert embed.nbytes < held.weights < 2**24
    assert held.total == held.weights + held.workspace + held.cache
    assert f"cache {held.cache:,}" in str(held)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, True, "0.5", float("nan")])
def test_a_memory_fraction_out_of_range_is_refused(share: object) -> None:
    with pytest.raises(FinwhaleError, match=r"gpu_memory_utilization must be (above 0|a number)"):
        EngineConfig(gpu_memory_utilization=share)  # type: ignore[arg-type]


def test_a_request_that_never_fits_is_refused_at_once(new_llm: Callable[..., LLM]) -> None:
    llm = new_llm(max_model_len=100)
    (result,) = llm.generate([[5] * 100], SamplingParams(max_tokens=1))
    assert result.finished and result.error is not None
    assert "has 100 tokens" in result.error and "room for 100" in result.error
