"""Conversations that clients send back are readable, whatever wrote them."""

import base64
import json
from typing import Any

import pytest

from finwhale.chat.history import pack_reasoning, readable, unpack_reasoning
from finwhale.chat.template import ProtocolName, convert

TEXT = "I should call f, because the user wants “weather”.\n\N{GRINNING FACE}"
LEFT_OUT = "left out: the model reads only text]"
PNG = "data:image/png;base64,AAAA"


def as_data(text: str, kind: str = "text/plain") -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("text", ["", TEXT])
def test_packed_reasoning(text: str) -> None:
    packed = pack_reasoning(text)
    assert unpack_reasoning(packed) == text
    for damaged in (packed[:-1], packed[:12] + "A" + packed[12:], packed + "AAAA", packed[9:]):
        assert unpack_reasoning(damaged) is None
    for i in range(len(packed)):
        other = "A" if packed[i] != "A" else "B"
        found = unpack_reasoning(packed[:i] + other + packed[i + 1 :])
        assert found is None or found == text  # unused bits of the last character
    foreign: Any
    for foreign in (None, 7, [], {}, "resp_1-0", "gAAAAA=", "finwhale-1:", "finwhale-2:AAAA"):
        assert unpack_reasoning(foreign) is None


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def prompt_of(protocol: ProtocolName, body: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Converts a body. Returns (role, text, reasoning, calls) for each message, and left_out."""
    body, left_out = readable(protocol, body)
    found = convert(protocol, body, default_thinking=True).conversation
    return [
        (m.role, m.content, getattr(m, "reasoning_content", None) or "",
         [(call.name, json.loads(call.arguments)) for call in getattr(m, "tool_calls", None) or ()])
        for m in found.messages
    ], left_out  # fmt: skip


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("arguments", ["{}", "", " \n"])
def test_chat(name: str, arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call], name: TEXT}
    result = {"role": "tool", "tool_call_id": "1", "content": "R"}
    given = {"messages": [{"role": "user", "content": "?"}, message, result]}
    before = json.dumps(given)
    found, left_out = prompt_of("chat", given)
    assert found[1] == ("assistant", "", TEXT, [("f", {})]) and not left_out
    assert json.dumps(given) == before  # the caller's own messages


def items(*reasoning: dict[str, Any], arguments: str = "{}") -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "1", "output": "R"}
    return {"input": [{"role": "user", "content": "?"}, *reasoning, call, result]}


@pytest.mark.parametrize(
    "more, readable_",
    [
        ({"content": [{"type": "reasoning_text", "text": TEXT}]}, True),
        ({"encrypted_content": pack_reasoning(TEXT)}, True),
        ({"encrypted_content": pack_reasoning(TEXT), "content": None, "format": "other"}, True),
        ({"encrypted_content": pack_reasoning(TEXT)[:-4]}, False),
        ({"encrypted_content": "gAAAAABo"}, False),
        ({"encrypted_content": None, "summary": [{"type": "summary_text", "text": "s"}]}, False),
        ({"content": "text"}, False),
        ({"content": [7, {"type": "other"}], "summary": 5, "id": {}}, False),
    ],
)
def test_reasoning_items(more: dict[str, Any], readable_: bool) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], **more}
    found, left_out = prompt_of("responses", items(item, arguments=""))
    assert found[1] == ("assistant", "", TEXT if readable_ else "", [("f", {})])
    assert left_out == ([] if readable_ else ["input.1"])


@pytest.mark.parametrize(
    "block", [{"type": "redacted_thinking", "data": "x"},
              {"type": "thinking", "thinking": "", "signature": "x"}],
)  # fmt: skip
def test_thinking_of_another_provider(block: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}
    user = {"role": "user", "content": "?"}
    body = {"max_tokens": 1, "messages": [user, answer, user]}
    found, left_out = prompt_of("messages", body)
    assert found[1] == ("assistant", "Yes.", "", []) and left_out == ["messages.1.content.0"]
    answer["content"] = [block]
    found, _ = prompt_of("messages", body)
    assert found[1][1:] == ("", "", [])
    answer["content"] = [{"type": "thinking", "thinking": TEXT, "signature": "x"}]
    found, left_out = prompt_of("messages", body)
    assert (found[1][2], left_out) == (TEXT, [])


def test_media_of_tool_results() -> None:
    text = {"type": "text", "text": "before"}
    image = {"type": "image_url", "image_url": {"url": PNG}}
    file = {"type": "file", "file": {"file_data": as_data("a,b", "text/csv"), "filename": "t.csv"}}
    tool = {"role": "tool", "tool_call_id": "1", "content": [text, image, file]}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    found, left_out = prompt_of("chat", {"messages": [call, tool]})
    assert found[1][1] == f"before\n\n[image {LEFT_OUT}\n\nt.csv\na,b"
    assert left_out == ["messages.1.content.1"]

    output = [
        {"type": "input_text", "text": "before"},
        {"type": "input_image", "image_url": PNG},
        {"type": "input_file", "file_data": as_data("%PDF", "application/pdf"), "filename": "f"},
        {"type": "input_file", "file_data": as_data("[1]", "application/json")},
    ]
    body = items()
    body["input"][-1]["output"] = output
    found, left_out = prompt_of("responses", body)
    assert found[-1][1] == f"before\n\n[image {LEFT_OUT}\n\n[file {LEFT_OUT}\n\n[1]"
    assert left_out == ["input.2.output.1", "input.2.output.2"]

    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    page = {"type": "text", "media_type": "text/plain", "data": "page"}
    blocks = [
        text,
        {"type": "image", "source": source},
        {"type": "document", "source": page, "title": "Title"},
        {"type": "document", "source": {**source, "media_type": "application/pdf"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    found, left_out = prompt_of("messages", {"max_tokens": 1, "messages": turns})
    assert found[1][1] == f"before\n\n[image {LEFT_OUT}\n\nTitle\npage\n\n[document {LEFT_OUT}"
    assert left_out == ["messages.1.content.0.content.1", "messages.1.content.0.content.3"]


def test_text_documents_of_users() -> None:
    content = {"type": "content", "content": [{"type": "text", "text": t} for t in "ab"]}
    document = {"type": "document", "source": content}
    encoded = as_data("é", "text/plain").partition("base64,")[2]
    source = {"type": "base64", "media_type": "text/plain", "data": encoded}
    blocks = [document, {"type": "document", "source": source}]
    message = {"role": "user", "content": blocks}
    found, left_out = prompt_of("messages", {"max_tokens": 1, "messages": [message]})
    assert ([one[1] for one in found], left_out) == (["a\nb", "é"], [])
    file = {"type": "input_file", "file_data": as_data("x"), "filename": "n.txt"}
    found, _ = prompt_of("responses", {"input": [{"role": "user", "content": [file]}]})
    assert found[0][1] == "n.txt\nx"


@pytest.mark.parametrize("value", [None, 5, "text", {}, [None, 5, "x", []], [{"type": 5}]])
def test_what_is_not_understood_stays(value: Any) -> None:
    document = {"type": "document", "source": {"type": "base64", "data": value}}
    for protocol, name in (("chat", "messages"), ("responses", "input"), ("messages", "messages")):
        for given in (value, [{"content": value}], [{"content": [document]}], [{"type": value}]):
            body = {name: given}
            assert readable(protocol, body) == (body, [])  # type: ignore[arg-type]
