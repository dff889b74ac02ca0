"""Large answers are written in pieces, between which the event loop does its other work."""

import asyncio
import base64
import json
from itertools import pairwise
from typing import Any

import pytest
from starlette.responses import Response

from finwhale.chat.template import convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import DEMO_PATH
from finwhale.request import Logprob
from finwhale.server.link.wire import LogprobColumns
from finwhale.server.protocols.answer_stream import ENTRIES, AnswerStream
from finwhale.server.protocols.chat_answers import prompt_logprobs
from finwhale.server.protocols.json_answer import PIECE, json_answer, json_pieces

VALUES: list[Any] = [
    None, True, -1.5e300, 10**30, "", "\u2028\"\\\n\U0001f40b", [], {}, [[]], [{}],
    [None, "x", [1]],
    {"": {"a": [{"b": []}]}, "x": [1, 2.5, None, False]}, ["x"] * 3000, [*range(5000)],
    [[1, 2]] * 2000, {str(i): i for i in range(5000)}, "\U0001f40b\"" * 3 * PIECE,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_the_same_text_as_one_call_writes(value: Any) -> None:
    pieces = list(json_pieces(value, "data: ", "\n\n"))
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert b"".join(pieces).decode() == f"data: {text}\n\n"
    # A character takes at most four bytes; `_parts` adds at most an item to a full piece.
    assert all(len(piece) >= PIECE for piece in pieces[:-1])
    assert all(len(piece.decode()) <= 2 * PIECE for piece in pieces)


def test_iterators_and_bytes() -> None:
    data = bytes(range(256)) * 1000
    pieces = b"".join(json_pieces({"empty": iter(()), "x": (i * i for i in range(4)), "b": data}))
    text = base64.b64encode(data).decode()
    assert json.loads(pieces) == {"empty": [], "x": [0, 1, 4, 9], "b": text}
    with pytest.raises(ValueError):
        list(json_pieces(float("nan")))


def test_an_item_is_made_only_when_its_piece_is_written() -> None:
    """A turn of the loop makes the entries of one piece, whatever the size of the prompt."""
    table = {i: Logprob(-1.5, i, "token") for i in range(21)}
    made = 0

    def tables() -> Any:
        nonlocal made
        for _ in range(2000):
            made += 1
            yield table

    columns = LogprobColumns.of([None, *[table] * 2000])
    assert list(columns) == [None, *[table] * 2000]
    written = []
    for _ in json_pieces({"prompt_logprobs": prompt_logprobs(tables(), 20)}):
        written.append(made)
    assert len(written) > 20 and max(b - a for a, b in pairwise(written)) < 90


def sent(response: Response) -> tuple[list[dict[str, Any]], int]:
    """What a response sends, and the number of turns that other work of the loop has meanwhile."""
    messages: list[dict[str, Any]] = []
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        working = asyncio.ensure_future(other())
        gone = asyncio.Event()

        async def receive() -> Any:
            await gone.wait()

        async def send(message: Any) -> None:
            messages.append(message)

        await response({"type": "http", "state": {}}, receive, send)
        working.cancel()

    asyncio.run(run())
    return messages, turns


def test_a_response_gives_other_work_its_turn() -> None:
    value = {"tokens": list(range(200_000))}
    messages, turns = sent(json_answer(value, asyncio.Lock()))
    assert json.loads(b"".join(m.get("body", b"") for m in messages)) == value
    assert turns >= len(messages) - 3 > 15
    small, _ = sent(json_answer({"a": 1}, asyncio.Lock()))
    assert dict(small[0]["headers"])[b"content-length"] == b"7" and len(small) == 2


def test_a_chat_s_log_probabilities_are_parsed_in_turns() -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    tokenizer, count = Tokenizer.open(DEMO_PATH), 5 * ENTRIES
    stream = AnswerStream(
        convert("chat", asked, default_thinking=False), tokenizer, answer_id="id", model="m",
        created=1, prompt_tokens=7, cached_tokens=2,
    )  # fmt: skip
    stream.begin()
    (token_id,) = tokenizer.encode("a")
    stream.feed([token_id] * count, [(-0.5, [(token_id, -0.5), (token_id + 1, -1.5)])] * count)
    stream.finish("stop")
    turns = 0

    async def run() -> dict[str, Any]:
        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        working = asyncio.ensure_future(other())
        found = await stream.response(asyncio.Lock())
        working.cancel()
        return found

    assert asyncio.run(run()) == json.loads(stream._response.to_json())
    assert turns >= count // ENTRIES
