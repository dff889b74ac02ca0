"""Shared prefixes and preemption through a whole engine: no logit changes, not in one bit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.support.stepping import Stepper
from torch import Tensor

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.pages import PageManager, pages_at_block_end, windowed_pages
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.ranks.ranks import first_rank

from .arrivals import random_arrivals
from .conftest import EXACT_IN_CORE, MODELS
from .plans import completing
from .running import assert_idle, run_until_idle

BLOCK = 256
EXACT, AS_TRAINED = MODELS


@dataclass
class Model:
    """One model, read as a whole (the definition) and by engines of all sizes."""

    run: Engine
    stepper: Stepper
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def engine(
        self, *, blocks: int, states: int, seqs: int = 4, step: int = 150, **options: bool
    ) -> Engine:
        """The engine with a new scheduler that has so many blocks and states, and no more.

        Args:
            ahead: plan each step before the tokens of the last are known.
            prefix_caching: whether blocks are kept.
        """
        groups = first_rank(self.run.executor).runner.groups
        ahead, caching = options.get("ahead", False), options.get("prefix_caching", True)
        num_pages = {}
        for group in groups:
            num_pages[group.name] = 1 + blocks * (BLOCK // group.tokens_per_page)
            if group.keep is not None:
                more = states * pages_at_block_end(group)
                num_pages[group.name] = windowed_pages(group, seqs, step, caching) + more
            assert num_pages[group.name] <= self.run.executor.description.num_pages[group.name]
        self.run.begin(
            Scheduler(
                PageManager(groups, num_pages),
                sizes=StepSizes.given(seqs, step),
                prefix_caching=caching,
            )
        )
        self.run.steps_ahead = int(ahead)
        return self.run

    def alone(self, tokens: Sequence[int], start: int) -> Tensor:
        """[len(tokens) - start,V]: logits after each token from `start` on, the text read whole."""
        key = (start, *tokens)
        if key not in self.known:
            self.known.clear()
            self.known[key] = self.stepper.logits(self.stepper.read(tokens)[start:])
        return self.known[key]


@pytest.fixture(scope="module")
def model(small: tuple[Path, dict[str, Any]]) -> Model:
    path, options = small
    llm, other = (LLM(path, **options) for _ in range(2))
    return Model(llm._engine, Stepper(other._engine))


class Recorder:
    """Stands in for the runner's logits and notes them: sequence, tokens read, logits."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.run = type(first_rank(engine.executor).runner).logits.__get__(
            first_rank(engine.executor).runner
        )
        self.rows: dict[tuple[str, int], list[Tensor]] = {}
        self.num_read = 0
        first_rank(engine.executor).runner.logits = self  # type: ignore[method-assign,assignment]

    def __call__(self, plan: StepPlan) -> Tensor:
        logits = self.run(plan)
        self.num_read += plan.num_tokens
        ends = [end for end, count in zip(plan.ends, plan.num_logits, strict=True) if count]
        for sequence, end, row in zip(completing(self.engine, plan), ends, logits, strict=True):
            self.rows.setdefault((sequence.key, end), []).append(row.clone())
        return logits


def assert_as_alone(model: Model, recorder: Recorder, result: RequestOutput) -> None:
    """Every logit that any of its tokens was chosen from is that of the text read as a whole."""
    for output in result.outputs:
        tokens = [*result.prompt_token_ids, *output.token_ids]
        first = len(result.prompt_token_ids)
        wanted = model.alone(tokens[:-1], first - 1)
        for end in range(first, len(tokens)):
            for row in recorder.rows[f"{result.request_id}/{output.index}", end]:
                assert torch.equal(row, wanted[end - first]), (result.request_id, end)


def text(model: Model, length: int, salt: object = 0) -> list[int]:
    draw = random.Random(f"{length} {salt}")
    return [draw.randrange(2, model.run.model_config.vocab_size) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


AROUND = sorted(
    {b + d for b in (4, 128, 256, 384, 512) for d in (-5, -4, -1, 0, 1, 3, 4)} - {-1, 0}
)


@EXACT_IN_CORE
def test_a_hit_at_every_alignment(model: Model) -> None:
    """Prefixes that end around 4, 128 and the page: what is found, and every logit behind it."""
    engine = model.engine(blocks=20, states=20)
    recorder = Recorder(engine)
    common = text(model, 600)
    engine.add_request("first", common, greedy(3))
    run_until_idle(engine)
    for end in AROUND:
        question = [*common[:end], 1, *text(model, 9, end)]
        result = engine.add_request(f"to {end}", question, greedy(6))
        run_until_idle(engine)
        assert result.num_cached_tokens == end // BLOCK * BLOCK
        assert_as_alone(model, recorder, result)
    assert_idle(engine)


@pytest.mark.parametrize(
    "small, ahead",
    [
        pytest.param(EXACT, False, id="exact-False"),
        pytest.param(AS_TRAINED, True, id="as-trained-True"),
        pytest.param(EXACT, True, id="exact-True", marks=pytest.mark.long),
        pytest.param(AS_TRAINED, False, id="as-trained-False", marks=pytest.mark.long),
    ],
    indirect=["small"],
)
def test_a_conversation_that_grows(model: Model, ahead: bool) -> None:
    """Each turn finds all but the last partial block of what was said; the tokens in use agree."""
    engine = model.engine(blocks=20, states=20, ahead=ahead)
    recorder = Recorder(engine)
    said: list[int] = []
    for turn, (length, output) in enumerate([(200, 70), (30, 250), (3, 1), (255, 4), (40, 120)]):
        known = max(0, len(said) - 1)
        said += text(model, length, turn)
        result = engine.add_request(f"turn {turn}", said, greedy(output))
        run_until_idle(engine)
        assert result.num_cached_tokens == known // BLOCK * BLOCK
        assert_as_alone(model, recorder, result)
        said = said + result.outputs[0].token_ids
    assert_idle(engine)


@pytest.mark.parametrize(
    "length",
    [*(pytest.param(n, marks=pytest.mark.long) for n in (255, 511, 600)), 256, 257, 513],
)
def test_several_continuations_read_their_prompt_once(model: Model, length: int) -> None:
    engine = model.engine(blocks=20, states=20)
    recorder = Recorder(engine)
    params = SamplingParams(n=4, temperature=1, seed=5, max_tokens=5, ignore_eos=True)
    result = engine.add_request("four", text(model, length), params)
    run_until_idle(engine)
    found = (length - 1) // BLOCK * BLOCK
    assert recorder.num_read == length + 3 * (length - found) + 4 * 4
    # What the first found: its siblings' state is no saving that anybody asked for.
    assert result.num_cached_tokens == 0
    assert_as_alone(model, recorder, result)
    assert_idle(engine)


def test_preemption_changes_no_token(model: Model) -> None:
    """Two that grow over a block's end with pages for one: the later one yields and comes back."""
    engine = model.engine(blocks=3, states=2)
    recorder = Recorder(engine)

    def params(seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.9, seed=seed, max_tokens=30, frequency_penalty=0.5, ignore_eos=True
        )

    results = [engine.add_request(str(i), text(model, 250, i), params(i)) for i in range(3)]
    run_until_idle(engine)
    assert engine.scheduler.counts.preemptions >= 1
    for result in results:
        assert result.outputs[0].finish_reason == "length" and result.error is None
        assert_as_alone(model, recorder, result)
    assert_idle(engine)
    engine = model.engine(blocks=9, states=2)
    for i, result in enumerate(results):
        alone = engine.add_request("alone", result.prompt_token_ids, params(i))
        run_until_idle(engine)
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
    assert_idle(engine)


def test_without_prefix_caching_nothing_is_found(model: Model) -> None:
    engine = model.engine(blocks=9, states=0, prefix_caching=False)
    for i in range(2):
        result = engine.add_request(str(i), text(model, 300), greedy(2))
        run_until_idle(engine)
        assert result.num_cached_tokens == 0
    for pool in engine.scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages - 1


@EXACT_IN_CORE
@settings(max_examples=max(4, settings().max_examples // 24))
@given(data=st.data())
def test_random_schedules(model: Model, data: st.DataObject) -> None:
    """Arrivals, aborts, pools that force preemption, common beginnings, evictions in between."""
    # Several at once that grow over the end of a block with pages for few, or anything.
    crowded = data.draw(st.booleans(), "crowded")
    blocks = data.draw(st.integers(2, 3 if crowded else 5), "blocks")
    engine = model.engine(
        blocks=blocks,
        states=data.draw(st.sampled_from([0, 1, 4]), "states"),
        ahead=data.draw(st.booleans(), "ahead"),
        seqs=4 if crowded else data.draw(st.integers(1, 4), "sequences"),
        step=data.draw(st.sampled_from([300, 70, 130, 520]), "tokens a step"),
    )
    recorder = Recorder(engine)
    draw = random.Random(data.draw(st.integers(0, 2**32), "draws"))
    results = random_arrivals(
        engine,
        draw,
        partial(text, model),
        data.draw(st.integers(3, 6), "arrivals"),
        BLOCK * blocks - 1,
        crowded=crowded,
        chance=draw,
    )
    for result in results:
        assert result.finished and result.error is None
        assert_as_alone(model, recorder, result)
    counts = engine.scheduler.counts
    event(f"preempted: {counts.preemptions > 0}")
    event(f"found: {counts.cached_tokens > 0}")
    assert_idle(engine)
