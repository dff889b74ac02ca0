"""deepseek-recipe never sees a client's schema, and prompts are the same as if it did."""

import json
from typing import Any

import deepseek_recipe as recipe
import pytest

from finwhale.chat.template import (
    REQUEST_KINDS,
    ProtocolName,
    _convert,
    convert,
)
from finwhale.errors import RequestError

Fields = dict[str, Any]
ASKED = [{"role": "user", "content": "x"}]
SCHEMA: Fields = {
    "type": "object",
    "properties": {
        "z": {"type": "number", "minimum": 1.0, "maximum": (1 << 256) - 1, "default": 1e-7},
        "a": {"$ref": "#/$defs/A"},
        "n": {"type": "integer", "const": -5},
        "parameters": {"type": "string", "enum": ["\u2028</x>&", "é"]},
    },
    "required": ["z", "a", "n", "parameters"],
    "additionalProperties": False,
    "$defs": {"A": {"type": "string", "pattern": "^a$"}},
}


def function(**more: Any) -> Fields:
    return {"type": "function", "function": {"name": "f", "parameters": SCHEMA, **more}}


def json_format(**more: Any) -> Fields:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}


NAMESPACE = {
    "type": "namespace", "name": "ns", "description": "d",
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "description": "p"}],
}  # fmt: skip
BODIES: list[tuple[ProtocolName, Fields]] = [
    ("chat", {"tools": [function(), function(strict=False, name="g"), {
        "type": "function", "function": {"name": "without"}}]}),
    ("chat", {"tools": [function(strict=True, description="d"), function(name="g")]}),
    ("chat", {"response_format": json_format()}),
    ("chat", {"response_format": json_format(strict=False), "tools": [function()]}),
    ("chat", {"response_format": json_format(strict=True)}),
    ("chat", {"messages": [{"role": "system", "content": "x", "tools": [function()]}, *ASKED]}),
    ("responses", {"tools": [NAMESPACE, {"type": "function", "name": "g", "parameters": SCHEMA}]}),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ("messages", {"tools": [{"name": "f", "input_schema": SCHEMA},
                            {"name": "g", "input_schema": SCHEMA, "strict": True},
                            {"name": "h", "input_schema": SCHEMA, "defer_loading": True}]}),
]  # fmt: skip


def with_messages(protocol: ProtocolName, fields: Fields) -> Fields:
    asked = {"input": "x"} if protocol == "responses" else {"messages": ASKED}
    return {**asked, **({"max_tokens": 3} if protocol == "messages" else {}), **fields}


def without_strict(value: Any) -> Any:
    """deepseek-recipe changes the schemas of strict tools, and refuses other tools beside them."""
    if isinstance(value, list):
        return [without_strict(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: without_strict(v) for k, v in value.items() if k != "strict"}


@pytest.mark.parametrize(("protocol", "fields"), BODIES)
def test_the_conversation_is_the_same(protocol: ProtocolName, fields: Fields) -> None:
    body = with_messages(protocol, fields)
    mine = convert(protocol, body, default_thinking=False)
    request = REQUEST_KINDS[protocol](
        json.dumps({**without_strict(body), "model": "DeepSeek-V4-Pro"})
    )
    theirs = request.convert(recipe.ConversionOptions(default_thinking_mode=False)).conversation
    tools = [tool.get("function", tool) for tool in fields.get("tools", ())]
    if protocol != "responses":
        assert [bool(tool.strict) for tool in mine.conversation.tools] == [
            bool(tool.get("strict")) for tool in tools
        ]
    for part in ("name", "description", "parameters", "defer_loading"):
        assert [getattr(tool, part) for tool in mine.conversation.tools] == [
            getattr(tool, part) for tool in theirs.tools
        ]
    assert mine.conversation.response_schema == theirs.response_schema
    encoding = recipe.DeepseekV4Encoding()
    prompt = encoding.render_conversation(theirs).prompt
    assert encoding.render_conversation(mine.conversation).prompt == prompt


def test_nesting() -> None:
    deep: Fields = {"type": "object"}
    for _ in range(70):
        deep = {"type": "object", "properties": deep}
    with pytest.raises(RequestError, match="nested deeper than 64"):
        _convert(ASKED, True, [function(parameters=deep)])


@pytest.mark.parametrize("kind", [None, "string", ["object"]])
def test_a_tool_s_schema_is_of_an_object(kind: object) -> None:
    tool = function(parameters={"type": kind, "properties": {}})
    with pytest.raises(RequestError, match=r"Invalid schema for function 'f': .*type: "):
        _convert(ASKED, True, [tool])
