"""Log-probabilities of prompts, against the model run on the whole text."""

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine
from tests.support.stepping import Stepper

from finwhale import LLM, RequestError, RequestOutput, SamplingParams
from finwhale.engine.loop.request_checks import checked_prompt
from finwhale.engine.ranks.ranks import first_rank
from finwhale.request import MAX_PROMPT_LOGPROBS


@pytest.fixture(scope="module")
def pair(small: tuple[Path, dict[str, Any]]) -> tuple[LLM, Stepper]:
    """An engine whose steps have at most 150 tokens, and the definition."""
    path, options = small
    llm = LLM(path, **(options | {"max_num_batched_tokens": 150}))
    return llm, Stepper(LLM(path, **options)._engine)


def text(length: int, salt: int = 0) -> list[int]:
    draw = random.Random(salt)
    return [draw.randrange(2, 300) for _ in range(length)]


def scoring(num_top: int = 2, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 2, "ignore_eos": True, "prompt_logprobs": num_top} | more
    )


def assert_right(stepper: Stepper, result: RequestOutput, num_top: int) -> None:
    """Each entry is the log-softmax of the logits that the whole text gives."""
    ids, found = result.prompt_token_ids, result.prompt_logprobs
    assert found is not None and len(found) == len(ids) and found[0] is None
    if len(ids) == 1:
        return
    logits = stepper.logits(stepper.read(ids)[:-1])
    for token, table, row in zip(ids[1:], found[1:], logits, strict=True):
        assert table is not None and next(iter(table)) == token
        wanted = row.double().log_softmax(-1)
        best = wanted.sort(descending=True, stable=True).indices[:num_top].tolist()
        assert set(table) == {token, *best}
        for other, entry in table.items():
            assert entry.logprob == pytest.approx(float(wanted[other]), abs=1e-5)
            assert entry.rank == int((row > row[other]).sum()) + 1


@pytest.mark.parametrize("length", [1, 2, 3, 149, 151, 600])
def test_whole_and_chunked_prompts(pair: tuple[LLM, Stepper], length: int) -> None:
    llm, stepper = pair
    (result,) = llm.generate([text(length)], scoring())
    assert_right(stepper, result, 2)


def test_beside_other_requests_and_on_prefix_hits(pair: tuple[LLM, Stepper]) -> None:
    llm, stepper = pair
    prompts = [text(700), text(700)[:300] + text(90, 1), text(40, 2), text(5, 3)]
    plain = scoring(None, max_tokens=8)  # type: ignore[arg-type]
    before = llm.generate(prompts, plain)
    tops = [0, 3, 1, 2]
    mixed = llm.generate(
        prompts * 2, [*(scoring(top, n=2, max_tokens=8) for top in tops), *[plain] * 4]
    )
    for result, top in zip(mixed, tops, strict=False):
        assert_right(stepper, result, top)
        assert result.num_cached_tokens == 0
    for one, other in zip(mixed, before * 2, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[-1].token_ids == other.outputs[0].token_ids
    assert mixed[4].prompt_logprobs is None
    # The blocks of a prompt that was scored serve other requests.
    llm._engine.reset_prefix_cache()
    llm.generate([prompts[0]], scoring())
    (again,) = llm.generate([prompts[0]], plain)
    assert (
        again.num_cached_tokens > 0 and again.outputs[0].token_ids == before[0].outputs[0].token_ids
    )


def test_with_a_grammar_and_a_step_ahead(pair: tuple[LLM, Stepper]) -> None:
    llm, stepper = pair
    llm._engine.steps_ahead = 1
    try:
        results = llm.generate(
            [text(320, 5), text(3, 6)], scoring(1, repetition_penalty=1.2, max_tokens=4)
        )
    finally:
        llm._engine.steps_ahead = 0
    for result in results:
        assert_right(stepper, result, 1)


def test_a_drafting_engine(small: tuple[Path, dict[str, Any]], pair: tuple[LLM, Stepper]) -> None:
    path, options = small
    llm = LLM(path, **(options | {"max_num_batched_tokens": 150, "draft_tokens": 2}))
    for result in llm.generate([text(320, 7), text(2, 8), text(30, 9)], scoring(max_tokens=6)):
        assert_right(pair[1], result, 2)


def test_an_aborted_request(pair: tuple[LLM, Stepper]) -> None:
    engine = pair[0]._engine
    engine.steps_ahead = 1
    try:
        engine.add_request("a", text(400, 10), scoring())
        engine.step()
        engine.abort("a")
        assert engine.step() == []
    finally:
        engine.steps_ahead = 0
    check_engine(engine)


def test_logits_that_are_not_finite(
    pair: tuple[LLM, Stepper], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pair[0]
    model = first_rank(llm._engine.executor).runner.model
    compute, first = model.compute_logits, iter([True])

    def wrong(streams: torch.Tensor) -> torch.Tensor:
        logits = compute(streams)
        if next(first, False):
            logits[len(logits) // 2] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", wrong)
    (result,) = llm.generate([text(400, 11)], scoring())
    assert result.error is not None and "not finite" in result.error
    assert result.outputs[0].finish_reason == "error"
    check_engine(llm._engine)


def test_a_number_that_is_too_large_is_refused() -> None:
    for wrong in (101, -1, True, 1.0):
        with pytest.raises(RequestError, match="prompt_logprobs must be"):
            scoring(wrong)  # type: ignore[arg-type]
    length = MAX_PROMPT_LOGPROBS // 101
    for count, refused in ((length, False), (length + 1, True)):
        wanted = pytest.raises(RequestError, match="ask for fewer") if refused else nullcontext()
        with wanted:
            rank = SimpleNamespace(max_model_len=10**6, routed_experts=None)
            checked_prompt([1] * count, scoring(100), rank, 9, has_tokenizer=False)
