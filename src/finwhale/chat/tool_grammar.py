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
from finwhale.chat.schema_alternatives import KINDS, Schema, SchemaReader, kinds, strings

_ANY_VALUE = "/(?s:.*)<\\//"
_DEFINITIONS = ("$defs", "definitions")
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
        self._reader = SchemaReader()
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
            self._add_parameter(name, f'{name.upper()}_NAME "\\""', {}, [{}])
            yield f"{name}*"
            return
        listed = schema.get("required")
        listed = listed if isinstance(listed, list) else []
        required = {key for key in listed if isinstance(key, str)}
        definitions = {k: schema[k] for k in _DEFINITIONS if k in schema}
        for i, (key, value) in enumerate(properties.items()):
            name = f"{rule}_p{i}"
            alternatives = self._reader.alternatives(value, schema)
            if not alternatives and key not in required:
                continue
            inner = _inner(value, definitions)
            self._add_parameter(name, _quoted(f'{key}"'), inner, alternatives)
            yield name if key in required else f"{name}?"

    def _add_parameter(
        self,
        rule: str,
        name: str,
        schema: Mapping[str, Any] | bool,
        alternatives: Sequence[Schema],
    ) -> None:
        d = self._dsml
        values = []
        with_string = [one for one in alternatives if "string" in kinds(one)]
        if with_string:
            self._add(f"{rule.upper()}_S: {_string_terminal(with_string)}")
            values.append(f'" string=\\"true\\">" {rule.upper()}_S')
        if not with_string or any(kinds(one) - {"string"} for one in alternatives):
            values.append(f'" string=\\"false\\">" {rule}_json "</"')
            self._add(
                f"{rule}_json: {json_lark(_without_string(schema) if with_string else schema)}"
            )
        self._add(
            f'{rule}: "<" {d} "parameter name=\\"" {name} ({" | ".join(values)}) '
            f'{d} "parameter>\\n"'
        )


def _inner(value: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any] | bool:
    if not isinstance(value, Mapping):
        return value if isinstance(value, bool) else {}
    return {**definitions, **value}


def _without_string(schema: Mapping[str, Any] | bool) -> Mapping[str, Any]:
    """The schema without strings, for values that the markup has as JSON."""
    others = {"type": sorted(KINDS - {"string"})}
    if isinstance(schema, bool):
        return others
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    rest = {key: value for key, value in schema.items() if key not in definitions}
    return {**definitions, "allOf": [rest, others]}


def _string_terminal(alternatives: Iterable[Schema]) -> str:
    """A terminal for a string value of one of the alternatives, and the "</" that ends it."""
    terminals = dict.fromkeys(t for schema in alternatives for t in _string_terminals(schema))
    return _ANY_VALUE if _ANY_VALUE in terminals else " | ".join(terminals)


def _string_terminals(schema: Schema) -> list[str]:
    listed = strings(schema)
    if listed is not None:
        return [_quoted(f"{value}</") for value in listed]
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(low, int) and (low or isinstance(high, int)):
        return [f"/(?s:.{{{low},{high if isinstance(high, int) else ''}}})<\\//"]
    pattern = schema.get("pattern")
    return [_pattern_terminal(pattern) if isinstance(pattern, str) else _ANY_VALUE]


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
