"""The alternatives of a JSON Schema: schemas without references and unions at their top."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from finwhale.chat.grammar_limits import GrammarError

Schema = dict[str, Any]

KINDS = frozenset({"string", "number", "boolean", "null", "array", "object"})
_KIND_OF = {
    str: "string", int: "number", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
MAX_WORK = 1 << 17

_REFERENCE, _UNIONS, _ALL = "$ref", ("anyOf", "oneOf"), "allOf"
_PROPERTIES = ("properties", "patternProperties", "additionalProperties", "required")
# The keywords that an alternative keeps: those that say its types, which strings it allows, and
# which properties. `pattern` and `format` become lists: all of them hold.
_KEPT = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", *_PROPERTIES)


class SchemaReader:
    """Finds the alternatives of schemas.

    The number of alternatives may grow exponentially with the schema, so a reader does at most
    MAX_WORK steps, for all its schemas together.
    """

    def __init__(self) -> None:
        self._work = 0

    def alternatives(self, schema: Any, root: Mapping[str, Any]) -> list[Schema]:
        """The alternatives, each with the keywords of `_KEPT`; a value matches one of them.

        An alternative that no value can match is left out. "not", "if" and references to other
        documents are taken to allow everything.

        Args:
            root: the schema that local references start from, such as "#/$defs/Color".

        Raises:
            GrammarError: this takes more than MAX_WORK steps.
        """
        found: list[Schema] = []
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if one is False:
                continue
            one = _kept(one)
            self._count(_size(one))
            choices = _expanded(one, root)
            if choices is not None:
                waiting += reversed(choices)
            elif kinds(one):
                found.append(one)
        return found

    def disjoint(self, schemas: Sequence[Any], root: Mapping[str, Any]) -> bool:
        """Whether it is certain that no value matches two of the schemas. Raises GrammarError."""
        found = [self.alternatives(schema, root) for schema in schemas]
        return all(
            self._differ(a, b, root)
            for i, some in enumerate(found)
            for a in some
            for others in found[:i]
            for b in others
        )

    def _differ(self, a: Schema, b: Schema, root: Mapping[str, Any]) -> bool:
        """Whether two alternatives have no value in common, by types, values or a property."""
        common = kinds(a) & kinds(b)
        in_a, in_b = _values(a), _values(b)
        self._count(1 + len(in_a or ()) + len(in_b or ()))
        if in_a is not None and in_b is not None:
            return not {json.dumps(v, sort_keys=True) for v in in_a}.intersection(
                json.dumps(v, sort_keys=True) for v in in_b
            )
        if common != {"object"}:
            return not common
        return any(
            self._differ(x, y, root)
            for key in {*_list(a.get("required", [])), *_list(b.get("required", []))}
            if isinstance(key, str)
            for x, y in [(self._listed(a, key, root), self._listed(b, key, root))]
            if x and y
        )

    def _listed(self, schema: Schema, key: str, root: Mapping[str, Any]) -> Schema | None:
        """A property's only alternative if it lists its values, as a discriminator does."""
        found = self.alternatives(_properties(schema).get(key, True), root)
        return found[0] if len(found) == 1 and _values(found[0]) is not None else None

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise GrammarError(
                "size",
                "the tools' schemas have too many alternatives in anyOf, oneOf and enum, or "
                "references that form a cycle: use simpler schemas or fewer tools",
            )


def kinds(schema: Schema) -> frozenset[str]:
    """The JSON types of an alternative's values; an integer is a number."""
    allowed, values = _types(schema), _values(schema)
    listed = KINDS if values is None else {_KIND_OF.get(type(v), "null") for v in values}
    return allowed & listed


def types(alternatives: Iterable[Schema]) -> Schema:
    """A schema of the types of the alternatives' values alone."""
    return {"type": sorted(set[str]().union(*map(kinds, alternatives)))}


def strings(schema: Schema) -> list[str] | None:
    """The strings that an alternative lists; None: it lists no values."""
    values = _values(schema)
    return None if values is None else [value for value in values if isinstance(value, str)]


def _size(schema: Schema) -> int:
    """The work of copying an alternative, with the schemas of its properties that are merged."""
    merged = [v[_ALL] for v in _properties(schema).values() if isinstance(v, dict) and _ALL in v]
    values = [*schema.values(), *merged]
    return 1 + sum(len(value) for value in values if isinstance(value, list | dict))


def _kept(schema: Any) -> Schema:
    if not isinstance(schema, Mapping):
        return {}
    kept = {k: schema[k] for k in (*_KEPT, _REFERENCE, *_UNIONS, _ALL) if k in schema}
    for key in ("pattern", "format"):
        if isinstance(kept.get(key), str):
            kept[key] = [kept[key]]
    return kept


def _expanded(schema: Schema, root: Mapping[str, Any]) -> list[Any] | None:
    """The schemas that replace one with a reference, a union or allOf; None: it has none."""
    for key in (_REFERENCE, *_UNIONS):
        if key in schema:
            value = schema.pop(key)
            members = value
            if key == _REFERENCE:
                found = target(value, root)
                members = [True if found is None else found]
            others = _list(schema.pop(_ALL, []))
            return [{**schema, _ALL: [*others, member]} for member in _list(members)]
    if _ALL not in schema:
        return None
    members = _list(schema.pop(_ALL))
    if not members:
        return [schema]
    first, *others = members
    if first is False:
        return []
    both = _both(schema, _kept(first))
    return [] if both is None else [{**both, _ALL: [*_list(both.get(_ALL, [])), *others]}]


def target(reference: Any, root: Mapping[str, Any]) -> Any | None:
    """The schema that a local reference (a JSON Pointer) refers to; None: there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = dict(enumerate(found)).get(int(key) if key.isdecimal() else -1)
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping | bool) else None


def _both(a: Schema, b: Schema) -> Schema | None:
    """A schema of the values that match both, of which only `b` may have references and unions.

    Returns:
        None if their types exclude each other.
    """
    both = {**a, **b}
    for key, stricter in (("minLength", max), ("maxLength", min)):
        if isinstance(a.get(key), int) and isinstance(b.get(key), int):
            both[key] = stricter(a[key], b[key])
    for key in ("pattern", "format"):
        if key in a and key in b:
            both[key] = [*_list(a[key]), *_list(b[key])]
    both |= _both_properties(a, b)
    if "type" in a and "type" in b:
        both["type"] = sorted(_types(a) & _types(b))
        if not both["type"]:
            return None
    in_a, in_b = _values(a), _values(b)
    if in_a is not None and in_b is not None:
        common = {value for value in in_b if isinstance(value, str)}
        both.pop("const", None)
        # Only strings matter: a JSON value is checked against the whole schema.
        both["enum"] = [v for v in in_a if not isinstance(v, str) or v in common]
    return both


def _both_properties(a: Schema, b: Schema) -> Schema:
    """The keywords about properties of a schema of the objects that match both."""
    both: Schema = {}
    if "properties" in a or "properties" in b:
        names = {**_properties(a), **_properties(b)}
        both["properties"] = {k: _all(_property(a, k), _property(b, k)) for k in names}
    if "patternProperties" in a and "patternProperties" in b:
        both["patternProperties"] = {**_patterns(a), **_patterns(b)} | {
            k: _all(v, _patterns(b)[k]) for k, v in _patterns(a).items() if k in _patterns(b)
        }
    if "additionalProperties" in a and "additionalProperties" in b:
        both["additionalProperties"] = _all(a["additionalProperties"], b["additionalProperties"])
    if "required" in a and "required" in b:
        both["required"] = [*_list(a["required"]), *_list(b["required"])]
    return both


def _all(a: Any, b: Any) -> Any:
    """A schema of the values that match both."""
    if a is False or b is False:
        return False
    if a is True or a == {}:
        return b
    if b is True or b == {}:
        return a
    flat = isinstance(a, Mapping) and a.keys() == {_ALL}
    return {_ALL: [*(_list(a[_ALL]) if flat else [a]), b]}


def _property(schema: Schema, name: str) -> Any:
    others = True if _patterns(schema) else schema.get("additionalProperties", True)
    return _properties(schema).get(name, others)


def mapping(schema: Schema, key: str) -> Mapping[str, Any]:
    """The schemas that an alternative has by name, or by pattern."""
    found = schema.get(key)
    return found if isinstance(found, Mapping) else {}


_properties = partial(mapping, key="properties")
_patterns = partial(mapping, key="patternProperties")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [True]


def _types(schema: Schema) -> frozenset[str]:
    given = schema.get("type")
    given = [given] if isinstance(given, str) else _list(given)
    known = {"number" if k == "integer" else k for k in given if isinstance(k, str)}
    return KINDS & known or KINDS


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
