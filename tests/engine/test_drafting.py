"""Drafting changes no token: random schedules with drafts of 0 to 3 tokens, and what is undone."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.support.integrity import check_engine
from tests.support.stepping import Stepper
from tests.support.tiny import tiny_config, with_dspark
from torch import Tensor

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.in_flight import InFlightStep, Rows
from finwhale.engine.loop.metrics import Meter
from finwhale.engine.loop.results import Results, new_chooser
from finwhale.engine.plan.draft_policy import DraftPolicy, StepKind
from finwhale.engine.plan.pages import PageManager, pages_at_block_end, windowed_pages
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.drafter import Forward
from finwhale.errors import FinwhaleError

from .arrivals import random_arrivals
from .conftest import AS_TRAINED_IN_CORE, MODELS
from .plans import planned
from .running import assert_idle, run_until_idle
from .test_async import play

BLOCK = 256
EXACT, AS_TRAINED = MODELS


@dataclass
class Run:
    """What a step gave a chunk: `accepted` of its drafts are the tokens that were chosen."""

    drafts: tuple[int, ...]
    propose: int
    chosen: list[int]
    accepted: int = 0

    def __post_init__(self) -> None:
        while self.accepted < len(self.drafts):
            if self.chosen[self.accepted] != self.drafts[self.accepted]:
                break
            self.accepted += 1


def runs(plan: StepPlan, chosen: Tensor) -> list[Run]:
    """One for each chunk; without tokens where it wants no logits."""
    assert plan.draft is not None
    tokens = iter(chosen.tolist())
    columns = zip(plan.draft.drafts, plan.draft.propose, plan.num_logits, strict=True)
    return [
        Run(drafts, propose, [next(tokens) for _ in range(count)])
        for drafts, propose, count in columns
    ]


class Oracle:
    """In place of the MTP layer's guesses: what will come, or anything, by the toss of a coin.

    With random weights the layer is almost never right, and nothing would ever be accepted.
    """

    def __init__(
        self, engine: Engine, right: float | Callable[[str], float], seed: int = 0
    ) -> None:
        self.engine = engine
        self.right = right if callable(right) else lambda _: right
        self.draw = random.Random(seed)
        self.known: dict[str, list[int]] = {}
        drafter = first_rank(engine.executor).runner.drafter
        assert drafter is not None
        self.real = drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]

    def learn(self, results: Sequence[RequestOutput]) -> None:
        for result in results:
            for output in result.outputs:
                key = f"{result.request_id}/{output.index}"
                self.known[key] = [*result.prompt_token_ids, *output.token_ids]

    def propose(
        self, forward: Forward, plan: StepPlan, chosen_M: Tensor | None, settings: Any
    ) -> Tensor | None:
        drafts = self.real(forward, plan, chosen_M, settings)
        if drafts is None or chosen_M is None:
            return drafts
        out = drafts.clone()
        vocab = self.engine.model_config.vocab_size
        column = 0
        sequences = planned(self.engine, plan)
        for sequence, end, verified in zip(sequences, plan.ends, runs(plan, chosen_M), strict=True):
            if not verified.propose:
                continue
            text = self.known.get(sequence.key, [])
            for step in range(verified.propose):
                index = end - len(verified.drafts) + verified.accepted + 1 + step
                if self.draw.random() < self.right(sequence.key) and index < len(text):
                    out[step, column] = text[index]
                elif self.draw.random() < 0.7:
                    out[step, column] = self.draw.randrange(vocab)
            column += 1
        return out


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_no_token_changes(new_llm: Callable[..., LLM], seed: int) -> None:
    """Every way to choose and to end, n, penalties, grammars, logprobs: equal to the last field."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 300}
    wanted = play(new_llm(**options)._engine, seed)
    for draft_tokens in (1, 3):
        engine = new_llm(**options, draft_tokens=draft_tokens)._engine
        oracle = Oracle(engine, right=0.75, seed=seed)
        oracle.learn(wanted)
        assert play(engine, seed) == wanted
        accepted = engine._meter.drafts_accepted[:draft_tokens]
        assert all(n > 2 for n in accepted), accepted


def synthetic_times(engine: Engine, seconds: Callable[[StepKind], float]) -> DraftPolicy:
    """Let "auto" see made-up step times, so that its choices do not depend on the machine."""
    policy = engine.scheduler.drafting.chooser
    assert isinstance(policy, DraftPolicy)
    record = policy.record_time

    def recorded(batch: int, num_drafts: int, kind: StepKind, _: float) -> None:
        record(batch, num_drafts, kind, seconds(kind))

    policy.record_time = recorded  # type: ignore[method-assign, assignment]
    return policy


def test_a_step_that_was_launched_ahead_begins_at_the_end_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank: Any = SimpleNamespace(can_draft=True, device_drafts=None)
    scheduler: Any = SimpleNamespace(drafting=SimpleNamespace())
    model: Any = SimpleNamespace(vocab_size=9, max_draft_tokens=3, draft_block_tokens=0)
    results, found = Results(scheduler, Meter(3), 3, new_chooser(rank, model, "auto")), []
    policy: Any = results._policy
    policy.record_time = lambda *args: found.append(args[-1])
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    result: Any = SimpleNamespace(verify_seconds=0.1, draft_seconds=None)
    for results._last_read in (0.0, 9.5):
        results._record_time(InFlightStep(Rows([]), [], began=9.0), result)
    assert found == [1.0, 0.5]


def two_rows_pay(kind: StepKind) -> float:
    return 0.01 * (1 + 0.02 * kind.drafts + 0.1 * (kind.width > 1) + 2.0 * (kind.width > 2))


def generate_two(
    engine: Engine, seen: dict[str, list[int]], max_tokens: int = 280
) -> list[RequestOutput]:
    """Two requests; `seen` gets the number of drafts that each step verifies for them."""
    verified = engine.scheduler.record_verified

    def noted(chunk: Chunk, num_accepted: int) -> None:
        seen.setdefault(chunk.sequence.key, []).append(len(chunk.drafts))
        verified(chunk, num_accepted)

    engine.scheduler.record_verified = noted  # type: ignore[method-assign]
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        for seed in (1, 2)
    ]
    results = [engine.add_request(str(i), [7 + i, 9], params[i]) for i in range(2)]
    while engine.has_work:
        engine.step()
        check_engine(engine)
    return results


def test_auto_gives_rows_to_the_request_whose_drafts_are_right(
    new_llm: Callable[..., LLM],
) -> None:
    """Steps with two rows a sequence pay: one sequence gets two drafts, the other none."""
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 40, "max_model_len": 300}
    wanted = generate_two(new_llm(**options)._engine, {}, 130)
    engine = new_llm(**options, draft_tokens="auto")._engine
    policy = synthetic_times(engine, two_rows_pay)
    Oracle(engine, right=lambda key: float(key == "0/0")).learn(wanted)
    seen: dict[str, list[int]] = {}
    assert generate_two(engine, seen, 130) == wanted
    assert {kind.drafts for kind in policy.kinds} == {0, 1, 2, 3}
    # The first sequence has ended before the second one, which then has the step for itself.
    first, second = seen["0/0"][50:], seen["1/0"][50 : len(seen["0/0"])]
    assert first.count(2) > 0.7 * len(first) and second.count(0) > 0.7 * len(second)


def test_a_stop_within_accepted_drafts(new_llm: Callable[..., LLM]) -> None:
    """A stop string, a stop token and the number of tokens end a run of drafts in its middle."""
    plain, drafting = new_llm(), new_llm(draft_tokens=3)
    oracle = Oracle(drafting._engine, right=1.0)
    base = {"temperature": 0, "ignore_eos": True}
    free = plain.generate([[9, 8, 7]], SamplingParams(max_tokens=24, **base))[0].outputs[0]
    for count in range(1, 12):
        for params in (
            SamplingParams(max_tokens=count, **base),
            SamplingParams(max_tokens=24, stop_token_ids=[free.token_ids[count]], **base),
            SamplingParams(max_tokens=24, stop=[free.text[count : count + 2]], **base),
        ):
            wanted = plain.generate([[9, 8, 7]], params)[0].outputs
            engine = drafting._engine
            oracle.known = {"one/0": [9, 8, 7, *free.token_ids]}
            before = engine.metrics()
            result = engine.add_request("one", [9, 8, 7], params)
            while engine.has_work:
                engine.step()
                check_engine(engine)
            assert result.outputs == wanted
            # Accepted drafts behind the stop do not count.
            after, tokens = engine.metrics(), len(wanted[0].token_ids)
            assert after.output_tokens - before.output_tokens == tokens
            gaps = after.time_between_tokens.count - before.time_between_tokens.count
            assert gaps == tokens - 1
            assert sum(after.drafts_accepted) - sum(before.drafts_accepted) < tokens
    assert drafting._engine.metrics().mean_accepted_length > 2.5


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_breaks_off_loses_nothing(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """In the forward, or while the drafts are made: called again, the same step runs."""
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=20, n=2, presence_penalty=0.5)
    wanted = new_llm().generate([[9, 8, 7]], params)[0].outputs
    engine = new_llm(draft_tokens=2)._engine
    oracle = Oracle(engine, right=0.8)
    oracle.known = {f"one/{i}": [9, 8, 7, *output.token_ids] for i, output in enumerate(wanted)}
    drafter, count = first_rank(engine.executor).runner.drafter, 0
    assert drafter is not None
    for owner, name in (
        (drafter, "propose"),
        (first_rank(engine.executor).runner, "forward_with_logits"),
    ):
        run_it = getattr(owner, name)

        def breaking(*args: Any, run_it: Any = run_it) -> Any:
            nonlocal count
            count += 1
            if count % 3 == 0:
                raise error("stop")
            return run_it(*args)

        monkeypatch.setattr(owner, name, breaking)
    result = engine.add_request("one", [9, 8, 7], params)
    while engine.has_work:
        with contextlib.suppress(error):
            engine.step()
        check_engine(engine)
    assert result.outputs == wanted


def test_a_row_without_numbers_ends_one_request(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an accepted draft: the tokens before it stay."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = new_llm().generate([[9, 8, 7], [6, 5]], params)
    engine = new_llm(draft_tokens=3)._engine
    oracle = Oracle(engine, right=1.0)
    oracle.learn(plain)
    for index, result in enumerate(plain):
        oracle.known[f"{index}/0"] = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    read = first_rank(engine.executor).runner.forward_with_logits

    def spoilt(plan: StepPlan) -> Forward:
        forward, at = read(plan), 0
        logits = forward.logits.clone()
        sequences = planned(engine, plan)
        for sequence, last, count in zip(sequences, plan.ends, plan.num_logits, strict=True):
            for end in range(last - count + 1, last + 1):
                if sequence.request_id == "0" and end == 8:
                    logits[at, 17] = torch.nan
                at += 1
        return replace(forward, logits=logits)

    monkeypatch.setattr(first_rank(engine.executor).runner, "forward_with_logits", spoilt)
    bad, good = (
        engine.add_request(str(i), result.prompt_token_ids, params)
        for i, result in enumerate(plain)
    )
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert bad.error is not None and "not finite" in bad.error
    assert bad.outputs[0].token_ids == plain[0].outputs[0].token_ids[:5]
    assert good.error is None and good.outputs == plain[1].outputs


def test_the_metrics_add_up(new_llm: Callable[..., LLM]) -> None:
    engine = new_llm(draft_tokens=2)._engine
    plain = new_llm().generate([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=40))[0]
    oracle = Oracle(engine, right=0.7)
    oracle.known = {"one/0": [9, 8, 7, *plain.outputs[0].token_ids]}
    result = engine.add_request("one", [9, 8, 7], SamplingParams(temperature=0, max_tokens=40))
    while engine.has_work:
        engine.step()
    found = engine.metrics()
    first, second = found.drafts_accepted[:2]
    assert 0 < second < first < found.drafts_proposed[0] == found.verifications
    # The first token comes with the prompt; some steps at the ends of states have no drafts.
    plain_steps = found.steps - 1 - found.verifications
    tokens = len(result.outputs[0].token_ids)
    assert tokens == found.output_tokens == 1 + plain_steps + found.verifications + first + second
    assert found.mean_accepted_length == 1 + (first + second) / found.verifications
    assert found.time_between_tokens.count == tokens - 1
    assert found.time_of_verification.count == found.steps - 1
    assert 0 < found.time_of_draft.count <= found.steps - 1


@pytest.mark.parametrize("value", [-1, 8, True, 1.0, "all", None])
def test_other_numbers_are_refused(value: Any) -> None:
    with pytest.raises(
        FinwhaleError, match=r"draft_tokens must be (0 to 7|an integer) or .auto., got"
    ):
        LLM(draft_tokens=value)


def test_more_drafts_than_the_head_makes(tmp_path: Path) -> None:
    config = tiny_config(0)
    layers = config["num_hidden_layers"]
    heads: dict[str, dict[str, Any]] = {
        "no draft head.*use 0$": {
            "num_nextn_predict_layers": 0,
            "compress_ratios": config["compress_ratios"][:layers],
        },
        "must be 0 to 5 or .auto. with this checkpoint, got 6": with_dspark(config),
        "must be 0 to 3 or .auto. with this checkpoint, got 6": {},
    }
    for number, (why, changes) in enumerate(heads.items()):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | changes))
        llm = LLM(path, load_format="dummy", device="cpu", dtype="float32")
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))) == 1
        with pytest.raises(FinwhaleError, match=f"draft_tokens.* {why}"):
            LLM(path, load_format="dummy", device="cpu", dtype="float32", draft_tokens=6)


# --- The distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [pytest.param(1.0, 0, 1.0, marks=pytest.mark.long), (1.6, 9, 0.9)],
)
def test_the_distribution_is_the_model_s(
    new_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """4,000 pairs of tokens behind drafts that are often right, against the probabilities.

    The "model" is a table: the logits of twelve tokens after each last token, so that the whole
    distribution of two tokens is known. Seeds are drawn by the engine's own rule.
    """
    engine = new_llm(draft_tokens=2, max_num_seqs=64, max_num_batched_tokens=2048)._engine
    vocab, width = engine.model_config.vocab_size, 12
    table = torch.full((vocab, vocab), -torch.inf)
    generator = torch.Generator().manual_seed(8)
    table[:, :width] = 1.5 * torch.randn(vocab, width, generator=generator)
    runner = first_rank(engine.executor).runner
    drafter = runner.drafter
    assert drafter is not None

    def tabled(plan: StepPlan) -> Forward:
        last = [plan.token_ids[row] for row in plan.logits_rows]
        return Forward(runner.batch(plan), torch.empty(0), table[last])

    def likeliest(
        forward: Forward, plan: StepPlan, chosen: Tensor | None, settings: Any
    ) -> Tensor | None:
        """Of each row's token the likeliest next, and the next after it: as an MTP layer would."""
        assert chosen is not None
        proposing = [run for run in runs(plan, chosen) if run.propose]
        if not proposing:
            return None
        out = torch.zeros(2, len(proposing), dtype=torch.int64)
        for column, run in enumerate(proposing):
            out[0, column] = table[run.chosen[run.accepted]].argmax()
            out[1, column] = table[int(out[0, column])].argmax()
        return out

    monkeypatch.setattr(runner, "forward_with_logits", tabled)
    monkeypatch.setattr(drafter, "propose", likeliest)
    draws = 4_000
    params = SamplingParams(
        n=1000, seed=3, temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=4,
        ignore_eos=True,
    )  # fmt: skip
    results = [
        engine.add_request(str(i), [20], replace(params, seed=i)) for i in range(draws // 1000)
    ]
    while engine.has_work:
        engine.step()
    counts = torch.zeros(width, width)
    for result in results:
        for output in result.outputs:
            # The first token comes with the prompt; the next two are drafts, or follow one.
            counts[output.token_ids[1], output.token_ids[2]] += 1
    found = engine.metrics()
    assert found.drafts_accepted[0] > 0.2 * draws and found.drafts_accepted[1] > 0.05 * draws

    def chances(logits: Tensor) -> Tensor:
        """As SamplingParams says: temperature, top_k, then top_p."""
        p = (logits[:width].double() / temperature).softmax(0)
        if top_k:
            p[p < p.topk(top_k).values[-1]] = 0
        p /= p.sum()
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        p[order[before >= top_p]] = 0
        return p / p.sum()

    step = torch.stack([chances(table[token]) for token in range(width)])
    first = chances(table[20])
    wanted = draws * ((first @ step)[:, None] * step)
    assert counts[wanted == 0].sum() == 0
    # Cells of fewer than five are taken together.
    small = (wanted < 5) & (wanted > 0)
    expected = torch.cat([wanted[wanted >= 5], wanted[small].sum()[None]])
    seen = torch.cat([counts[wanted >= 5], counts[small].sum()[None]])
    keep = expected > 0
    chi_square = ((seen - expected)[keep] ** 2 / expected[keep]).sum().item()
    freedom = int(keep.sum()) - 1
    # Wilson and Hilferty 1931: normal; 3.3 is one in two thousand.
    normal = ((chi_square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (
        2 / (9 * freedom)
    ) ** 0.5
    assert normal < 3.3, (chi_square, freedom)


# --- Bitwise, over schedules with shared prefixes and preemption ----------------------------------


class Machine:
    """One model: an engine that drafts, and the same weights read as a whole."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.engine = LLM(path, **options, draft_tokens=3)._engine
        runner = first_rank(self.engine.executor).runner
        self.forward = type(runner).forward_with_logits.__get__(runner)
        drafter = runner.drafter
        assert drafter is not None
        self.propose = drafter.propose
        self.stepper = Stepper(LLM(path, **options)._engine)
        self.rows: dict[tuple[str, int], list[tuple[list[int], Tensor]]] = {}
        self.whole: dict[tuple[int, ...], Tensor] = {}  # the streams of each text read as a whole

    def begin(self, *, blocks: int, states: int, seqs: int, step: int, drafts: int) -> Engine:
        """The engine with a new scheduler that has so many blocks and states, and no more."""
        engine, groups = self.engine, first_rank(self.engine.executor).runner.groups
        num_pages = {}
        for group in groups:
            num_pages[group.name] = 1 + blocks * (BLOCK // group.tokens_per_page)
            if group.keep is not None:
                more = states * pages_at_block_end(group)
                num_pages[group.name] = windowed_pages(group, seqs, step, True, True) + more
        engine.config = replace(engine.config, draft_tokens=drafts)
        engine.begin(Scheduler(PageManager(groups, num_pages), sizes=StepSizes.given(seqs, step)))
        self.rows = {}
        runner = first_rank(engine.executor).runner
        runner.forward_with_logits = self.record  # type: ignore[method-assign]
        drafter = runner.drafter
        assert drafter is not None
        drafter.propose = self.propose  # type: ignore[method-assign]
        return engine

    def record(self, plan: StepPlan) -> Forward:
        """Note every row of logits with the text that it came after, drafts included."""
        assert plan.draft is not None
        forward: Forward = self.forward(plan)
        rows = iter(forward.logits)
        for sequence, last, drafts, count in zip(
            planned(self.engine, plan), plan.ends, plan.draft.drafts, plan.num_logits, strict=True
        ):
            whole = [*sequence.token_ids, *drafts]
            for end in range(last - count + 1, last + 1):
                row = next(rows).clone()
                self.rows.setdefault((sequence.key, end), []).append((whole[:end], row))
        return forward

    def read(self, tokens: list[int]) -> Tensor:
        """Once for each text: several runs of a test end with the same texts."""
        key = tuple(tokens)
        if key not in self.whole:
            self.whole[key] = self.stepper.read(tokens)
        return self.whole[key]

    def check(self, result: RequestOutput) -> int:
        """Every logit after a text that became output is that of the text read as a whole.

        Returns:
            How many rows were of drafts that were wrong.
        """
        wrong = 0
        for output in result.outputs:
            tokens = [*result.prompt_token_ids, *output.token_ids]
            first = len(result.prompt_token_ids)
            wanted = self.stepper.logits(self.read(tokens[:-1])[first - 1 :])
            for end in range(first, len(tokens)):
                rows = self.rows[f"{result.request_id}/{output.index}", end]
                right = [row for text, row in rows if text == tokens[:end]]
                wrong += len(rows) - len(right)
                assert right
                for row in right:
                    assert torch.equal(row, wanted[end - first]), (result.request_id, end)
        return wrong


@pytest.fixture(scope="module")
def machine(small: tuple[Path, dict[str, Any]]) -> Machine:
    return Machine(*small)


def text(length: int, salt: object = 0) -> list[int]:
    draw = random.Random(f"{length} {salt}")
    return [draw.randrange(2, 300) for _ in range(length)]


@pytest.mark.parametrize(
    "small, drafts, edge",
    [
        pytest.param(EXACT, 3, 4, id="exact-3-4"),
        pytest.param(AS_TRAINED, 1, 128, id="as-trained-1-128"),
        pytest.param(EXACT, 3, 256, id="exact-3-256"),
        *[
            pytest.param(small, *case, id=f"{name}-{case[0]}-{case[1]}", marks=pytest.mark.long)
            for small, name, case in (
                (AS_TRAINED, "as-trained", (3, 4)),
                (EXACT, "exact", (1, 128)),
                (AS_TRAINED, "as-trained", (3, 256)),
                (EXACT, "exact", (2, 256)),
                (AS_TRAINED, "as-trained", (2, 256)),
            )
        ],
    ],
    indirect=["small"],
)
def test_every_edge(machine: Machine, drafts: int, edge: int) -> None:
    """Drafts that are right, wrong or partly right over the ends of entries, states and blocks.

    Then the same text goes on from what was kept of it.
    """
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [text(edge - before, drafts) for before in range(1, 4)] + [text(edge + 1)]
    engine = machine.begin(blocks=20, states=20, seqs=4, step=600, drafts=0)
    plain = [engine.add_request(f"{i}", p, params) for i, p in enumerate(prompts)]
    run_until_idle(engine)
    for right in (0.4, 1.0):
        engine = machine.begin(blocks=20, states=20, seqs=4, step=600, drafts=drafts)
        oracle = Oracle(engine, right, seed=edge)
        oracle.learn(plain)
        results = [engine.add_request(f"{i}", p, params) for i, p in enumerate(prompts)]
        run_until_idle(engine)
        assert [r.outputs for r in results] == [r.outputs for r in plain]
        wrong = sum(machine.check(result) for result in results)
        assert right == 1.0 or wrong > 0
        for i, result in enumerate(results):
            longer = [*result.prompt_token_ids, *result.outputs[0].token_ids, 7, 8, 9]
            again = engine.add_request(f"again {i}", longer, params)
            run_until_idle(engine)
            assert again.num_cached_tokens == (len(longer) - 4) // BLOCK * BLOCK
            machine.check(again)
        assert_idle(engine)


@AS_TRAINED_IN_CORE
@settings(max_examples=max(2, settings().max_examples // 34))
@given(data=st.data())
def test_random_schedules(machine: Machine, data: st.DataObject) -> None:
    """Arrivals, aborts, preemption, common beginnings, evictions; first without drafts."""
    crowded = data.draw(st.booleans(), "crowded")
    blocks = data.draw(st.integers(2, 3 if crowded else 5), "blocks")
    sizes: dict[str, int] = {
        "blocks": blocks,
        "states": data.draw(st.sampled_from([0, 1, 4]), "states"),
        "seqs": 4 if crowded else data.draw(st.integers(1, 4), "sequences"),
        "step": data.draw(st.sampled_from([300, 3, 70, 130, 520]), "tokens a step"),
    }
    seed = data.draw(st.integers(0, 2**32), "draws")
    drafts = data.draw(st.integers(1, 3), "drafts")
    engine = machine.begin(**sizes, drafts=0)
    plain = arrivals(engine, seed, crowded, BLOCK * blocks - 1, aborts=False)
    assert_idle(engine)
    engine = machine.begin(**sizes, drafts=drafts)
    before = list(engine._meter.drafts_accepted)
    oracle = Oracle(engine, data.draw(st.sampled_from([0.5, 0.9]), "right"), seed)
    oracle.learn(plain)
    results = arrivals(engine, seed, crowded, BLOCK * blocks - 1, aborts=True)
    wanted = {result.request_id: result for result in plain}
    for result in results:
        assert result.outputs == wanted[result.request_id].outputs and result.error is None
        machine.check(result)
    event(f"preempted: {engine.scheduler.counts.preemptions > 0}")
    event(f"found: {engine.scheduler.counts.cached_tokens > 0}")
    event(f"accepted: {engine._meter.drafts_accepted[drafts - 1] > before[drafts - 1]}")
    assert_idle(engine)


def arrivals(
    engine: Engine, seed: int, crowded: bool, longest: int, *, aborts: bool
) -> list[RequestOutput]:
    """The same requests for one seed, run to their ends, except for some that are given up."""
    draw, chance = random.Random(seed), random.Random(seed + 1)
    count = draw.randint(3, 6)
    return random_arrivals(
        engine, draw, text, count, longest, crowded=crowded, chance=chance, aborts=aborts
    )
