"""When an output may end, and what its text then contains."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.integrity import check_engine

from finwhale import LLM, RequestError, SamplingParams
from finwhale.bench.engine import draft_on_device
from finwhale.chat.grammar import regex_guide
from finwhale.engine.loop.launching import Launcher
from finwhale.engine.ranks.ranks import first_rank

EOS = 1
SURE = {EOS: 100.0, 9: 80.0}  # the end of sequence always comes, or else token 9


def ending(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "logit_bias": SURE} | more)


@pytest.mark.parametrize("drafts", [0, 2])
def test_min_tokens(small: tuple[Path, dict[str, Any]], drafts: int) -> None:
    path, options = small
    llm = LLM(path, **options, draft_tokens=drafts)
    prompts = [[5, 6], [7] * 30, [8], [4, 4]]
    wanted = [
        ending(),
        ending(min_tokens=5),
        ending(min_tokens=12),
        ending(min_tokens=4, stop_token_ids=[9], logit_bias={9: 100.0, EOS: 90.0, 11: 80.0}),
    ]
    for ahead in (0, 1) if not drafts else (0,):
        llm._engine.steps_ahead = ahead
        outputs = [result.outputs[0] for result in llm.generate(prompts, wanted)]
        assert [output.token_ids for output in outputs] == [
            [EOS],
            [9] * 5 + [EOS],
            [9] * 12,
            [11] * 4 + [9],
        ]
        assert [output.finish_reason for output in outputs] == ["stop", "stop", "length", "stop"]


@pytest.mark.parametrize("drafts", [0, 2])
def test_steps_wait_only_for_the_first_min_tokens(
    drafts: int, small: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = small
    engine = LLM(path, **options, draft_tokens=drafts)._engine
    if drafts:
        draft_on_device(first_rank(engine.executor), engine.config)
    engine.steps_ahead = 1
    waited = []  # for each step whose sampling waits: the tokens that the request has

    def sample(*args: Any, sample: Any = Launcher._sample) -> Any:
        waited.append(len(result.outputs[0].token_ids))
        return sample(*args)

    monkeypatch.setattr(Launcher, "_sample", sample)
    wanted = (ending(min_tokens=6, max_tokens=30, logit_bias=None), ending(ignore_eos=True))
    result, _ = (engine.add_request(str(i), [5 + i], each) for i, each in enumerate(wanted))
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert len(result.outputs[0].token_ids) > 20
    # Without drafts, the forward of one more step is launched before the sixth token is known.
    assert waited and max(waited) == (5 if drafts else 6)


def test_min_tokens_of_random_outputs(small: tuple[Path, dict[str, Any]]) -> None:
    """Drafting changes no token, and nothing is withheld later."""
    path, options = small
    params = SamplingParams(
        seed=3, n=3, min_tokens=6, max_tokens=40, logit_bias={EOS: 4.0}, stop_token_ids=[7, 8]
    )
    plain = LLM(path, **options).generate([[5] * 9], params)[0].outputs
    drafted = LLM(path, **options, draft_tokens=3).generate([[5] * 9], params)[0].outputs
    assert [o.token_ids for o in plain] == [o.token_ids for o in drafted]
    assert all(len(o.token_ids) > 6 for o in plain)
    assert any(o.finish_reason == "stop" for o in plain)


def test_a_grammar_may_end_earlier(llm: LLM) -> None:
    params = SamplingParams(guide=regex_guide("abc"), min_tokens=9, max_tokens=12)
    output = llm.generate("x", params)[0].outputs[0]
    assert output.text == "abc" and output.finish_reason == "stop"


def test_stop_strings_count_after_min_tokens(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    whole = llm.generate("The fin whale", SamplingParams(**options))[0].outputs[0].text
    first = whole[:3]
    (result,) = llm.generate("The fin whale", SamplingParams(**options, stop=first))
    assert result.outputs[0].text == ""
    (result,) = llm.generate("The fin whale", SamplingParams(**options, stop=first, min_tokens=4))
    assert result.outputs[0].text.startswith(first) and len(result.outputs[0].token_ids) >= 4


def test_the_stop_string_may_be_kept(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    whole = llm.generate("The fin whale", SamplingParams(**options))[0].outputs[0]
    stop = whole.text[4:8]
    kept = SamplingParams(**options, stop=stop, include_stop_str_in_output=True)
    output = llm.generate("The fin whale", kept)[0].outputs[0]
    assert output.text == whole.text[: whole.text.index(stop) + len(stop)]
    assert output.stop_reason == stop
    token = whole.token_ids[5]
    at = whole.token_ids.index(token)
    for keep in (False, True):
        params = SamplingParams(**options, stop_token_ids=[token], include_stop_str_in_output=keep)
        output = llm.generate("The fin whale", params)[0].outputs[0]
        assert output.text == llm.get_tokenizer().decode(whole.token_ids[: at + keep])


def test_special_tokens_may_be_kept(llm: LLM) -> None:
    special = max(llm.get_tokenizer().special_ids - {EOS})
    options: dict[str, Any] = {
        "temperature": 0, "max_tokens": 2, "ignore_eos": True, "logit_bias": {special: 100.0}
    }  # fmt: skip
    texts = [
        llm.generate("x", SamplingParams(**options, skip_special_tokens=skip))[0].outputs[0].text
        for skip in (True, False)
    ]
    assert texts == ["", llm.get_tokenizer().token_text(special) * 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_tokens": -1},
        {"min_tokens": True},
        {"min_tokens": 1.5},
        {"min_tokens": 9, "max_tokens": 8},
        {"skip_special_tokens": None},
        {"include_stop_str_in_output": 1},
    ],
)
def test_values_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_stop_strings_of_a_chat(llm: LLM) -> None:
    """They count after min_tokens, and may be kept."""
    hello: Any = [{"role": "user", "content": "Hi"}]

    def answer(**more: Any) -> str:
        params = SamplingParams(temperature=0, max_tokens=20, **more)
        message = llm.chat(hello, params)[0].outputs[0].message
        assert message is not None
        return str(message["content"])

    whole = answer()
    stop = whole[1:3]
    before = whole[: whole.index(stop)]
    assert answer(stop=stop) == before
    assert answer(stop=stop, include_stop_str_in_output=True) == before + stop
    assert answer(stop=whole[:3], min_tokens=4) == whole
