"""The alternatives of a JSON Schema: schemas without references and unions at their top."""

from collections.abc import Mapping
from typing import Any

from finwhale.chat.grammar_limits import GrammarError

Schema = dict[str, Any]

KINDS = frozenset({"string", "number", "boolean", "null", "array", "object"})
MAX_WORK = 1 << 17

_REFERENCE, _UNIONS, _ALL = "$ref", ("anyOf", "oneOf"), "allOf"
# The keywords that an alternative keeps: those that say its types and which strings it allows.
_KEPT = ("type", "enum", "const", "minLength", "maxLength", "pattern")


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
            self._count(1 + sum(len(value) for value in one.values() if isinstance(value, list)))
            choices = _expanded(one, root)
            if choices is not None:
                waiting += reversed(choices)
            elif kinds(one):
                found.append(one)
        return found

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
    allowed = _types(schema)
    values = _values(schema)
    return allowed if values is None else allowed & {_kind_of(value) for value in values}


def strings(schema: Schema) -> list[str] | None:
    """The strings that an alternative lists; None: it lists no values."""
    values = _values(schema)
    return None if values is None else [value for value in values if isinstance(value, str)]


def _kept(schema: Any) -> Schema:
    if not isinstance(schema, Mapping):
        return {}
    return {k: schema[k] for k in (*_KEPT, _REFERENCE, *_UNIONS, _ALL) if k in schema}


def _expanded(schema: Schema, root: Mapping[str, Any]) -> list[Any] | None:
    """The schemas that replace one with a reference, a union or allOf; None: it has none."""
    for key in (_REFERENCE, *_UNIONS):
        if key in schema:
            value = schema.pop(key)
            members = [_target(value, root)] if key == _REFERENCE else value
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


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a local reference (a JSON Pointer) refers to; True, which allows everything, if none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return True
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return True
        found = found[key]
    return found


def _both(a: Schema, b: Schema) -> Schema | None:
    """A schema of the values that match both, of which only `b` may have references and unions.

    If both have a keyword besides types and listed values, the one of `b` counts.

    Returns:
        None if their types exclude each other.
    """
    both = {**a, **b}
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
