"""The grammar of tool calls in DeepSeek's markup, from the tools' JSON Schemas.

The markup has a string parameter as plain text, and any other as JSON:

    <DSML tool_calls>
    <DSML invoke name="weather">
    <DSML parameter name="city" string="true">Rome</DSML parameter>
    <DSML parameter name="days" string="false">3</DSML parameter>
    </DSML invoke>
    </DSML tool_calls>

DSML is one control token. The parameters are in the order of the schema.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finwhale.chat.grammar import json_lark
from finwhale.chat.grammar_limits import check_chars, check_schema

_ANY_VALUE = "/(?s:.*)<\\//"
# The properties of an object's schema do not express these keywords.
_BEYOND_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties")


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """A tool's name and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


class ToolGrammar:
    """Lark rules for the tool calls of an answer."""

    def __init__(self, tools: Sequence[ToolSignature], dsml: int, *, parallel: bool) -> None:
        """
        Args:
            tools: at least one.
            dsml: the control token.
            parallel: whether an answer may hold more than one call.

        Raises:
            GrammarError: a tool's schema, or all of them together, exceed the limits of
                `chat.grammar_limits`.
        """
        self._dsml = f"<[{dsml}]>"
        self._rules: list[str] = []
        self._chars = 0
        names = [f"tool_{i}" for i in range(len(tools))]
        for name, tool in zip(names, tools, strict=True):
            self._add_tool(name, tool)
        self._add(f"invoke: {' | '.join(names)}")
        self._add(f"invokes: {'invoke+' if parallel else 'invoke'}")
        d = self._dsml
        self._add(f'block: "tool_calls>\\n" invokes "</" {d} "tool_calls>"')

    def required(self) -> str:
        """A grammar of answers that are tool calls and nothing else."""
        return self._grammar(f'start: "\\n\\n<" {self._dsml} block')

    def after_text(self) -> str:
        """A grammar of answers of any text, which tool calls may follow."""
        return self._grammar(f"start: TEXT ({self._dsml} block)?", "TEXT: /(?s:.*)/")

    def instead_of(self, content: str) -> str:
        """A grammar of answers that match `content` (an item of a Lark rule), or tool calls."""
        calls = f'"\\n\\n<" {self._dsml} block'
        return self._grammar(f"start: content | {calls}", f"content: {content}")

    def _grammar(self, *start: str) -> str:
        return "\n".join([*start, *self._rules])

    def _add(self, rule: str) -> None:
        """Adds a rule and checks the limit: each parameter repeats its tool's definitions."""
        self._chars += len(rule)
        check_chars(self._chars)
        self._rules.append(rule)

    def _add_tool(self, rule: str, tool: ToolSignature) -> None:
        check_schema(tool.parameters)
        d = self._dsml
        parts = " ".join(self._parameters(rule, tool.parameters))
        opening = _quoted(f'invoke name="{tool.name}">\n')
        self._add(f'{rule}: "<" {d} {opening} {parts} "</" {d} "invoke>\\n"')

    def _parameters(self, rule: str, schema: Mapping[str, Any]) -> Iterable[str]:
        """The items of a tool's rule, one for each parameter."""
        properties = schema.get("properties")
        beyond = any(key in schema for key in _BEYOND_PROPERTIES)
        if beyond or not isinstance(properties, Mapping):
            empty = properties == {} or schema.get("additionalProperties") is False
            if not beyond and empty:
                return
            name = f"{rule}_any"
            self._add(f'{name.upper()}_NAME: /[^"\\n<>]{{1,256}}/')
            self._add_parameter(name, f'{name.upper()}_NAME "\\""', {})
            yield f"{name}*"
            return
        listed = schema.get("required")
        listed = listed if isinstance(listed, list) else []
        required = {key for key in listed if isinstance(key, str)}
        definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        for i, (key, value) in enumerate(properties.items()):
            name = f"{rule}_p{i}"
            self._add_parameter(name, _quoted(f'{key}"'), _inner(value, definitions))
            yield name if key in required else f"{name}?"

    def _add_parameter(self, rule: str, name: str, schema: Mapping[str, Any] | bool) -> None:
        d = self._dsml
        kinds = _kinds(schema)
        values = []
        if "string" in kinds:
            self._add(f"{rule.upper()}_S: {_string_terminal(schema)}")
            values.append(f'" string=\\"true\\">" {rule.upper()}_S')
        if kinds - {"string"}:
            values.append(f'" string=\\"false\\">" {rule}_json "</"')
            self._add(f"{rule}_json: {json_lark(_without_string(schema, kinds))}")
        self._add(
            f'{rule}: "<" {d} "parameter name=\\"" {name} ({" | ".join(values)}) '
            f'{d} "parameter>\\n"'
        )


_KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def _inner(value: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any] | bool:
    if not isinstance(value, Mapping):
        return value if isinstance(value, bool) else {}
    return {**definitions, **value}


def _kinds(schema: Mapping[str, Any] | bool) -> frozenset[str]:
    """The JSON types that a value may have, as far as the top of the schema says."""
    if isinstance(schema, bool):
        return _KINDS
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_kind_of(value) for value in values)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds}) & _KINDS or _KINDS
    if isinstance(kinds, list):
        return frozenset(k for k in kinds if isinstance(k, str)) & _KINDS or _KINDS
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return frozenset().union(*(_kinds(s) for s in schema[key] if isinstance(s, Mapping)))
    return _KINDS


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    for kind, types in (
        ("string", str),
        ("number", (int, float)),
        ("array", list),
        ("object", dict),
    ):
        if isinstance(value, types):
            return kind
    return "null"


def _without_string(schema: Mapping[str, Any] | bool, kinds: frozenset[str]) -> Mapping[str, Any]:
    """The schema without strings, for values that the markup has as JSON."""
    if isinstance(schema, bool) or "string" not in kinds:
        return {} if isinstance(schema, bool) else schema
    if isinstance(schema.get("enum"), list):
        return {**schema, "enum": [v for v in schema["enum"] if not isinstance(v, str)]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            rest = [s for s in schema[key] if _kinds(s) != {"string"}]
            return {**schema, key: rest}
    return {**schema, "type": sorted(kinds - {"string"})}


def _string_terminal(schema: Mapping[str, Any] | bool) -> str:
    """A terminal for a string value and the "</" that ends it."""
    if isinstance(schema, bool):
        return _ANY_VALUE
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        strings = [v for v in values if isinstance(v, str)]
        return " | ".join(_quoted(f"{v}</") for v in strings)
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(low, int) and (low or isinstance(high, int)):
        return f"/(?s:.{{{low},{high if isinstance(high, int) else ''}}})<\\//"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        return _pattern_terminal(pattern)
    return _ANY_VALUE


def _pattern_terminal(pattern: str) -> str:
    """A terminal for a pattern. JSON Schema searches for it; here the whole value must match."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if re.search(r"(?<!\\)(\\\\)*\$$", pattern) else "(?s:.*)"
    body = pattern.removeprefix("^")
    body = body if end else body[:-1]
    body = re.sub(r"(?<!\\)/", r"\\/", body)
    return f"/{begin}({body}){end}<\\//"


def _quoted(text: str) -> str:
    """A Lark string literal."""
    return json.dumps(text, ensure_ascii=False)
