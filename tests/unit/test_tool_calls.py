"""Conformance: what clients see of tool calls, whatever the model writes, cut anywhere.

No token of the markup is in a text or in arguments, no call is invented, and a call whose arguments
are not whole is in an answer that says so. The same characters as ordinary text stay text.
"""

import asyncio
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from tests.support.library_tokenizer import encode_with_special

from finwhale.chat.call_guard import MOST_TAG_BYTES
from finwhale.chat.output import OutputParser
from finwhale.chat.template import ProtocolName, ProtocolRequest, convert
from finwhale.server.protocols.answer_stream import AnswerStream

from .test_protocol_streams import DSML, EOS, WHERE, added_up, body, tokenizer

# Each protocol's words for an answer that is complete, and for one that is not.
COMPLETE = {
    "chat": ("stop", "tool_calls"),
    "responses": ("completed",),
    "messages": ("end_turn", "tool_use"),
}
INCOMPLETE = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}


def parameter(name: str, value: str, string: bool = True) -> str:
    kind = str(string).lower()
    return f'<{DSML}parameter name="{name}" string="{kind}">{value}</{DSML}parameter>\n'


def invoke(name: str, *parts: str) -> str:
    return f'<{DSML}invoke name="{name}">\n{"".join(parts)}</{DSML}invoke>\n'


def block(*parts: str, word: str = "tool_calls") -> str:
    return f"\n\n<{DSML}{word}>\n{''.join(parts)}</{DSML}{word}>"


ROME = parameter("city", "Rome")
GOOD = invoke("weather", ROME)
ROME_CALL = ("weather", {"city": "Rome"})
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """An output after the reasoning, and what a client sees of it.

    Attributes:
        text: the answer's text.
        calls: its whole calls.
        whole: whether the answer is complete.
    """

    output: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    whole: bool = True


def string(value: str) -> Case:
    """A parameter that should be JSON and is not: the client gets a string."""
    output = block(invoke("weather", parameter("n", value, False), ROME))
    return Case(output, calls=(("weather", {"n": value, "city": "Rome"}),))


CASES = {
    "text": Case("Hello <b> </ x < y", "Hello <b> </ x < y"),
    "one call": Case(block(GOOD), calls=(ROME_CALL,)),
    "text and calls": Case(
        "One moment." + block(GOOD, invoke("g")), "One moment.", (ROME_CALL, ("g", {}))
    ),
    "values": Case(
        block(
            invoke(
                "f",
                parameter("a", '[1, {"b": "</x>"}]', False),
                parameter("c d", "<</ x"),
                parameter("e", "", True),
                parameter('q"', "null", False),
            )
        ),
        calls=(("f", {"a": [1, {"b": "</x>"}], "c d": "<</ x", "e": "", 'q"': None}),),
    ),
    "a call without a block": Case("text " + GOOD, "text ", (ROME_CALL,)),
    "another name of the block": Case(block(GOOD, word="function_calls"), calls=(ROME_CALL,)),
    "text between tags": Case(block("x ", invoke("weather", "y ", ROME, "z")), calls=(ROME_CALL,)),
    "text after the calls": Case(block(GOOD) + "\nafter", calls=(ROME_CALL,)),
    "no end of the block": Case(f"\n\n<{DSML}tool_calls>\n{GOOD}", calls=(ROME_CALL,)),
    # Values that are no JSON.
    "a word": string("Beijing"),
    "no end of an array": string("[1, 2"),
    "nothing": string(""),
    "not a number": string("NaN"),
    "beyond floats": string("1e999"),
    "two values": string("1 2"),
    "another parameter in the value": string('1, "b": 2'),
    "a line break in a string": string('{"a": "b\nc"}'),
    "half of a surrogate pair": string('"\\ud800"'),
    "too deep": string("[" * 200 + "]" * 200),
    # Control tokens that begin no call.
    "a control token": Case(f"a {DSML} b", "a  b"),
    "an opened control token": Case(f"a <{DSML} b </{DSML} in", "a < b </ in"),
    "only control tokens": Case(f"{DSML}{DSML}<{DSML}{DSML} x", "< x"),
    # Broken calls.
    "no end of a parameter": Case(
        block(invoke("weather", f'<{DSML}parameter name="city" string="true">Rome', ROME)),
        whole=False,
    ),
    "no end of a call": Case(block(GOOD.replace(f"</{DSML}invoke>", ""), GOOD), whole=False),
    "a call in a call": Case(block(GOOD, invoke("f", GOOD)), calls=(ROME_CALL,), whole=False),
    "a control token in a value": Case(
        block(invoke("f", parameter("a", f"b {DSML} c"))), whole=False
    ),
    "the end of a block in a value": Case(
        block(invoke("f", parameter("a", f"b</{DSML}tool_calls>"))), whole=False
    ),
    "no kind of value": Case(block(invoke("f", ROME.replace(' string="true"', ""))), whole=False),
    "another kind of value": Case(block(invoke("f", ROME.replace("true", "yes"))), whole=False),
    "a tool without a name": Case(block(invoke("", ROME)), whole=False),
    "a quote in the name of a tool": Case(block(invoke('a"b', ROME)), whole=False),
    "a parameter without a call": Case("a " + ROME, "a ", whole=False),
    "the end of a call without its begin": Case(f"a </{DSML}invoke> b", "a ", whole=False),
    "an unknown tag in a call": Case(block(f"<{DSML}thing>\n", GOOD), whole=False),
    "a head without an end": Case(
        block(f'<{DSML}invoke name="' + "x " * MOST_TAG_BYTES), whole=False
    ),
    "an end in a name": Case(
        f'Hi\n\n<{DSML}tool_calls>\n<{DSML}invoke name="wea', "Hi", whole=False
    ),
    "an end in a parameter": Case(
        f'<{DSML}invoke name="f">\n<{DSML}parameter name="a" string="true">b', whole=False
    ),
    "an end before any call": Case(f"Hi\n\n<{DSML}tool_calls>\n", "Hi", whole=False),
}


@cache
def ids_of(output: str) -> list[int]:
    return encode_with_special(tokenizer("demo"), f"I think.</think>{output}{EOS}")


@cache
def converted(protocol: ProtocolName) -> ProtocolRequest:
    return convert(protocol, body(protocol), default_thinking=True)


@dataclass
class Seen:
    """What a client sees: the text, the reasoning, each call's name and arguments as text, and the
    protocol's word for the end."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]
    end: str


def answered(protocol: ProtocolName, ids: list[int], reason: Any, step: int) -> tuple[Seen, Seen]:
    """The whole response, and what its events add up to, of `step` tokens at a time."""
    stream = AnswerStream(
        converted(protocol), tokenizer("demo"), answer_id="id", model="m", created=1,
        prompt_tokens=7, cached_tokens=2,
    )  # fmt: skip
    events = stream.begin()
    for i in range(0, len(ids), step):
        events += stream.feed(
            ids[i : i + step], unseen_last=reason == "stop" and i + step >= len(ids)
        )
        if stream.finished:
            break
    events += stream.finish(reason)
    response = asyncio.run(stream.response(asyncio.Lock()))
    return whole(protocol, response), streamed(protocol, [json.loads(text) for _, text in events])


def whole(protocol: ProtocolName, response: dict[str, Any]) -> Seen:
    if protocol == "chat":
        (choice,) = response["choices"]
        message = choice["message"]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        return Seen(
            message.get("content") or "",
            message.get("reasoning_content") or "",
            [(c["name"], c["arguments"]) for c in calls],
            choice["finish_reason"],
        )
    items = response["content" if protocol == "messages" else "output"]
    if protocol == "messages":
        calls = [(i["name"], json.dumps(i["input"])) for i in items if i["type"] == "tool_use"]
        text = "".join(i["text"] for i in items if i["type"] == "text")
        thought = "".join(i.get("thinking") or "" for i in items if i["type"] == "thinking")
        return Seen(text, thought, calls, response["stop_reason"])
    parts: dict[str, str] = {}
    for item in items:
        for part in item.get("content") or ():
            parts[item["type"]] = parts.get(item["type"], "") + part["text"]
    calls = [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
    return Seen(parts.get("message", ""), parts.get("reasoning", ""), calls, response["status"])


def streamed(protocol: ProtocolName, events: list[dict[str, Any]]) -> Seen:
    parts = added_up(protocol, events)
    find = {
        "chat": ("content", "reasoning_content", "call"),
        "responses": ("response.output_text", "response.reasoning_text",
                      "response.function_call_arguments"),
        "messages": ("text_delta", "thinking_delta", "input_json_delta"),
    }[protocol]  # fmt: skip
    text, thought, arguments = (
        [v for k, v in parts.items() if k.startswith(prefix)] for prefix in find
    )
    end = ""
    for event in events:
        if protocol == "chat":
            end = event["choices"][0].get("finish_reason") or end
        elif protocol == "messages":
            end = event.get("delta", {}).get("stop_reason") or end
        else:
            end = event.get("response", {}).get("status") or end
    return Seen("".join(text), "".join(thought), [("", one) for one in arguments], end)


def check(protocol: ProtocolName, seen: Seen, case: Case) -> None:
    """What holds for any part of a case's output."""
    everything = "".join([seen.text, seen.reasoning, *(a for _, a in seen.calls)])
    assert DSML not in everything and "tool_calls" not in everything and "invoke" not in everything
    # Without the two line breaks of DeepSeek's form, an output that ends with "<" is text.
    text = seen.text if seen.text in case.text else re.sub(r"\n*(</?)?$", "", seen.text)
    assert case.text.startswith(text)
    assert "I think.".startswith(seen.reasoning)
    assert seen.end in (*COMPLETE[protocol], INCOMPLETE[protocol])
    if seen.end in COMPLETE[protocol]:
        calls = [json.loads(arguments or "{}") for _, arguments in seen.calls]
        assert calls == [arguments for _, arguments in case.calls[: len(calls)]]


@pytest.mark.parametrize("protocol", list(WHERE.values()))
@pytest.mark.parametrize("name", CASES)
def test_whole_answers(name: str, protocol: ProtocolName) -> None:
    case = CASES[name]
    ids = ids_of(case.output)
    for step in (1, 7, len(ids)):
        response, events = answered(protocol, ids, "stop", step)
        for seen in (response, events):
            check(protocol, seen, case)
            assert seen.text.rstrip("\n") == case.text and seen.reasoning == "I think."
        assert (response.end in COMPLETE[protocol]) == case.whole and response.end == events.end
        if case.whole:
            assert [(n, json.loads(a)) for n, a in response.calls] == list(case.calls)
            streamed_arguments = [json.loads(a or "{}") for _, a in events.calls]
            assert streamed_arguments == [arguments for _, arguments in case.calls]


@pytest.mark.parametrize("protocol", list(WHERE.values()))
@pytest.mark.parametrize(
    "name", [n for n in CASES if n not in ("too deep", "a head without an end")]
)
def test_answers_cut_anywhere(name: str, protocol: ProtocolName) -> None:
    """By max_tokens, and by the end of sequence, which is worse: the answer seems complete."""
    case = CASES[name]
    ids = ids_of(case.output)
    # The protocols share the parser, so the others need fewer ends.
    for end in range(0, len(ids), 1 if protocol == "chat" else 3):
        for reason in ("length", "stop"):
            part = ids[:end] if reason == "length" else [*ids[:end], ids[-1]]
            response, events = answered(protocol, part, reason, 1)
            check(protocol, response, case)
            check(protocol, events, case)
            assert response.end == events.end and response.text == events.text
            assert reason == "stop" or response.end == INCOMPLETE[protocol] or not case.whole


@pytest.mark.parametrize("protocol", list(WHERE.values()))
@pytest.mark.parametrize("name", ["one call", "values", "no end of a parameter"])
def test_markup_in_ordinary_tokens_stays_text(name: str, protocol: ProtocolName) -> None:
    text = CASES[name].output.strip()
    ids = [*ids_of("")[:-1], *tokenizer("demo").encode(text), ids_of("")[-1]]
    for seen in answered(protocol, ids, "stop", 1):
        assert seen.text == text and not seen.calls and seen.end in COMPLETE[protocol]


@pytest.mark.parametrize("protocol", list(WHERE.values()))
@pytest.mark.parametrize("name", CASES)
def test_requests_without_tools_have_no_calls(name: str, protocol: ProtocolName) -> None:
    asked = {k: v for k, v in body(protocol).items() if k != "tools"}
    stream = AnswerStream(
        convert(protocol, asked, default_thinking=True), tokenizer("demo"), answer_id="id",
        model="m", created=1, prompt_tokens=7, cached_tokens=2,
    )  # fmt: skip
    stream.begin()
    stream.feed(ids_of(CASES[name].output), unseen_last=True)
    stream.finish("stop")
    seen = whole(protocol, asyncio.run(stream.response(asyncio.Lock())))
    assert not seen.calls and seen.end in COMPLETE[protocol]
    assert seen.text.strip() == CASES[name].output.strip()


@pytest.mark.parametrize("name", CASES)
def test_the_parser_of_the_library(name: str) -> None:
    case = CASES[name]
    parser = OutputParser(tokenizer("demo"), converted("chat").request)
    parser.feed(ids_of(case.output)[:-1])
    parser.finish("stop")
    message = parser.message()
    assert message["content"].rstrip("\n") == case.text and parser.broken != case.whole
    if case.whole:
        calls = [one["function"] for one in message.get("tool_calls", ())]
        assert [(c["name"], json.loads(c["arguments"])) for c in calls] == list(case.calls)
