"""The log-probabilities of a completion: how tokens are spelled, and where they stand."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import DEMO_PATH
from finwhale.request import Logprob, SamplingParams
from finwhale.server.link.wire import Delta
from finwhale.server.protocols.completions import CompletionJob, _Choice
from finwhale.server.protocols.schemas import CompletionBody
from finwhale.server.state import ServerState


def test_tokens_that_hold_part_of_a_character() -> None:
    tokenizer = Tokenizer.open(DEMO_PATH)
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    first, second, other, end = (by_bytes[data] for data in (b"\xc3", b"\xa9", b"\xc5", b"!"))
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "logprobs": 2})
    job = CompletionJob([[1]], body, [""], SamplingParams(), 1)
    state = cast(ServerState, SimpleNamespace(tokenizer=tokenizer))
    tables = [
        {other: Logprob(-3.0, 2, "\ufffd"), first: Logprob(-0.1, 1, "\ufffd")},
        {second: Logprob(-0.2, 1, "\ufffd")},
        {end: Logprob(-0.3, 1, "!")},
    ]
    choice = _Choice(state, job, 0)
    parts: list[dict[str, Any]] = []
    # A stream may end an event inside a character.
    for token_id, text, table in zip((first, second, end), ("", "é", "!"), tables, strict=True):
        choice.add(Delta("r", 0, [token_id], text, [table]))
        parts.append(choice.new()["logprobs"])
    assert {name: [x for part in parts for x in part[name]] for name in parts[0]} == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [-0.1, -0.2, -0.3],
        "top_logprobs": [
            {"bytes:\\xc3": -0.1, "bytes:\\xc5": -3.0},
            {"bytes:\\xa9": -0.2},
            {"!": -0.3},
        ],
        "text_offset": [0, 0, 1],
    }


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_the_token_itself_is_among_the_likeliest(num_top: int) -> None:
    texts = {5: b"a", 6: b"b", 7: b"c"}
    tokenizer = SimpleNamespace(token_bytes=texts.get, special_ids=frozenset(), ascii_texts={})
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "logprobs": num_top})
    job = CompletionJob([[1]], body, [""], SamplingParams(), 1)
    choice = _Choice(cast(ServerState, SimpleNamespace(tokenizer=tokenizer)), job, 0)
    table = {7: Logprob(-9.0, 30, "c"), 5: Logprob(-0.1, 1, "a"), 6: Logprob(-2.0, 2, "b")}
    choice.add(Delta("r", 0, [7], "c", [dict(list(table.items())[: num_top + 1])]))
    wanted = [*[("a", -0.1), ("b", -2.0)][:num_top], ("c", -9.0)]
    (top,) = choice.new()["logprobs"]["top_logprobs"]
    assert list(top.items()) == wanted


def test_of_two_tokens_with_one_text_the_likelier_one_is_kept() -> None:
    tokenizer = cast(
        Tokenizer,
        SimpleNamespace(token_bytes=lambda i: b"a", special_ids=frozenset(), ascii_texts={}),
    )
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "logprobs": 2})
    job = CompletionJob([[1]], body, [""], SamplingParams(), 1)
    choice = _Choice(cast(ServerState, SimpleNamespace(tokenizer=tokenizer)), job, 0)
    choice.add(Delta("r", 0, [5], "a", [{5: Logprob(-2.0, 2, "a"), 6: Logprob(-1.0, 1, "a")}]))
    assert list(choice.new()["logprobs"]["top_logprobs"]) == [{"a": -1.0}]
