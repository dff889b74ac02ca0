"""The part of a client's JSON Schema that llguidance enforces.

llguidance refuses a schema as a whole if it has one keyword too many. A `SchemaDocument` leaves out
what cannot be enforced and names it. A part of the document, such as one parameter of a tool,
becomes a schema of its own with the definitions that it refers to: `#` still means the document.
"""

from collections.abc import Mapping
from typing import Any

from finwhale.chat.grammar_limits import GrammarError, check_chars, check_schema
from finwhale.chat.known_fields import MAX_NAMED, printable
from finwhale.chat.patterns import portable
from finwhale.chat.schema_alternatives import SchemaReader, target, types

_VALUES = ("type", "const", "enum", "required", "minItems", "maxItems", "minLength", "maxLength",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")  # fmt: skip
_SCHEMAS = ("additionalProperties", "additionalItems", "items", "prefixItems", "anyOf", "oneOf",
    "allOf")  # fmt: skip
_MAPS = ("properties", "patternProperties")
_COUNTS = ("minProperties", "maxProperties")
# The formats that llguidance enforces. Any other is an annotation, as JSON Schema allows.
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
    "uri")  # fmt: skip
# Keywords that llguidance does not enforce, with values that restrict nothing. zod writes the one
# of propertyNames for each record. All other keywords are annotations.
_NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}


class SchemaDocument:
    """One JSON Schema of a client, which local references start from.

    Attributes:
        root: the schema.
        name: what the request calls it.
        ignored: the paths of keywords that cannot be enforced, beginning with the name; one more
            than MAX_NAMED at most.
    """

    def __init__(self, root: Mapping[str, Any], name: str) -> None:
        """Raises GrammarError: the schema exceeds the limits of `chat.grammar_limits`."""
        check_schema(root)
        self.root, self.name = root, name
        self.ignored: list[str] = []
        self._num_values = 0
        self._members = SchemaReader()
        self._references: list[str] = []
        self._silent = False

    def part(self, schema: Any, *, silent: bool = False) -> dict[str, Any]:
        """A schema, complete in itself, of what llguidance enforces of a part of the document.

        Args:
            silent: do not name what is left out. Otherwise the part is the root.

        Raises:
            GrammarError: it is too large, which references to parts within each other can cause.
        """
        references: list[str] = []
        self._references, self._silent = references, silent
        made = self._enforced(schema, ())
        if not isinstance(made, dict):
            made = {"enum": []} if made is False else {}
        definitions: dict[str, Any] = {}
        for reference in references:  # it grows meanwhile
            found, way = target(reference, self.root), tuple(reference.split("/")[1:])
            definitions[str(len(definitions))] = self._enforced(found, way)
        if definitions:
            made["$defs"] = definitions
        return made

    def types(self) -> dict[str, Any]:
        """A schema of the types of the root's values alone."""
        return types(self._members.alternatives(self.root, self.root))

    def leave_out(self, keyword: str) -> None:
        """Adds a keyword of the root to those that are ignored."""
        self._silent = False
        self._leave_out((keyword,))

    def check_strict(self) -> None:
        """Raises GrammarError if there is a keyword that cannot be enforced."""
        if self.ignored:
            raise GrammarError(
                "invalid",
                f"{self.name} must hold strictly, but the server cannot enforce "
                f"{', '.join(self.ignored)}: leave that out, or do not ask for strict",
            )

    def _enforced(self, schema: Any, way: tuple[str, ...]) -> Any:
        """What llguidance enforces of the part that a way of names leads to from the root."""
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            self._num_values += 1 + (len(value) if isinstance(value, list | dict) else 0)
            check_chars(self._num_values)
            here = (*way, key)
            if key in _VALUES or (key in _MAPS and not isinstance(value, Mapping)):
                made[key] = value
            elif key in _SCHEMAS:
                made[key] = self._enforced(value, here)
                if isinstance(value, list):
                    made[key] = [self._enforced(v, (*here, str(i))) for i, v in enumerate(value)]
                if key == "oneOf" and not self._disjoint(value):
                    self._leave_out(here)
            elif key in _MAPS:
                known = {k: k if key == "properties" else portable(k) for k in value}
                made[key] = {
                    name: self._enforced(value[k], (*here, k))
                    for k, name in known.items()
                    if name is not None
                }
                for k in (k for k, name in known.items() if name is None):
                    self._leave_out((*here, k))
            elif key == "format":
                made |= {key: value} if value in FORMATS else {}
            elif key in ("pattern", "$ref", *_COUNTS):
                kept = self._kept(schema, key, value)
                made |= {} if kept is None else {key: kept}
                if kept is None:
                    self._leave_out(here)
            elif key in _NOT_ENFORCED and value not in _NOT_ENFORCED[key]:
                self._leave_out(here)
        return made

    def _kept(self, schema: Mapping[str, Any], key: str, value: Any) -> Any | None:
        """The value for llguidance of a keyword that it enforces in some schemas, or None."""
        if key == "pattern":
            return portable(value) if isinstance(value, str) else value
        if key != "$ref":
            return value if _countable(schema) else None
        if target(value, self.root) is None:
            return None
        if value not in self._references:
            self._references.append(value)
        return f"#/$defs/{self._references.index(value)}"

    def _leave_out(self, way: tuple[str, ...]) -> None:
        path = ".".join([self.name, *map(printable, way)])
        if not self._silent and path not in self.ignored and len(self.ignored) <= MAX_NAMED:
            self.ignored.append(path)

    def _disjoint(self, members: Any) -> bool:
        """Whether a oneOf certainly means the same as anyOf: no value matches two members."""
        try:
            return not isinstance(members, list) or self._members.disjoint(members, self.root)
        except GrammarError:  # that would take too long
            return False


def _countable(schema: Mapping[str, Any]) -> bool:
    """Whether llguidance counts the properties of an object."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        required = []
    if not properties or all(name in required for name in properties):
        return True
    low, high = schema.get("minProperties", 0), schema.get("maxProperties", 1)
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return closed and low in (0, 1) and high == 1
