"""Engines that draft with DSpark: no token changes, and every proposal is that of the formulas."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine
from tests.support.tiny import random_weights, with_dspark, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.bench import drafting as bench_drafting
from finwhale.bench.drafting import ForcedAcceptance
from finwhale.bench.offline import main as bench_offline
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.draft_estimates import LARGEST_LOGIT, Calibration
from finwhale.engine.plan.draft_policy import DraftPolicy, StepKind
from finwhale.engine.plan.pages import PageManager, pages_at_block_end, windowed_pages
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start.capture import new_verification_steps
from finwhale.engine.start.launch_signatures import LaunchEnumerator
from finwhale.engine.start.memory import LargestSteps
from finwhale.engine.steps.drafter import Forward
from finwhale.engine.steps.step_limits import StepLimits, draft_kinds
from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.dspark import DsparkHead
from finwhale.models.protocol import Drafts
from finwhale.models.step_inputs import DraftStart, Segments
from finwhale.ops.paging import MAX_DECODE_QUERY

from ..conftest import engine_config, write_tokenizer  # noqa: TID252
from ..models.drafts import RandomDrafts  # noqa: TID252
from ..models.dspark_transcription import context_rows, draft, main_feature  # noqa: TID252
from .capture_rules import Guard
from .dspark_steps import PARAMS, Proposals, RunTwice, compare, generate, texts_of
from .plans import planned
from .test_async import play
from .test_drafting import Oracle, runs
from .test_verification import Oracle as DeviceOracle
from .test_verification import on_the_device

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 300}
BLOCK = 256
# Two float32 implementations agree to 1e-5 of the largest logit.
NEAR_TIE = 1e-4
# The policy takes no confidence for surer than this.
LEAST = 1 / (1 + exp(LARGEST_LOGIT))

Model = tuple[Path, dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny checkpoint with a DSpark head: its directory, configuration and weights."""
    path, config = tmp_path_factory.mktemp("dspark") / "model", with_dspark(engine_config())
    weights = random_weights(config, seed=3)
    write_plain_checkpoint(path, config, weights)
    write_tokenizer(path, config["vocab_size"])
    return path, config, weights


@pytest.mark.parametrize(
    ("draft_tokens", "ahead"),
    [
        pytest.param(3, False, id="over-the-host", marks=pytest.mark.long),
        pytest.param(5, True, id="on-the-device"),
        pytest.param("auto", True, id="any-numbers"),
    ],
)
def test_no_token_changes(
    model: Model,
    new_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    draft_tokens: Any,
    ahead: bool,
) -> None:
    """Every way to choose and to end, n, penalties, grammars, logprobs: equal to the last field."""
    seed = 13
    wanted = play(new_llm(model[0], **OPTIONS)._engine, seed)
    engine = new_llm(model[0], **OPTIONS, draft_tokens=draft_tokens)._engine
    if draft_tokens == "auto":
        engine.scheduler.drafting.chooser = RandomDrafts(5, seed, block=True)
    if ahead:
        oracle = DeviceOracle(engine, on_the_device(engine, monkeypatch), wanted, 0.8)
    else:
        Oracle(engine, right=0.8, seed=seed).learn(wanted)
    assert play(engine, seed) == wanted
    accepted = engine.metrics().drafts_accepted
    if draft_tokens == "auto":
        assert accepted[0] > 3 and accepted[1] > 0
    else:
        assert accepted[0] > 10 and accepted[draft_tokens - 1] > 0
    assert not ahead or oracle.ahead > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["over-the-host", "on-the-device"])
def test_numbers_of_drafts_follow_the_confidences(
    model: Model, new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Of all drafts, those with the highest survival are verified: in steps ahead, by the drafts
    before. The confidences are taken as they are, and are those that the head itself returned.
    """
    monkeypatch.setattr(Calibration, "add", lambda *_: None)
    engine = new_llm(model[0], **OPTIONS, draft_tokens="auto")._engine
    if ahead:
        on_the_device(engine, monkeypatch)
    policy = engine.scheduler.drafting.chooser
    assert isinstance(policy, DraftPolicy)
    kind = StepKind(3, 5)
    monkeypatch.setattr(policy, "_choose_kind", lambda size, _: setattr(size, "best", kind))
    head = first_rank(engine.executor).runner.model.draft_head
    assert isinstance(head, DsparkHead) and head.weights.confidence is not None
    made: set[tuple[float, ...]] = set()
    draft_block, choose = head.draft, policy.choose

    def noted(*args: Any) -> Drafts:
        drafts = draft_block(*args)
        assert drafts.confidences is not None
        made.update(tuple(row) for row in drafts.confidences.T.tolist())
        return drafts

    steps: list[bool] = []

    def checked(sequences: Any, limits: Any, *, unresolved: bool) -> Sequence[int]:
        counts = choose(sequences, limits, unresolved=unresolved)
        if len(sequences) == 3 and min(limits) == 5 and all(one.confidences for one in sequences):
            assert {tuple(one.confidences) for one in sequences} <= made
            survivals = [
                list(accumulate((min(max(c, LEAST), 1 - LEAST) for c in one.confidences), mul))
                for one in sequences
            ]
            pairs = list(zip(survivals, counts, strict=True))
            verified = [value for one, count in pairs for value in one[:count]]
            others = [value for one, count in pairs for value in one[count:]]
            assert sum(counts) == 6 and min(verified) > max(others) - 1e-6
            if len(set(counts)) > 1:
                steps.append(unresolved)
        return counts

    monkeypatch.setattr(head, "draft", noted)
    monkeypatch.setattr(policy, "choose", checked)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=25, ignore_eos=True)
    for i in range(3):
        engine.add_request(str(i), [9 + i, 8], params)
    while engine.has_work:
        engine.step()
    assert len(steps) > 5 and (sum(steps) > 5) is ahead


def test_forced_acceptance_is_calibrated(
    model: Model, new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft is right with the probability that stands for its confidence, in ragged steps too.
    The mean of these probabilities is the forced rate.
    """
    engine = new_llm(model[0], **OPTIONS, draft_tokens="auto")._engine
    chooser = engine.scheduler.drafting.chooser = RandomDrafts(5, 2, block=True)
    on_the_device(engine, monkeypatch)
    local = first_rank(engine.executor)
    local.sampler.sample_logits = ForcedAcceptance(local, 0.6, varied=True)
    verified = engine.scheduler.record_verified
    made: dict[str, list[float]] = {}
    chances: list[float] = []
    right = 0

    def noted(chunk: Chunk, num_accepted: int) -> None:
        nonlocal right
        key = chunk.sequence.key
        if key in made and chunk.stale_confidences:
            decided = min(len(chunk.drafts), num_accepted + 1)
            chances.extend(made[key][:decided])
            right += num_accepted
        made[key] = list(chunk.sequence.confidences)
        verified(chunk, num_accepted)

    engine.scheduler.record_verified = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    results = [engine.add_request(str(i), [9 + i, 8], params) for i in range(4)]
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert all(len(result.outputs[0].token_ids) == 120 for result in results)
    assert any(len(set(counts)) > 1 for counts in chooser.seen)
    assert len(chances) > 150 and right == pytest.approx(sum(chances), abs=0.06 * len(chances))
    assert sum(chances) / len(chances) == pytest.approx(0.6, abs=0.03)
    assert 0.4 <= min(chances) < 0.5 and 0.7 < max(chances) <= 0.8


def test_bench_of_auto(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench offline --draft-tokens auto` measures plain decoding and "auto" at each batch size."""
    monkeypatch.setattr(bench_drafting, "ADAPT_STEPS", 12)
    # The real choice depends on the machine's speed.
    kind = StepKind(3, 5)
    monkeypatch.setattr(
        DraftPolicy, "_choose_kind", lambda _, size, __: setattr(size, "best", kind)
    )
    record = tmp_path / "record.jsonl"
    arguments = ["--model", str(model[0]), "--device", "cpu", "--max-num-batched-tokens", "128"]
    arguments += ["--draft-tokens", "auto", "--accept", "1", "--batches", "1", "2"]
    arguments += ["--context", "24", "--steps", "12", "--record", str(record)]
    assert bench_offline(arguments) == 0
    rows = json.loads(record.read_text())["results"]
    assert [(row["batch"], row["draft_tokens"]) for row in rows] == [
        *((1, 0), (2, 0)),
        *((1, "auto"), (2, "auto")),
    ]
    for row, plain in zip(rows, rows[:2] * 2, strict=True):
        batch, num_steps = row["batch"], row["step_ms"]["count"]
        numbers = {int(drafts): times for drafts, times in row["numbers_of_drafts"].items()}
        assert sum(numbers.values()) == batch * num_steps
        drafts = sum(drafts * times for drafts, times in numbers.items())
        assert row["rows"] == pytest.approx(1 + drafts / (batch * num_steps), abs=1e-3)
        assert row["tokens_per_step"] == pytest.approx(1 + row["accepted"], abs=1e-3)
        speed = row["tokens_per_s"] / plain["tokens_per_s"]
        assert row["speed_over_plain"] == pytest.approx(speed, abs=1e-3)
        assert row["accepted"] == pytest.approx(2 if row["draft_tokens"] else 0, abs=0.5)
        if row["draft_tokens"]:
            # Both have read the same contexts: as many tokens as plain decoding gives.
            assert num_steps <= 12 <= num_steps * row["tokens_per_step"]


def limit(engine: Engine, blocks: int) -> None:
    """Give the engine a scheduler with few pages."""
    groups, num_pages = first_rank(engine.executor).runner.groups, {}
    seqs, step = engine.sizes.num_seqs, engine.sizes.num_tokens
    for group in groups:
        num_pages[group.name] = 1 + blocks * (BLOCK // group.tokens_per_page)
        if group.keep is not None:
            most = windowed_pages(group, seqs, step, True, True)
            num_pages[group.name] = most + pages_at_block_end(group)
    engine.begin(
        Scheduler(
            PageManager(groups, num_pages),
            sizes=StepSizes.given(seqs, step),
            draft_block_tokens=engine.model_config.draft_block_tokens,
        )
    )


class Recorder:
    """Notes the drafts that an engine makes: the text before them, and their ids."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found: list[tuple[str, list[int], list[int]]] = []
        drafter = first_rank(engine.executor).runner.drafter
        assert drafter is not None
        self.real = drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign, assignment]

    def propose(
        self, forward: Forward, plan: StepPlan, chosen: Tensor | None, *more: Any
    ) -> Tensor | None:
        drafts = self.real(forward, plan, chosen, *more)
        if drafts is None or chosen is None:
            return drafts
        columns = iter(drafts.T.tolist())
        for sequence, end, run in zip(
            planned(self.engine, plan), plan.ends, runs(plan, chosen), strict=True
        ):
            if run.propose:
                known = sequence.token_ids[: end - len(run.drafts)]
                text = [*known, *run.chosen[: run.accepted + 1]]
                self.found.append((sequence.key, text, next(columns)[: run.propose]))
        return drafts


def test_proposals_are_those_of_the_formulas(model: Model, new_llm: Callable[..., LLM]) -> None:
    """Prompts in chunks, in batches, found in the prefix cache, and after preemption."""
    path, config, weights = model
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 90, "max_model_len": 500}
    trunk, other = ([7 + i * step % 50 for i in range(BLOCK)] for step in (1, 3))
    prompts = [[*trunk, 3], [*trunk, 5, 8], trunk[:240], other[:245], [9]]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def whole(engine: Engine) -> list[RequestOutput]:
        results = []
        for i, prompt in enumerate(prompts):
            results.append(engine.add_request(str(i), prompt, params))
        while engine.has_work:
            engine.step()
            check_engine(engine)
        return results

    wanted = whole(new_llm(path, **options)._engine)
    engine = new_llm(path, **options, draft_tokens=5)._engine
    limit(engine, blocks=2)
    recorder = Recorder(engine)
    Oracle(engine, right=0.7).learn(wanted)
    found = whole(engine)
    assert [r.outputs for r in found] == [r.outputs for r in wanted]
    counts = engine.scheduler.counts
    assert counts.preemptions > 0 and counts.cached_tokens >= BLOCK
    texts = {f"{r.request_id}/0": [*r.prompt_token_ids, *r.outputs[0].token_ids] for r in found}
    rows: dict[tuple[int, ...], list[Tensor]] = {}
    compared = 0
    with torch.inference_mode():
        for key, text, drafts in random.Random(1).sample(recorder.found, 40):
            whole_text = texts[key]
            assert whole_text[: len(text)] == text
            if tuple(whole_text) not in rows:
                main = main_feature(weights, config, whole_text)
                rows[tuple(whole_text)] = context_rows(weights, config, main)
            before = [stage[: len(text) - 1] for stage in rows[tuple(whole_text)]]
            block = draft(weights, config, before, text[-1], drafts)
            for logits, chosen in zip(block.logits, drafts, strict=True):
                best = logits.topk(2).values
                worse = float((best[0] - logits[chosen]) / logits.abs().max())
                assert worse < NEAR_TIE, (key, len(text))
                compared += int(best[0] - best[1] > NEAR_TIE * logits.abs().max())
    assert compared > 150


def test_kernels_are_built_for_the_steps_that_verify(
    model: Model, new_llm: Callable[..., LLM]
) -> None:
    """A step of any width, which may be ragged, declares the longest verification of the engine."""
    engine = new_llm(model[0], **OPTIONS, draft_tokens="auto")._engine
    runner = first_rank(engine.executor).runner
    sizes = (1, 2, 4)
    kinds = draft_kinds(engine.config, engine.model_config)
    largest = StepLimits(
        num_tokens=40,
        num_seqs=4,
        max_len=300,
        decode_graphs=sizes,
        verify_graphs=sizes,
        draft_kinds=kinds,
    )
    built = LaunchEnumerator(runner.model, runner.groups, runner.ops, runner.cache, largest)
    steps = new_verification_steps(runner, largest, None)
    real = [steps._inputs(size, size * width, 300).tokens for size in sizes for width, _ in kinds]
    wanted = {(len(tokens.positions), tokens.max_query) for tokens in real}
    found = {(num_tokens, query) for num_tokens, _, bounds in built.steps() for _, query in bounds}
    assert wanted <= found
    assert max(query for _, query in wanted) <= MAX_DECODE_QUERY


def test_warm_up_covers_draft_passes(model: Model, new_llm: Callable[..., LLM]) -> None:
    """Measuring memory and building kernels ahead run blocks of every size too."""
    engine = new_llm(model[0], **OPTIONS, draft_tokens=2)._engine
    runner = first_rank(engine.executor).runner
    head = runner.model.draft_head
    assert isinstance(head, DsparkHead)
    blocks: list[tuple[int, int]] = []
    run_block = head.run_block

    def noted(start: DraftStart, cache: PagedCache, segments: Segments) -> Tensor:
        blocks.append((len(start.newest_ids), int(start.tokens.positions.max())))
        return run_block(start, cache, segments)

    head.run_block = noted  # type: ignore[method-assign]
    largest = StepLimits(num_tokens=40, num_seqs=4, max_len=300, draft_kinds=((3, 2),))
    LargestSteps.alone(runner.model, runner.groups, runner.ops).run(largest)
    assert set(blocks) == {(4, 294)}  # its last row is the context's last
    blocks.clear()
    LaunchEnumerator(runner.model, runner.groups, runner.ops, runner.cache, largest)._call_all()
    assert {count for count, _ in blocks} >= {1, 4}


def test_a_step_and_a_draft_pass_can_run_again(
    model: Model, new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests/gpu/test_dspark.py does with captured steps: they depend on nothing but what
    `RunTwice` restores, and their drafts and confidences are those of the formulas.
    """
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 200, "max_model_len": 400}
    engine = new_llm(model[0], **options, draft_tokens="auto", cache_memory_bytes=2**23)._engine
    engine.scheduler.drafting.chooser = RandomDrafts(5, 1, block=True)
    steps = on_the_device(engine, monkeypatch)
    twice, proposals = RunTwice(engine, steps), Proposals(engine, steps)
    prompts = [[7 + i % 50 for i in range(n)] for n in (3, 40, 130, 11)]
    results = generate(engine, prompts, [replace(one, max_tokens=20) for one in PARAMS])
    assert twice.num_drafts == {0, 5} and len({width for _, width, _ in twice.steps}) >= 3
    found = compare(
        engine,
        model[0],
        texts_of(results),
        proposals.found,
        near_tie=NEAR_TIE,
        as_trained=False,
    )
    assert len(found) == 5
    for one in found:
        assert one.compared == one.equal > 5 and one.worst < NEAR_TIE and one.confidence < 1e-4


@pytest.mark.parametrize("block", [True, False], ids=["dspark", "mtp"])
def test_captured_code_neither_waits_nor_mixes_devices(
    model: Model,
    tiny_path: Path,
    new_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    block: bool,
) -> None:
    guard = Guard(monkeypatch)
    engine = new_llm(model[0] if block else tiny_path, **OPTIONS, draft_tokens="auto")._engine
    chooser = RandomDrafts(5 if block else 3, 1, block=block)
    engine.scheduler.drafting.chooser = chooser
    guard.watch(on_the_device(engine, monkeypatch))
    for i in range(3):
        params = SamplingParams(temperature=0.4 * i, seed=i, max_tokens=12, ignore_eos=True)
        engine.add_request(str(i), [9 + i, 8], params)
    while engine.has_work:
        engine.step()
    assert guard.calls > 10 and any(len(set(counts)) > 1 for counts in chooser.seen)
    assert {"index_select", "copy_"} <= guard.rules.names
