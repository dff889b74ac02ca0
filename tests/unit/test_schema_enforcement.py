"""Tools are held to their schemas, or what does not hold is named."""

import json
import re
from typing import Any

import deepseek_recipe as recipe
import pytest

from finwhale.chat.answer_grammar import AnswerForm, AnswerGrammar, ToolChoice, WantedFormat
from finwhale.chat.grammar import Matcher, json_guide, json_lark, lark_guide
from finwhale.chat.grammar_limits import GrammarError
from finwhale.chat.patterns import whole
from finwhale.chat.schema_document import SchemaDocument
from finwhale.chat.tool_grammar import ToolGrammar, ToolSignature
from finwhale.server.protocols.answer_formats import tool_signatures

from .test_grammar import DSML, Values, block, call, follows, tokenizer

Schema = dict[str, Any]
POINT = {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]} | {
    "additionalProperties": False
}
NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "children": {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
EITHER = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": {"enum": ["x"]}},
    "additionalProperties": False,
}


def of(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def values(**given: Any) -> Values:
    return [
        (key, str(isinstance(v, str)).lower(), v if isinstance(v, str) else json.dumps(v))
        for key, v in given.items()
    ]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # References to the root, to properties and through lists.
        (NODE, [{"name": "a"}, {"name": "a", "children": [{"name": "b"}]}],
         [{"name": "a", "children": [[]]}, {"name": "a", "children": [{}]},
          {"name": "a", "children": []}]),
        (of(**{"from": POINT, "to": {"$ref": "#/properties/from"}}),
         [{"from": {"lat": 1}, "to": {"lat": 2}}], [{"from": {"lat": 1}, "to": {}}]),
        (of(a={"anyOf": [{"type": "null"}, {"type": "integer"}]},
            b={"$ref": "#/properties/a/anyOf/1"}), [{"a": None, "b": 1}], [{"a": None, "b": None}]),
        (of(a={"$ref": "#/$defs/a%20b~1c"}) | {"$defs": {"a b/c": {"const": 3}}},
         [{"a": 3}], [{"a": 4}]),
        # Combinations at the top.
        (EITHER | {"anyOf": [{"required": ["id"]}, {"required": ["name"]}]},
         [{"id": 1}, {"name": "x"}, {"id": 1, "name": "x"}],
         [{}, {"name": "y"}, {"b": "59"}, {"id": "1"}]),
        ({"oneOf": [of(k={"const": "a"}, n={"type": "integer"}), of(k={"const": "b"})]},
         [{"k": "a", "n": 1}, {"k": "b"}], [{"k": "a"}, {"k": "c"}, {"k": "b", "n": 1}]),
        ({"allOf": [of(a={"type": "integer"}), of(a={"enum": [1, "2"]}, b={"type": "null"})]},
         [{"a": 1, "b": None}], [{"a": 1}, {"a": 2, "b": None}, {"a": "2", "b": None}]),
        ({"$ref": "#/$defs/A", "$defs": {"A": of(a={"type": "integer"})}},
         [{"a": 1}], [{}, {"a": "x"}]),
        ({"type": "object", "patternProperties": {"^x-": {"type": "integer"}}} | {
            "additionalProperties": False}, [{}, {"x-a": 1, "x-b": 2}], [{"y": 1}, {"x-a": "s"}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}, **{
            k: v for k, v in of(a={"type": "null"}).items() if k != "type"}},
         [{"a": None}, {"a": None, "b": 1, "c": 2}], [{"a": 1}, {"b": 1}, {"a": None, "b": "s"}]),
        ({"type": "object", "required": ["a"], "additionalProperties": {"type": "null"}},
         [{"a": None}, {"a": None, "b": None}], [{}, {"b": None}, {"a": 1}]),
        # Strings: all keywords hold, and patterns are searched for.
        (of(a={"type": "string", "pattern": "^a$|^b$"}), [{"a": "a"}, {"a": "b"}], [{"a": "ab"}]),
        (of(a={"type": "string", "pattern": "^cat|dog$"}), [{"a": "catx"}, {"a": "xdog"}],
         [{"a": "xcat"}, {"a": "dogx"}]),
        (of(a={"type": "string", "pattern": r"^\d+/\w$", "maxLength": 4, "minLength": 3}),
         [{"a": "1/a"}, {"a": "12/_"}], [{"a": "123/a"}, {"a": "٣/a"}, {"a": "1/é"}]),
        (of(a={"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}),
         [{"a": "xbxa"}], [{"a": "a"}, {"a": "b"}]),
        (of(a={"enum": ["ab", "b", "abc"], "pattern": "^a", "maxLength": 2}), [{"a": "ab"}],
         [{"a": "b"}, {"a": "abc"}]),
        (of(a={"type": "string", "format": "path"}), [{"a": "any"}], [{"a": 1}]),
        (of(a={"type": "string", "pattern": '^[^"&[]+$'}), [{"a": "a\nb~"}], [{"a": 'a"b'}]),
    ],
)  # fmt: skip
def test_one_document_for_each_tool(schema: Schema, good: list[Schema], bad: list[Schema]) -> None:
    grammar = ToolGrammar(
        [ToolSignature("f", schema, strict=True)], tokenizer().added_id(DSML), parallel=True
    )
    guide = lark_guide(grammar.required())
    assert not grammar.ignored
    for arguments, fits in [(one, True) for one in good] + [(one, False) for one in bad]:
        text = block(call("f", values(**arguments)))
        assert follows(guide, text) == fits, arguments


@pytest.mark.parametrize(
    ("keywords", "good", "bad"),
    [({"pattern": "(^a|b$)"}, ["ax", "xb"], ["xa"]),
     ({"format": "date"}, ["2024-02-29"], ["2024-02-30"])],
)  # fmt: skip
def test_a_string_that_only_json_can_hold(
    keywords: Schema, good: list[str], bad: list[str]
) -> None:
    """llguidance knows formats, and anchors in groups, in JSON alone."""
    schema = of(a={"type": "string", **keywords})
    grammar = ToolGrammar([ToolSignature("f", schema)], tokenizer().added_id(DSML), parallel=True)
    guide = lark_guide(grammar.required())
    for value in (*good, *bad):
        text = block(call("f", [("a", "false", json.dumps(value))]))
        assert follows(guide, text) == (value in good)


@pytest.mark.parametrize(
    "pattern", ['[^"]', r"[^\\]", r'[^"\\]', r'[^\n"]', '(?:[^"]|x)', r'[^\w"]']
)
def test_a_class_that_excludes_a_quote(pattern: str) -> None:
    guide = json_guide({"type": "string", "pattern": f"^{pattern}+$"})
    for text in ("a", "é", '"', "\\", 'a"b', "a\\b", "\n", "\t-", "/"):
        fits = re.fullmatch(f"(?:{pattern})+", text, re.ASCII) is not None
        assert follows(guide, json.dumps(text, ensure_ascii=False)) == fits, text


@pytest.mark.parametrize("pattern", [r"^[\w.[-]+&&~[a-z]{2}$", r"a/b|^c", "^$", r"\.", r"^\/$"])
def test_patterns_match_as_in_javascript(pattern: str) -> None:
    """The same texts in JSON, where llguidance searches, and outside it."""
    regex = whole(pattern)
    in_json, outside = (
        json_guide({"type": "string", "pattern": pattern}),
        lark_guide(f"start: /{regex}/"),
    )
    for text in ("", "a.[-&&~bc", "a&&~bc", "xa/by", "c", "xc", ".", "a", "/"):
        fits = re.search(pattern.replace("&&~[", "&&~[").replace(".[-", r".\[-"), text) is not None
        assert follows(in_json, json.dumps(text)) == fits, text
        assert follows(outside, text) == fits, text


def ignored(schema: Schema) -> list[str]:
    document = SchemaDocument(schema, "s")
    document.part(schema)
    return document.ignored


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"const": 1}}, "s.not"),
        ({"if": {}, "then": {"not": {}}}, "s.if"),
        (of(a={"uniqueItems": True, "items": {"contains": {}}}),
         "s.properties.a.uniqueItems s.properties.a.items.contains"),
        ({"$defs": {"N": {"not": {}, "items": {"$ref": "#/$defs/N"}}}, "$ref": "#/$defs/N"},
         "s.$defs.N.not"),
        ({"$defs": {"unused": {"not": {}}}}, ""),
        ({"properties": {"not": {"type": "null"}}, "default": {"not": {}}}, ""),
        # These keywords restrict nothing, or are annotations.
        ({"propertyNames": {"type": "string"}, "uniqueItems": False, "deprecated": True,
          "format": "path", "x-mine": {"not": {}}, "$schema": "urn:x", "$id": "x y",
          "unevaluatedProperties": {}}, ""),
        ({"propertyNames": {"pattern": "^a"}}, "s.propertyNames"),
        ({"type": "string", "pattern": r"(?=a)b"}, "s.pattern"),
        ({"type": "string", "pattern": r"\bword\b"}, "s.pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, "s.pattern"),
        ({"type": "string", "pattern": r"[(?=]\\b"}, ""),
        ({"patternProperties": {"(?!a)": {}}}, "s.patternProperties.???a?"),
        ({"$ref": "http://x.org/a"}, "s.$ref"),
        ({"$ref": "#/nowhere"}, "s.$ref"),
        ({"$ref": 3}, "s.$ref"),
        (of(a={}) | {"minProperties": 1}, ""),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, "s.minProperties"),
        ({"properties": {"a": {}}, "maxProperties": 1, "additionalProperties": False}, ""),
        # oneOf is anyOf if no value matches two.
        ({"oneOf": [{"type": "string"}, {"type": "null"}, {"type": ["array", "object"]}]}, ""),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "s.oneOf"),
        ({"oneOf": [{"enum": [1, "a"]}, {"enum": ["b", True]}]}, ""),
        ({"oneOf": [of(k={"const": "a"}), of(k={"enum": ["b", "c"]})]}, ""),
        ({"oneOf": [of(k={"const": "a"}), of(k={"enum": ["b", "a"]})]}, "s.oneOf"),
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
          "$defs": {"A": of(k={"const": "a"}), "B": of(k={"$ref": "#/$defs/C"}),
                    "C": {"const": "c"}}}, ""),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "s.oneOf"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named(schema: Schema, named: str) -> None:
    assert ignored(schema) == named.split()
    Matcher(
        tokenizer(), lark_guide(f"start: {json_lark(SchemaDocument(schema, 's').part(schema))}")
    )
    if named:
        with pytest.raises(GrammarError, match=re.escape(named.split()[0][1:])):
            json_guide(schema)


def tool(schema: Schema, name: str = "f", strict: bool | None = None) -> recipe.ToolDefinition:
    return recipe.ToolDefinition(name, None, schema, strict, False)


def held(
    tools: list[recipe.ToolDefinition], wanted: WantedFormat | None = None, required: bool = True
) -> AnswerGrammar:
    """The grammar that a server uses."""

    choice = ToolChoice(required=required and bool(tools), parallel=not tools or required)
    grammar = AnswerForm(tokenizer(), wanted, tool_signatures(tools), choice).grammar()
    while True:
        assert grammar is not None and grammar.guide is not None
        try:
            Matcher(tokenizer(), grammar.guide)
            return grammar
        except GrammarError as error:
            grammar = grammar.relax(error)


BEYOND: dict[str, Any] = {
    "patterns of one name": {"patternProperties": {"^a": {}, "b": {}}},
    "a pattern of another syntax": {"type": "string", "pattern": "^(a"},
    "a circle with siblings": {"$defs": {"N": {"allOf": [{"$ref": "#/$defs/N"}, {}]}}} | {
        "type": "object", "properties": {"a": {"type": "object", "properties": {
            "b": {"$ref": "#/properties/p/properties/a", "minProperties": 1}}}},
    },
    "counted properties in allOf": {"type": "object", "allOf": [
        {"properties": {"a": {}, "b": {}}}, {"minProperties": 2}]},
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("required", [True, False])
def test_what_only_llguidance_finds_is_named(name: str, required: bool) -> None:
    """The rest of the request holds, and a strict tool is refused by name."""
    good, p = of(x={"type": "integer"}), BEYOND[name]
    tools = [tool(good, "good"), tool(of(p=p, q={"const": 1}), "bad-one")]
    grammar = held(tools, required=required)
    assert grammar.ignored == ("tools.bad-one.properties.p",)
    kind = str("string" in str(p.get("type"))).lower()
    value = {"object": "{}", "string": "zzz"}.get(p.get("type", ""), "3")
    right = block(call("bad-one", [("p", kind, value), ("q", "false", "1")]))
    assert follows(grammar.guide, right)
    assert not follows(grammar.guide, right.replace("1</", "2</"))
    assert not follows(grammar.guide, block(call("good", [("x", "true", "1")])))
    held([tool(good, "good", True), tools[1]], required=required)
    with pytest.raises(GrammarError, match=r"tools\.bad-one\.properties\.p: "):
        held([tools[0], tool(of(p=p), "bad-one", True)], required=required)


def test_formats_hold_as_far_as_they_can() -> None:
    for schema in (*BEYOND.values(), {"type": "object", "not": {}}):
        grammar = held([], WantedFormat(("json", schema), "text.format"))
        assert grammar.ignored[0].startswith("text.format")
        with pytest.raises(GrammarError, match=r"^text\.format"):
            held([], WantedFormat(("json", schema), "text.format", strict=True))
        beside = held([tool(of(a={}))], WantedFormat(("json", schema)), required=False)
        assert beside.ignored[0].startswith("response_format")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "string", "minLength": -1},
        {"enum": 3},
        {"multipleOf": 0},
        {"items": 3},
    ],
)
def test_a_wrong_schema_is_refused_by_name(schema: Schema) -> None:
    with pytest.raises(GrammarError, match=r"tools\.b\.properties\.x: "):
        held([tool({}, "a"), tool(of(x={"type": "integer"} | schema if "items" not in schema
                                     else {"type": "array"} | schema), "b")])  # fmt: skip


def test_rewriting_is_bounded() -> None:
    """References to parts within each other would copy the whole for each level and parameter."""
    inner: Schema = {"enum": list(range(20_000))}
    for _ in range(25):
        inner = {"properties": {"a": inner}}
    pointers = ["/properties/a" * n for n in range(1, 25)]
    schema = {"properties": {"a": inner, "b": {"anyOf": [{"$ref": f"#{p}"} for p in pointers]}}}
    many = {f"b{i}": schema["properties"]["b"] for i in range(10)}
    with pytest.raises(GrammarError, match="characters"):
        ToolGrammar([ToolSignature("f", of(**schema["properties"], **many))], 3, parallel=True)
    merged = {"allOf": [of(a={"minLength": 1}) for _ in range(2000)]}
    with pytest.raises(GrammarError, match="too many alternatives"):
        ToolGrammar([ToolSignature("f", merged)], 3, parallel=True)


def test_names_are_bounded_and_harmless() -> None:
    schema = of(**{f"a{i}\r\n,": {"not": {}} for i in range(100)})
    names = ignored(schema)
    assert len(names) == 17 and names[0] == "s.properties.a0???.not"
