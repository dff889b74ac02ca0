"""Structured output through LLM.generate: every output matches, nothing is left behind."""

import re

import pytest

from finwhale import LLM, SamplingParams
from finwhale.chat import grammar
from finwhale.chat.grammar import json_guide, lark_guide, regex_guide
from finwhale.errors import RequestError
from finwhale.request import Guide

WORD = r"[a-z]{2,5}-[0-9]{1,3}"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_outputs_match_beside_others(llm: LLM, temperature: float) -> None:
    guided = SamplingParams(
        n=3, max_tokens=40, temperature=temperature, seed=4, guide=regex_guide(WORD), logprobs=1
    )
    free = SamplingParams(n=2, max_tokens=9, temperature=temperature, seed=4, ignore_eos=True)
    alone = llm.generate("The whale", free)[0]
    results = llm.generate(["The whale", "The whale", "A song"], [guided, free, guided])
    for result in (results[0], results[2]):
        assert result.error is None
        for output in result.outputs:
            assert re.fullmatch(WORD, output.text), output.text
            assert output.finish_reason == "stop" and output.token_ids[-1] == 1
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    assert [o.token_ids for o in results[1].outputs] == [o.token_ids for o in alone.outputs]


def test_stop_strings_and_length_end_guided_output(llm: LLM) -> None:
    guide = regex_guide("abcdefghij" * 3)
    stopped = llm.generate("x", SamplingParams(guide=guide, stop="fg", max_tokens=90))[0]
    assert stopped.outputs[0].text == "abcde" and stopped.outputs[0].stop_reason == "fg"
    short = llm.generate("x", SamplingParams(guide=guide, max_tokens=2))[0].outputs[0]
    assert short.finish_reason == "length" and "abcdefghij".startswith(short.text[:10])


def test_the_end_may_be_ignored(llm: LLM) -> None:
    params = SamplingParams(guide=regex_guide("ab"), ignore_eos=True, max_tokens=8)
    output = llm.generate("x", params)[0].outputs[0]
    assert output.text == "ab" and output.token_ids[-1] == 1 and len(output.token_ids) == 8


def test_a_grammar_that_no_token_fits_is_an_error_of_its_request(llm: LLM) -> None:
    impossible = SamplingParams(guide=json_guide({"enum": []}), max_tokens=4)
    fine = SamplingParams(max_tokens=4, ignore_eos=True)
    wrong, other = llm.generate(["x", "x"], [impossible, fine])
    assert wrong.error is not None and wrong.outputs[0].finish_reason == "error"
    assert other.error is None and len(other.outputs[0].token_ids) == 4


def test_slow_masks_end_their_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "MASK_BURST_SECONDS", 1e-7)
    slow = SamplingParams(guide=regex_guide(WORD), n=2, max_tokens=9)
    fine = SamplingParams(max_tokens=9, ignore_eos=True)
    prompt = "The whale " * 120
    llm.generate(prompt, fine)
    wrong, other = llm.generate([prompt, prompt], [slow, fine])
    assert wrong.error is not None and wrong.error.startswith("the grammar is too slow")
    assert {output.finish_reason for output in wrong.outputs} == {"error"}
    assert other.error is None and len(other.outputs[0].token_ids) == 9
    # The model's state is sound: what was kept of prompts can still be used.
    assert llm.generate(prompt, fine)[0].num_cached_tokens >= 256


@pytest.mark.parametrize("guide", [Guide(grammar="?"), lark_guide("start: x"), regex_guide("[")])
def test_bad_grammars_are_refused(llm: LLM, guide: Guide) -> None:
    result = llm.generate("x", SamplingParams(guide=guide))[0]
    assert result.error is not None and result.error.startswith("the grammar is not valid")


def test_logit_bias(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={9: 100, 8: 50})
    assert llm.generate("x", params)[0].outputs[0].token_ids == [9, 9, 9]
    banned = llm.generate("x", SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
    token = banned.outputs[0].token_ids[0]
    other = SamplingParams(temperature=0, max_tokens=1, logit_bias={token: -100}, ignore_eos=True)
    assert llm.generate("x", other)[0].outputs[0].token_ids[0] != token
    with pytest.raises(RequestError, match="must be of token ids"):
        SamplingParams(logit_bias={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="-100 to 100"):
        SamplingParams(logit_bias={1: 101})
    wrong = llm.generate("x", SamplingParams(logit_bias={10**6: 1}))[0]
    assert wrong.error is not None and "not in 0..399" in wrong.error


def test_guides_need_a_tokenizer(no_tokenizer_path: object) -> None:
    llm = LLM(no_tokenizer_path, device="cpu")  # type: ignore[arg-type]
    result = llm.generate([[1, 2]], SamplingParams(guide=regex_guide("a")))[0]
    assert result.error is not None and "needs a tokenizer" in result.error
