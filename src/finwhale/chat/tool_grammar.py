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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finwhale.chat.dialect import V4, Dialect
from finwhale.chat.grammar import json_lark
from finwhale.chat.grammar_limits import GrammarError, check_chars
from finwhale.chat.known_fields import printable
from finwhale.chat.patterns import portable, whole
from finwhale.chat.schema_alternatives import (
    KINDS,
    Schema,
    SchemaReader,
    kinds,
    mapping,
    strings,
    types,
)
from finwhale.chat.schema_document import FORMATS, SchemaDocument

_ANY_VALUE = "/(?s:.*)<\\//"
_NAME = '/[^"\\n<>]{1,256}/'


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """A tool's name, the JSON Schema of its arguments, and whether all of that must hold."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


class ToolGrammar:
    """Lark rules for the tool calls of an answer.

    Attributes:
        ignored: what cannot be enforced, such as "tools.f.properties.a.not".
        places: the part of the request that each line of the last grammar enforces, such as
            "tools.f.properties.a", or "".
    """

    def __init__(
        self,
        tools: Sequence[ToolSignature],
        dsml: int,
        dialect: Dialect = V4,
        *,
        parallel: bool,
        relaxed: Collection[str] = (),
    ) -> None:
        """
        Args:
            tools: at least one.
            dsml: the control token.
            parallel: whether an answer may hold more than one call.
            relaxed: places where only the types of values hold.

        Raises:
            GrammarError: a tool's schema, or all of them together, exceed the limits of
                `chat.grammar_limits`, or a strict tool has what cannot be enforced.
        """
        self._dsml, self._relaxed, self._space = f"<[{dsml}]>", relaxed, dialect.space
        self._rules: list[tuple[str, str]] = []
        # The rules of parameters, by tool, name and schema, which must stay alive.
        self._known: dict[tuple[str, str, int], tuple[str | None, Any]] = {}
        self.places: list[str] = []
        self.ignored: list[str] = []
        self._chars = 0
        self._reader = SchemaReader()
        names = [f"tool_{i}" for i in range(len(tools))]
        for name, tool in zip(names, tools, strict=True):
            self._add_tool(name, tool)
        self._add(f"invoke: {' | '.join(names)}")
        self._add(f"invokes: {'invoke+' if parallel else 'invoke'}")
        d, name = self._dsml, dialect.space + dialect.blocks[0]
        self._add(f'block: "{name}>\\n" invokes "</" {d} "{name}>"')

    def required(self) -> str:
        """A grammar of answers that are tool calls and nothing else."""
        return self._grammar((f'start: "\\n\\n<" {self._dsml} block', ""))

    def after_text(self) -> str:
        """A grammar of answers of any text, which tool calls may follow."""
        return self._grammar(
            (f"start: TEXT | OPENING {self._dsml} block", ""),
            ("TEXT: /(?s:.*)/", ""),
            ("OPENING: /(?s:.*)</", ""),
        )

    def instead_of(self, content: str, place: str = "") -> str:
        """A grammar of answers that match `content` (an item of a Lark rule), or tool calls.

        Args:
            place: what of the request the content holds.
        """
        calls = f'"\\n\\n<" {self._dsml} block'
        return self._grammar((f"start: content | {calls}", ""), (f"content: {content}", place))

    def _grammar(self, *start: tuple[str, str]) -> str:
        lines = [*start, *self._rules]
        self.places = [place for _, place in lines]
        return "\n".join(rule for rule, _ in lines)

    def _add(self, rule: str, place: str = "") -> None:
        """Adds a rule and checks the limit: each parameter repeats definitions of its tool."""
        self._chars += len(rule)
        check_chars(self._chars)
        self._rules.append((rule, place))

    def _add_tool(self, rule: str, tool: ToolSignature) -> None:
        document = SchemaDocument(tool.parameters, f"tools.{printable(tool.name)}")
        document.part(document.root)  # names what it leaves out
        for key in ("minProperties", "maxProperties"):
            if key in document.root:
                document.leave_out(key)
        alternatives = self._reader.alternatives(document.root, document.root)
        objects = [one for one in alternatives if "object" in kinds(one)]
        found = [self._arguments(f"{rule}_{i}", one, document) for i, one in enumerate(objects)]
        calls = dict.fromkeys(" ".join(items) or '""' for items in found if items is not None)
        if not calls:
            raise GrammarError("invalid", f"{document.name}: no arguments match the schema")
        if tool.strict:
            document.check_strict()
        self.ignored += document.ignored
        d, tag = self._dsml, f"{self._space}invoke"
        opening = _quoted(f'{tag} name="{tool.name}">\n')
        self._add(f'{rule}: "<" {d} {opening} ({" | ".join(calls)}) "</" {d} "{tag}>\\n"')

    def _arguments(self, rule: str, schema: Schema, document: SchemaDocument) -> list[str] | None:
        """The items of a tool's rule for one alternative of its schema; None: none matches."""
        properties, patterns = mapping(schema, "properties"), mapping(schema, "patternProperties")
        required = schema.get("required")
        required = [k for k in required if isinstance(k, str)] if isinstance(required, list) else []
        open_ = not ("properties" in schema or patterns)
        others = schema.get("additionalProperties", open_)
        unlisted = True if patterns or "additionalProperties" not in schema else others
        if properties and patterns:
            document.leave_out("patternProperties")  # not for the names in properties
        items = []
        names = dict.fromkeys([*properties, *required])
        for i, key in enumerate(names):
            value = properties.get(key, unlisted)
            name = _quoted(f'{key}"')
            item = self._parameter(f"{rule}_p{i}", name, value, document, f"properties.{key}")
            if item is not None:
                items.append(item if key in required else f"{item}?")
            elif key in required:
                return None
        listed = f" & ~({' | '.join(map(_quoted, names))})" if names else ""
        regexes = {key: whole(key) for key in patterns}
        more = [
            self._others(f"{rule}_r{i}", f"{_NAME} & /{regex}/{listed}", patterns[key], document)
            for i, (key, regex) in enumerate(regexes.items())
            if regex is not None
        ]
        if others is not False:
            not_those = "".join(f" & ~/{regex}/" for regex in regexes.values() if regex is not None)
            more.append(
                self._others(f"{rule}_any", f"{_NAME}{listed}{not_those}", others, document)
            )
        rules = [one for one in more if one is not None]
        return [*items, f"({' | '.join(rules)})*"] if rules else items

    def _others(self, rule: str, terminal: str, value: Any, document: SchemaDocument) -> str | None:
        """The rule of parameters whose names match a terminal."""
        name, place = f"{rule.upper()}_NAME", "additionalProperties"
        where = f"{document.name}.{place}"
        self._add(f"{name}: {_NAME if where in self._relaxed else terminal}", where)
        return self._parameter(rule, f'{name} "\\""', value, document, place)

    def _parameter(
        self, rule: str, name: str, value: Any, document: SchemaDocument, place: str
    ) -> str | None:
        """The rule of a parameter, which may be known already; None: no value matches.

        Args:
            name: the Lark item of its name and a quote.
            place: where its schema is in the document.
        """
        key = document.name, name, id(value)
        if key not in self._known:
            place = f"{document.name}.{'.'.join(map(printable, place.split('.', 1)))}"
            made = self._add_parameter(rule, name, value, document, place)
            self._known[key] = (rule if made else None), value
        return self._known[key][0]

    def _add_parameter(
        self, rule: str, name: str, value: Any, document: SchemaDocument, place: str
    ) -> bool:
        alternatives = self._reader.alternatives(value, document.root)
        if not alternatives:
            return False
        if place in self._relaxed:
            document.ignored.append(place)
            value = types(alternatives)
            alternatives = [value]
        d, tag = self._dsml, f"{self._space}parameter"
        values = []
        with_string = [one for one in alternatives if "string" in kinds(one)]
        text = _string_terminal(with_string)
        if text:
            self._add(f"{rule.upper()}_S: {text}", place)
            values.append(f'" string=\\"true\\">" {rule.upper()}_S')
        if not text or any(kinds(one) - {"string"} for one in alternatives):
            values.append(f'" string=\\"false\\">" {rule}_json "</"')
            part = document.part(value, silent=True)
            item = json_lark(_without_string(part) if text else part)
            self._add(f"{rule}_json: {item}", place)
        self._add(f'{rule}: "<" {d} "{tag} name=\\"" {name} ({" | ".join(values)}) {d} "{tag}>\\n"')
        return True


def _without_string(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without strings, for values that the markup has as JSON."""
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {**definitions, "allOf": [rest, {"type": sorted(KINDS - {"string"})}]}


def _string_terminal(alternatives: Iterable[Schema]) -> str:
    """A terminal for a string value of one of the alternatives, and the "</" that ends it.

    Empty if there are none, or if the grammar cannot hold one outside JSON.
    """
    terminals = dict.fromkeys(map(_string, alternatives))
    if None in terminals:
        return ""
    return _ANY_VALUE if _ANY_VALUE in terminals else " | ".join(filter(None, terminals))


def _string(schema: Schema) -> str | None:
    listed, parts = strings(schema), []
    if listed is not None:
        parts.append(f"({' | '.join(map(_quoted, listed))})")
    if "minLength" in schema or "maxLength" in schema:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if not all(type(n) is int and n >= 0 for n in (low, high or 0)):
            return None  # llguidance says what is wrong
        parts.append(f"/(?s:.{{{low},{high}}})/")
    if any(name in FORMATS for name in schema.get("format", ())):
        return None
    for pattern in schema.get("pattern", ()):
        if portable(pattern) is not None:
            regex = whole(pattern)
            if regex is None:
                return None
            parts.append(f"/{regex}/")
    return f'({" & ".join(parts)}) "</"' if parts else _ANY_VALUE


def _quoted(text: str) -> str:
    """A Lark string literal."""
    return json.dumps(text, ensure_ascii=False)
