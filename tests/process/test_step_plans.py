"""Step plans are complete: another process executes them, pickled, and computes the same bits."""

import pickle
import random
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.integrity import check_engine

from finwhale import RequestOutput, SamplingParams
from finwhale.chat.grammar import regex_guide
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.pages import PageManager, windowed_pages
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.step_plan import SamplingPlan, StepPlan
from finwhale.engine.plan.step_sizes import StepSizes

from . import step_plans

# Drafts, and whether decodes with drafts are launched ahead as on a GPU; with the seed of requests.
KINDS = ((0, False, 0), (2, True, 2))
# tests/distributed/test_equal_ranks.py also sends plans whose drafts the host knows.
LONG_KINDS = ((2, False, 1),)
BLOCK = 256
# Several sequences come to need a second block at once, and there are three blocks.
LENGTHS = (260, 260, 250, 250, 250, 251)


def crowd(engine: Engine, blocks: int) -> None:
    """Give the engine's sequences few pages, so that they are preempted."""
    groups, options = engine.executor.description.groups, step_plans.OPTIONS
    seqs, step = options["max_num_seqs"], options["max_num_batched_tokens"]
    num_pages = {
        group.name: 1 + blocks * (BLOCK // group.tokens_per_page)
        if group.keep is None
        else windowed_pages(group, seqs, step, True, True)
        for group in groups
    }
    engine.begin(Scheduler(PageManager(groups, num_pages), sizes=StepSizes.given(seqs, step)))


def play(engine: Engine, seed: int) -> list[RequestOutput]:
    """Requests of all kinds at random times; the second one finds the first one's text."""
    draw = random.Random(seed)
    common = [draw.randrange(7, 400) for _ in range(LENGTHS[0])]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 3, "top_p": 0.9, "logprobs": 2, "n": 2},
        {"top_k": 20, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"seed": 10**30, "logit_bias": {9: 5.0}, "presence_penalty": 0.4},
        {"temperature": 0, "guide": regex_guide(r"[a-z ]{20}")},
    ]
    results = []
    for number, kind in enumerate(kinds):
        prompt = common if number < 2 else [draw.randrange(7, 400) for _ in range(LENGTHS[number])]
        params = SamplingParams(max_tokens=20, ignore_eos=True, **kind)
        results.append(engine.add_request(str(number), prompt, params))
        for _ in range(30 if number == 0 else draw.randrange(4)):
            engine.step()
    while engine.has_work:
        engine.step()
        check_engine(engine)
    return results


def objects(value: Any) -> set[type]:
    """The types of everything in a plan."""
    found = {type(value)}
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, list | tuple):
        for part in value:
            found |= objects(part)
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "kinds",
    [KINDS, pytest.param(LONG_KINDS, marks=pytest.mark.long)],
    ids=["core", "over-the-host"],
)
def test_another_process_computes_the_same_bits(
    tiny_path: Path, tmp_path: Path, kinds: tuple[tuple[int, bool, int], ...]
) -> None:
    recorded, wanted = [], []
    for draft_tokens, ahead, seed in kinds:
        kind = draft_tokens, ahead
        engine = step_plans.open_llm(tiny_path, *kind)._engine
        engine.executor = noting = step_plans.Noting(engine.executor)  # type: ignore[arg-type,assignment]
        engine.steps_ahead = 1
        crowd(engine, blocks=3)
        results = play(engine, seed)
        plans = [pickle.loads(pickled) for pickled in noting.plans]
        check_variety(engine, plans, results, *kind)
        assert max(map(len, noting.plans)) < 2**14
        recorded.append((kind, noting.plans))
        wanted.append(noting.bits)
    (tmp_path / "plans").write_bytes(pickle.dumps(recorded))
    subprocess.run(
        [sys.executable, step_plans.__file__, tiny_path, tmp_path / "plans", tmp_path / "bits"],
        check=True,
        timeout=300,
    )
    assert pickle.loads((tmp_path / "bits").read_bytes()) == wanted


def check_variety(
    engine: Engine, plans: list[Any], results: list[RequestOutput], draft_tokens: int, ahead: bool
) -> None:
    """The schedule has everything that a plan can say."""
    steps = [plan for plan in plans if isinstance(plan, StepPlan)]
    choices = [plan for plan in plans if isinstance(plan, SamplingPlan)]
    modules = {kind.__module__ for plan in plans for kind in objects(plan)}
    assert modules <= {"builtins", "numpy", "finwhale.engine.plan.step_plan"}
    assert all(result.finished and result.error is None for result in results)
    assert engine.scheduler.counts.preemptions > 0
    assert results[1].num_cached_tokens == BLOCK
    assert any(plan.freed for plan in steps) and any(plan.admitted for plan in steps)
    assert any(not all(plan.num_logits) for plan in steps)  # parts of prompts
    assert any(plan.penalties is not None for plan in choices)
    assert any(plan.allowed is not None for plan in choices)
    assert any(plan.sampling is not None and plan.sampling.positions for plan in steps)
    if draft_tokens:
        drafts = [plan.draft for plan in steps if plan.draft is not None]
        assert any(any(draft.drafts) for draft in drafts)
        assert any(draft.previous_rows is not None for draft in drafts) == ahead
    else:
        assert any(plan.pending_rows for plan in steps)
