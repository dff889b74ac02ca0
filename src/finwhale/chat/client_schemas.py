"""Keeps the JSON Schemas of a request away from deepseek-recipe's validator.

The validator compiles each schema by recursion, follows its references and compiles its patterns,
without a limit: 2,000 references in a chain overflow the stack and end the process, a fan of 30
with unevaluatedProperties takes hours, and 100 patterns such as `(?=a)\\w{150}` take 1 GiB. A
prompt only repeats a schema. Therefore deepseek-recipe converts a request that has a placeholder
for each schema, and the conversation gets the schemas afterwards.

The placeholder also stands for `strict`: deepseek-recipe knows a narrow subset of strict schemas,
and refuses a request that has both strict and other tools.
"""

import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.effort import changed
from finwhale.chat.grammar_limits import MAX_NESTING, levels
from finwhale.errors import RequestError

_HOLDERS = ("tools", "response_format", "text")
_SCHEMAS = ("parameters", "input_schema", "schema")
_PLACEHOLDER = "x-schema"


def is_nested_deeper(value: object, most: int = MAX_NESTING) -> bool:
    """Whether parsed JSON has more than `most` levels of nesting."""
    return any(depth > most for depth, _ in enumerate(levels(value), start=1))


class ClientSchemas:
    """The schemas of one request."""

    def __init__(self) -> None:
        self._schemas: list[tuple[Any, bool | None]] = []  # and whether they are strict

    def take_from(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a request, with a placeholder for each schema. Raises RequestError: the body
        is nested too deeply; ValueError, TypeError, OverflowError: a schema is not JSON, or a
        number is too large."""
        if is_nested_deeper(body):
            raise RequestError(f"the request is nested deeper than {MAX_NESTING} levels")
        holders = {k: self._take(body[k]) for k in _HOLDERS if k in body}
        return {**body, **holders}

    def put_back(self, conversation: recipe.Conversation) -> recipe.Conversation:
        """The conversation, with the schemas instead of their placeholders."""
        if not self._schemas:
            return conversation
        tools = [self._with_schema(tool) for tool in conversation.tools]
        schema, _ = self._original(conversation.response_schema)
        return changed(conversation, tools=tools, response_schema=schema)

    def _with_schema(self, tool: recipe.ToolDefinition) -> recipe.ToolDefinition:
        original = self._original(tool.parameters)
        return recipe.ToolDefinition(tool.name, tool.description, *original, tool.defer_loading)

    def _take(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._take(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        taken = {}
        for key, item in value.items():
            if key in _SCHEMAS and isinstance(item, Mapping):
                taken[key] = self._placeholder(item, value.get("strict") is True or None)
            elif key != "strict" or not isinstance(item, bool):
                taken[key] = self._take(item)
        return taken

    def _placeholder(self, schema: Mapping[str, Any], strict: bool | None) -> dict[str, Any]:
        text = json.dumps(schema, allow_nan=False)
        self._schemas.append((json.loads(text, parse_int=_number), strict))
        kind = schema.get("type")  # deepseek-recipe demands "object" of a tool
        return {
            **({"type": kind} if isinstance(kind, str) else {}),
            _PLACEHOLDER: len(self._schemas) - 1,
        }

    def _original(self, schema: Any) -> tuple[Any, bool | None]:
        if isinstance(schema, Mapping) and isinstance(i := schema.get(_PLACEHOLDER), int):
            return self._schemas[i]
        return schema, None


def _number(text: str) -> int | float:
    """An integer as deepseek-recipe reads it from JSON text: one of 64 bits, or else a float."""
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)
