"""The engine's loop: mixed batches, aborts in every phase, failures of one request alone."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine
from torch import Tensor

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.step_budget import LEAST_TOKENS
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start.kv_cache import plan_cache

from .plans import completing

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt(length: int, salt: int = 0) -> list[int]:
    draw = random.Random(f"{length} {salt}")
    return [draw.randrange(7, 400) for _ in range(length)]


def run(engine: Engine) -> int:
    """Steps until there is no work; returns how many."""
    steps = 0
    while engine.has_work:
        engine.step()
        check_engine(engine)
        steps += 1
    return steps


def tokens(result: RequestOutput) -> list[int]:
    return result.outputs[0].token_ids


def alone(llm: LLM, ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return tokens(llm.generate([ids], params)[0])


def test_mixed_lengths_in_one_batch(llm: LLM) -> None:
    prompts = [prompt(n) for n in (1, 3, 4, 13, 127, 130, 300)]
    results = llm.generate(prompts, GREEDY)
    for ids, result in zip(prompts, results, strict=True):
        assert result.finished and result.error is None
        assert result.prompt_token_ids == ids
        assert result.outputs[0].finish_reason == "length"
        assert tokens(result) == alone(llm, ids)


def test_a_long_prompt_is_read_in_chunks_beside_running_ones(new_llm: Callable[..., LLM]) -> None:
    llm = new_llm(max_num_batched_tokens=20)
    engine = llm._engine
    first = engine.add_request("first", prompt(5), GREEDY)
    engine.step()
    assert len(tokens(first)) == 1
    second = engine.add_request("second", prompt(41), GREEDY)
    # Longer than a step: 7 tokens beside each of the first's. The last 20 and less: up to 14.
    for made in range(2, 6):
        assert engine.step() == [first]
        assert (len(tokens(first)), len(tokens(second))) == (made, 0)
    assert engine.step() == [first, second]
    run(engine)
    assert tokens(second) == alone(llm, prompt(41))


def test_a_target_interval_makes_steps_small(new_llm: Callable[..., LLM]) -> None:
    """No step keeps this target, so beside a stream each reads the least."""
    llm = new_llm(max_num_batched_tokens=512, target_interval=0.001)
    engine = llm._engine
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add_request("stream", prompt(5), params)
    engine.step()
    ids = prompt(400)
    second = engine.add_request("second", ids, SamplingParams(temperature=0, max_tokens=4))
    read = [0]
    while not tokens(second):
        engine.step()
        read.append(engine.lanes[0].scheduler.running[-1].num_computed)
    assert max(b - a for a, b in itertools.pairwise(read)) == LEAST_TOKENS
    run(engine)
    assert tokens(second) == alone(llm, ids)[:4]


def test_more_requests_than_fit_in_memory_take_turns(new_llm: Callable[..., LLM]) -> None:
    """Room for eight sequences at once, but memory for the pages of three."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    roomy = new_llm(**sizes)
    three = plan_cache(
        first_rank(roomy._engine.executor).runner.groups,
        itemsize=4,
        budget_bytes=10**12,
        max_num_seqs=8,
        max_step_tokens=64,
        wanted_tokens=3 * 256,
    )
    llm = new_llm(**sizes, cache_memory_bytes=three.total_bytes, enable_prefix_caching=False)
    engine = llm._engine
    prompts = [prompt(n) for n in range(20, 31)]
    results = [engine.add_request(str(n), ids, GREEDY) for n, ids in enumerate(prompts)]
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3
    assert [tokens(r) for r in results] == [alone(roomy, ids) for ids in prompts]


def test_a_request_ends_at_the_longest_context(new_llm: Callable[..., LLM]) -> None:
    llm = new_llm(max_model_len=40)
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    huge = SamplingParams(temperature=0, max_tokens=10**12, ignore_eos=True)
    for params in (endless, huge):
        for length in (1, 30, 39):
            result = llm.generate([prompt(length)], params)[0]
            assert len(tokens(result)) == 40 - length
            assert result.outputs[0].finish_reason == "length"
    whole = llm.generate([prompt(40)], endless)[0]
    assert whole.outputs[0].finish_reason == "error"
    assert whole.error is not None and "room for 40" in whole.error


# --- Aborts ---------------------------------------------------------------------------------------


def start(engine: Engine, name: str, length: int, **params: Any) -> RequestOutput:
    chosen = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params)
    return engine.add_request(name, prompt(length), chosen)


@pytest.mark.parametrize(
    "steps", [0, 2, 4, 9, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 6))]
)
def test_abort_in_every_phase(new_llm: Callable[..., LLM], steps: int) -> None:
    """Waiting, while its prompt is read, between prompt and tokens, while decoding."""
    llm = new_llm(max_num_seqs=2, max_num_batched_tokens=32)
    engine = llm._engine
    kept = start(engine, "kept", 20)
    lost = start(engine, "lost", 100)
    waiting = start(engine, "waiting", 7)
    for _ in range(steps):
        engine.step()
    engine.abort("lost")
    check_engine(engine)
    before = list(tokens(lost))
    run(engine)
    assert tokens(lost) == before
    assert tokens(kept) == alone(llm, prompt(20))
    assert tokens(waiting) == alone(llm, prompt(7))


def test_abort_before_the_first_step_and_of_unknown_requests(llm: LLM) -> None:
    engine = llm._engine
    start(engine, "a", 5)
    engine.abort("a")
    engine.abort("a")
    engine.abort("never")
    assert not engine.has_work and engine.step() == []


def test_abort_of_several_continuations(new_llm: Callable[..., LLM]) -> None:
    """Some running, some waiting, some done."""
    engine = new_llm(max_num_seqs=2)._engine
    result = start(engine, "five", 9, n=5, temperature=1.0, seed=1, max_tokens=6)
    for _ in range(8):
        engine.step()
    reasons = [output.finish_reason for output in result.outputs]
    assert reasons == ["length", "length", None, None, None]
    engine.abort("five")
    assert not engine.has_work and not result.finished


def test_random_traffic(new_llm: Callable[..., LLM]) -> None:
    """Arrivals and aborts at random: who finishes has the tokens it would have alone."""
    llm = new_llm(max_num_seqs=3, max_num_batched_tokens=24)
    engine, draw = llm._engine, random.Random(5)
    running: dict[str, RequestOutput] = {}
    finished = []
    for step in range(220):
        if step < 150 and draw.random() < 0.25:
            name = f"r{step}"
            running[name] = start(engine, name, draw.randint(1, 60), max_tokens=draw.randint(1, 12))
        if running and draw.random() < 0.06:
            name = draw.choice(list(running))
            engine.abort(name)
            del running[name]
        for result in engine.step():
            if result.finished:
                finished.append(running.pop(result.request_id))
        check_engine(engine)
    run(engine)
    finished += running.values()
    assert len(finished) > 15
    for result in finished:
        ids = result.prompt_token_ids
        assert tokens(result) == alone(llm, ids)[: len(tokens(result))]


# --- Failures -------------------------------------------------------------------------------------


class Poison:
    """Stands in for the runner's logits: spoils the rows of the sequences with one prompt."""

    def __init__(self, engine: Engine, value: float, prompt_length: int, after: int = 0) -> None:
        self.engine, self.logits = engine, first_rank(engine.executor).runner.logits
        self.value = value
        self.prompt_length = prompt_length
        self.after = after

    def __call__(self, plan: StepPlan) -> Tensor:
        logits = self.logits(plan).clone()
        for row, sequence in enumerate(completing(self.engine, plan)):
            made = len(sequence.token_ids) - sequence.num_prompt
            if sequence.num_prompt == self.prompt_length and made >= self.after:
                logits[row, 17] = self.value
        return logits


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_fail_one_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, value: float, after: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True)
    prompts = [prompt(6), prompt(9), prompt(40)]
    wanted = [tokens(r) for r in llm.generate(prompts, params)]
    monkeypatch.setattr(
        first_rank(llm._engine.executor).runner, "logits", Poison(llm._engine, value, 9, after)
    )
    good, bad, other = llm.generate(prompts, params)
    assert [tokens(good), tokens(other)] == [wanted[0], wanted[2]]
    assert good.error is None and other.error is None
    assert bad.finished and bad.outputs[0].finish_reason == "error"
    assert tokens(bad) == wanted[1][:after]
    assert bad.error is not None and "not finite" in bad.error and "\n" not in bad.error


def test_minus_infinity_is_a_token_that_never_comes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        first_rank(llm._engine.executor).runner, "logits", Poison(llm._engine, -torch.inf, 9)
    )
    result = llm.generate([prompt(9)], SamplingParams(seed=3, max_tokens=8, ignore_eos=True))[0]
    assert result.error is None and len(tokens(result)) == 8


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_breaks_off_loses_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: int
) -> None:
    """Ctrl-C in the middle of a forward: pages go back, and the engine serves on."""
    wanted = alone(llm, prompt(30))
    logits, steps = first_rank(llm._engine.executor).runner.logits, 0

    def breaking(plan: StepPlan) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == at:
            raise error("stop")
        return logits(plan)

    with monkeypatch.context() as patched:
        patched.setattr(first_rank(llm._engine.executor).runner, "logits", breaking)
        with pytest.raises(error):
            llm.generate([prompt(30), prompt(200)], GREEDY)
    assert not llm._engine.has_work
    check_engine(llm._engine)
    assert alone(llm, prompt(30)) == wanted


def test_default_memory_lets_all_sequences_run_at_once(tiny_path: Path) -> None:
    """Reservations are whole pages: a short context must not leave room for one sequence alone."""
    llm = LLM(tiny_path, device="cpu", max_model_len=21, max_num_seqs=8)
    for i in range(8):
        endless = SamplingParams(max_tokens=4, ignore_eos=True)
        llm._engine.add_request(str(i), [5, 6, 7 + i], endless)
    llm._engine.step()
    assert len(llm._engine.scheduler.running) == 8
    while llm._engine.has_work:
        llm._engine.step()
