"""The asynchronous step against the synchronous one, on the CPU: the same tokens, nothing lost."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine
from torch import Tensor

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.chat.grammar import regex_guide
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.step_plan import PENDING, StepPlan
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps import host_transfer

from .plans import completing

EOS = 1


@pytest.fixture
def engines(new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The same engine twice: in order, and one step ahead on a device that is never done early."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 300}
    engines = [new_llm(**options)._engine for _ in range(2)]
    engines[1].steps_ahead = 1
    slow(engines[1], monkeypatch)
    return engines


def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch, log: list[str] | None = None) -> None:
    """What is brought to the host is rubbish until somebody waits for it."""

    class Late(host_transfer.Transfer):
        def __init__(self, tensors: Sequence[Tensor]) -> None:
            super().__init__(tensors)
            self.real = [tensor.clone() for tensor in tensors]
            self._host = [torch.full_like(tensor, 7) for tensor in tensors]

        def wait(self) -> Sequence[Tensor]:
            if log is not None:
                log.append("wait")
            for host, real in zip(self._host, self.real, strict=True):
                host.copy_(real)
            return self._host

    monkeypatch.setattr(engine.executor, "transfer", Late)
    if log is not None:
        logits = first_rank(engine.executor).runner.logits

        def launch(plan: StepPlan) -> Tensor:
            log.append("launch")
            return logits(plan)

        monkeypatch.setattr(first_rank(engine.executor).runner, "logits", launch)


def random_params(draw: random.Random) -> SamplingParams:
    """Any mixture of ways to choose, of ends and of things asked for."""
    wide: dict[str, Any] = {
        "temperature": draw.choice((0.0, 0.0, 0.7, 2.0)),
        "top_p": draw.choice((1.0, 0.8)),
        "top_k": draw.choice((0, 0, 20)),
        "min_p": draw.choice((0.0, 0.0, 0.05)),
        "logprobs": draw.choice((None, None, 0, 3)),
        "prompt_logprobs": draw.choice((None, None, None, 0, 2)),
        "seed": draw.randrange(100),
        "n": draw.choice((1, 1, 1, 3)),
        "max_tokens": draw.choice((1, 2, 5, 12, 20)),
        "ignore_eos": draw.random() < 0.7,
        "stop": draw.choice(((), (), ("e", "th"), ("a", "o", "n"))),
        "stop_token_ids": draw.choice(((), tuple(draw.sample(range(400), 60)))),
    }
    if draw.random() < 0.4:
        wide |= {
            "repetition_penalty": draw.choice((1.0, 1.3, 0.8)),
            "presence_penalty": draw.choice((0.0, 0.9)),
            "frequency_penalty": draw.choice((0.0, 0.6)),
        }
    if draw.random() < 0.3:
        wide["logit_bias"] = {draw.randrange(400): draw.uniform(-9, 9) for _ in range(20)}
    if draw.random() < 0.4:
        # Token 5 may come as any other; until then nothing but the end is held back.
        wide["guide"] = regex_guide(r"[a-z ]{1,9}(\d|!)", draw.choice((None, None, 5)))
    return SamplingParams(**wide)


def play(engine: Engine, seed: int) -> list[RequestOutput]:
    """The same arrivals for every engine; each step's integrity is checked."""
    draw = random.Random(seed)
    results: list[RequestOutput] = []
    for step in range(2000):
        if step < 60 and draw.random() < 0.4:
            length = draw.choice((1, 2, 30, 70, 130, draw.randint(1, 60)))
            ids = [draw.randrange(7, 400) for _ in range(length)]
            results.append(engine.add_request(f"r{step}", ids, random_params(draw)))
        engine.step()
        check_engine(engine)
        if step >= 60 and not engine.has_work:
            return results
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_tokens_are_those_of_the_synchronous_engine(engines: list[Engine], seed: int) -> None:
    """Every stop kind, n above 1, seeds, penalties, logprobs: equal to the last field."""
    wanted, found = (play(engine, seed) for engine in engines)
    assert found == wanted
    assert all(PENDING not in output.token_ids for r in found for output in r.outputs)
    ends = {output.finish_reason for r in found for output in r.outputs}
    assert ends == {"stop", "length"}


def test_aborts_in_flight(engines: list[Engine]) -> None:
    """Whoever is left has the tokens that it has without the others."""
    sync, ahead = engines
    draw = random.Random(11)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, frequency_penalty=0.5)
    kept: dict[str, RequestOutput] = {}
    for step in range(150):
        if draw.random() < 0.35:
            ids = [draw.randrange(7, 400) for _ in range(draw.randint(1, 60))]
            # An id comes again while the step of its namesake may still be in flight.
            name = next(str(i) for i in range(100) if str(i) not in ahead.outputs.requests)
            kept[name + f" {step}"] = ahead.add_request(name, ids, params)
        if ahead.outputs.requests and draw.random() < 0.2:
            name = draw.choice(list(ahead.outputs.requests))
            lost = ahead.outputs.requests[name].output
            ahead.abort(name)
            kept = {key: result for key, result in kept.items() if result is not lost}
            made = [list(output.token_ids) for output in lost.outputs]
            assert PENDING not in made[0]
        ahead.step()
        check_engine(ahead)
    while ahead.has_work:
        ahead.step()
    assert len(kept) > 10
    for result in kept.values():
        alone = sync.add_request("alone", result.prompt_token_ids, params)
        while not alone.finished:
            sync.step()
        assert result.finished and result.outputs == alone.outputs


def test_nothing_waits_before_the_next_launch(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a decode, whatever its parameters, the next forward is launched, then the last awaited."""
    engine = engines[1]
    log: list[str] = []
    slow(engine, monkeypatch, log)
    for params in (
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=9, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, presence_penalty=1.0, max_tokens=9, ignore_eos=True),
    ):
        log.clear()
        results = [engine.add_request(str(i), [5, 6, 7 + i], params) for i in range(3)]
        while engine.has_work:
            engine.step()
        # Not a step more than there are tokens: their number is known beforehand.
        assert log == ["launch", *["launch", "wait"] * 8, "wait"]
        assert all(len(result.outputs[0].token_ids) == 9 for result in results)


def test_an_end_of_sequence_costs_one_step(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step launched meanwhile is thrown away, and a request that goes on loses nothing."""
    log: list[str] = []
    slow(engines[1], monkeypatch, log)
    for engine in engines:
        logits = first_rank(engine.executor).runner.logits

        def ending(plan: StepPlan, engine: Any = engine, logits: Any = logits) -> Tensor:
            out: Tensor = logits(plan).clone()
            for row, sequence in enumerate(completing(engine, plan)):
                if sequence.request_id == "short" and len(sequence.token_ids) == 6:
                    out[row, EOS] = 1000.0
            return out

        monkeypatch.setattr(first_rank(engine.executor).runner, "logits", ending)
    params = SamplingParams(temperature=0, max_tokens=10)
    results = []
    for engine in engines:
        log.clear()
        short = engine.add_request("short", [9, 8, 7], params)
        long = engine.add_request("long", [9, 8, 7], params)
        while not short.finished:
            engine.step()
            check_engine(engine)
        assert len(short.outputs[0].token_ids) == 4
        assert len(engine.scheduler.running) == 1
        while engine.has_work:
            engine.step()
        results.append((short, long))
    assert results[0] == results[1]
    assert log.count("launch") == 10


def test_a_row_without_numbers_ends_one_request(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for engine in engines:
        logits = first_rank(engine.executor).runner.logits

        def spoilt(plan: StepPlan, engine: Any = engine, logits: Any = logits) -> Tensor:
            out: Tensor = logits(plan).clone()
            for row, sequence in enumerate(completing(engine, plan)):
                if sequence.request_id == "bad" and len(sequence.token_ids) == 5:
                    out[row, 17] = torch.nan
            return out

        monkeypatch.setattr(first_rank(engine.executor).runner, "logits", spoilt)
        params = SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
        pair = [engine.add_request(name, [9, 8, 7], params) for name in ("good", "bad")]
        while engine.has_work:
            engine.step()
            check_engine(engine)
        results.append(pair)
    assert results[0] == results[1]
    good, bad = results[1]
    assert good.error is None and len(good.outputs[0].token_ids) == 8
    assert bad.error is not None and len(bad.outputs[0].token_ids) == 2


def test_a_step_that_breaks_off_loses_nothing(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch fails while a step is in flight: called again, the engine goes on."""
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=8, ignore_eos=True)
    results = []
    for engine in engines:
        logits, count = first_rank(engine.executor).runner.logits, [0]

        def breaking(plan: StepPlan, logits: Any = logits, count: Any = count) -> Tensor:
            count[0] += 1
            if count[0] in (2, 5):
                raise KeyboardInterrupt
            out: Tensor = logits(plan)
            return out

        monkeypatch.setattr(first_rank(engine.executor).runner, "logits", breaking)
        result = engine.add_request("one", [9, 8, 7], params)
        broken = 0
        while engine.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                broken += 1
            check_engine(engine)
        assert broken == 2
        results.append(result)
    assert results[0] == results[1]


def test_streams_and_batches(new_llm: Callable[..., LLM]) -> None:
    """LLM's own loops: a stream that is left alone, then batches."""
    sync, ahead = new_llm(), new_llm()
    ahead._engine.steps_ahead = 1
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for llm in (sync, ahead):
        for count, result in enumerate(llm.stream([5, 6, 7], params), start=1):
            assert len(result.outputs[0].token_ids) == count
            if count == 4:
                break
        assert not llm._engine.has_work
    outputs = [
        [r.outputs for r in llm.generate([[5, 6, 7], [8], [9] * 50], params)]
        for llm in (sync, ahead)
    ]
    assert outputs[0] == outputs[1]
