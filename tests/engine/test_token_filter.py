"""allowed_token_ids and bad_words: alone, with a grammar, among others and with drafts."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from finwhale import LLM, SamplingParams
from finwhale.chat.grammar import regex_guide
from finwhale.engine.plan.token_filter import TokenFilter
from finwhale.errors import RequestError

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def demo_llm(short_demo_path: Path) -> Iterator[LLM]:
    with LLM(short_demo_path, device="cpu", max_model_len=256) as llm:
        yield llm


def test_outputs_have_only_allowed_tokens(demo_llm: LLM) -> None:
    allowed = [5, 31, 32, 300]
    params = [
        SamplingParams(max_tokens=20, seed=seed, temperature=t, allowed_token_ids=ids)
        for seed, (t, ids) in enumerate([(0, allowed), (2.0, allowed), (0, ()), (2.0, [300])])
    ]
    mapping = {"prompt_token_ids": demo_llm.encode(PROMPT)}
    found = [r.outputs[0] for r in demo_llm.generate([PROMPT, mapping, PROMPT, PROMPT], params)]
    assert {*found[0].token_ids} <= {*allowed} and {*found[1].token_ids} <= {*allowed}
    assert not {*found[2].token_ids} <= {*allowed} and {*found[3].token_ids} == {300}
    assert [one.finish_reason for one in found] == ["length"] * 4


def test_an_end_of_sequence_must_be_allowed(demo_llm: LLM) -> None:
    end = demo_llm._engine.model_config.eos_token_ids[0]
    params = SamplingParams(max_tokens=9, min_tokens=3, allowed_token_ids=[7, end], temperature=2)
    (made,) = demo_llm.generate(PROMPT, params)
    tokens = made.outputs[0].token_ids
    assert tokens[:3] == [7, 7, 7] and {*tokens} <= {7, end}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_bad_words_never_come(demo_llm: LLM, temperature: float) -> None:
    """Words that come without them, one of which has several tokens."""
    options = {"temperature": temperature, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    text = demo_llm.generate(PROMPT, SamplingParams(**options))[0].outputs[0].text
    tokenizer = demo_llm.get_tokenizer()
    words = sorted({word for word in text.split() if len(tokenizer.encode(word)) > 1})
    assert words, text
    params = SamplingParams(**options, bad_words=words)
    without = demo_llm.generate(PROMPT, params)[0].outputs[0]
    bad = [tokenizer.encode(start + word) for word in words for start in ("", " ")]
    ids = without.token_ids
    assert not any(ids[i : i + len(b)] == b for b in bad for i in range(len(ids)))
    assert without.text != text


def test_a_grammar_that_needs_a_bad_word_ends_its_request_alone(demo_llm: LLM) -> None:
    guide = regex_guide("aaaa")
    token = demo_llm.get_tokenizer().encode("a")
    params = SamplingParams(guide=guide, temperature=0, allowed_token_ids=token)
    fitting, not_fitting, other = demo_llm.generate(
        [PROMPT] * 3,
        [
            params,
            SamplingParams(guide=guide, temperature=0, allowed_token_ids=[5]),
            SamplingParams(max_tokens=3),
        ],
    )
    assert fitting.outputs[0].text.startswith("a") and other.error is None
    assert "the request allows no token here" in (not_fitting.error or "")


def test_drafts_obey(short_demo_path: Path) -> None:
    """With drafts, the same tokens as without."""
    options = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    found = []
    for drafts in (0, 2):
        with LLM(short_demo_path, device="cpu", draft_tokens=drafts, max_model_len=256) as llm:
            text = llm.generate(PROMPT, SamplingParams(**options))[0].outputs[0].text
            params = SamplingParams(**options, bad_words=sorted({*text.split()}))
            found.append(llm.generate(PROMPT, params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_a_filter_against_a_plain_search() -> None:
    draw = random.Random(0)
    for _ in range(300):
        vocab = draw.randint(2, 70)
        bad = [
            [draw.randrange(vocab) for _ in range(draw.randint(1, 3))]
            for _ in range(draw.randint(0, 4))
        ]
        allowed = draw.sample(range(vocab), draw.randint(0, vocab))
        one, output = TokenFilter(allowed, bad, vocab), list[int]()
        for _ in range(6):
            words = np.full(-(-vocab // 32), -1, np.int32)
            one.copy().restrict(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
            wanted = [
                (not allowed or i in allowed) and not any([*output, i][-len(b) :] == b for b in bad)
                for i in range(vocab)
            ]
            assert bits.tolist() == wanted
            output.append(draw.randrange(vocab))
            one.accept(output[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [9999999]}, "allowed_token_ids: token id 9999999 is not in"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be token ids"),
        ({"bad_words": "x"}, "bad_words must be a list"),
        ({"bad_words": [""]}, "bad_words must be non-empty strings"),
    ],
)
def test_wrong_values(demo_llm: LLM, options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        raise RequestError(demo_llm.generate(PROMPT, SamplingParams(**options))[0].error)  # type: ignore[arg-type]
