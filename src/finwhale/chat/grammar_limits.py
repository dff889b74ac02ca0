"""Limits on grammars, checked on their text before llguidance sees it.

llguidance compiles by recursion. Each link of a chain of `$ref`s takes about 8 KiB of stack, each
link of a chain of Lark rules about 3 KiB, and a stack that overflows ends the process. These limits
refuse what no real grammar needs. They do not bound the cost of what they accept:
`{"type": "integer", "multipleOf": 999983}` has 40 characters and takes ten seconds. A server
therefore also tries each new grammar in a process of its own (`server/grammars/check.py`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from finwhale.errors import RequestError

MAX_GRAMMAR_CHARS = 1 << 20
MAX_NESTING = 64
MAX_REFERENCES = 500
MAX_RULES = 1000

Reason = Literal[
    "size", "nesting", "references", "rules", "invalid", "time", "memory", "crash", "masks"
]


class GrammarError(RequestError):
    """A grammar is refused. `reason`: the limit that it exceeds, or what is wrong with it, in one
    word for the metrics."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason

    def __reduce__(self) -> tuple[type["GrammarError"], tuple[Reason, str]]:
        return GrammarError, (self.reason, str(self))


def check_chars(count: int) -> None:
    """Raises GrammarError if a grammar has more than MAX_GRAMMAR_CHARS characters."""
    if count > MAX_GRAMMAR_CHARS:
        raise GrammarError(
            "size",
            f"the grammar has {count} characters or more, but at most {MAX_GRAMMAR_CHARS} are "
            "allowed: use a smaller schema or fewer tools",
        )


def check_text(text: str) -> None:
    """Raises GrammarError if a grammar is too long or not valid Unicode."""
    check_chars(len(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(
            "invalid",
            f"the grammar is not valid: it has a lone surrogate at character {error.start}",
        ) from error


def levels(value: object) -> Iterator[list[Any]]:
    """The objects and arrays of parsed JSON, level by level, without recursion."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    while level:
        yield level
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(item, _CONTAINERS)
        ]


def check_schema(schema: Any) -> None:
    """Checks a JSON Schema without recursion, and without reading all of one that is too large.
    Raises GrammarError: it has too many values or references, or is nested too deeply."""
    values = references = 0
    for depth, level in enumerate(levels(schema), start=1):
        if depth > MAX_NESTING:
            raise _too_deep("the schema", "move inner schemas to $defs")
        for container in level:
            values += len(container)
            check_chars(values)
            if isinstance(container, Mapping):
                references += sum(keyword in container for keyword in _REFERENCES)
    _check_references(references)


def check_lark(text: str) -> None:
    """Checks a grammar in Lark's form. Raises GrammarError."""
    check_text(text)
    rules = len(_RULE.findall(text))
    if rules > MAX_RULES:
        raise GrammarError(
            "rules",
            f"the grammar has {rules} rules, but at most {MAX_RULES} are allowed: write rules that "
            "are used once where they are used",
        )
    _check_references(len(_REFERENCE.findall(text)))
    _check_brackets(_LARK_TEXT.sub("", text), "the grammar", "move inner groups to rules")


def check_regex(text: str) -> None:
    """Checks a regular expression. Raises GrammarError."""
    check_text(text)
    _check_brackets(_REGEX_TEXT.sub("", text), "the regular expression", "remove groups")


def _check_references(count: int) -> None:
    if count > MAX_REFERENCES:
        raise GrammarError(
            "references",
            f"the schema has {count} references ($ref), but at most {MAX_REFERENCES} are allowed: "
            "write small definitions where they are used, or ask for parts in several requests",
        )


def _check_brackets(text: str, what: str, remedy: str) -> None:
    depth = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "([{" else -1
        if depth > MAX_NESTING:
            raise _too_deep(what, remedy)


def _too_deep(what: str, remedy: str) -> GrammarError:
    return GrammarError(
        "nesting",
        f"{what} is nested more than {MAX_NESTING} levels deep, which is not allowed: {remedy}",
    )


_CONTAINERS = (Mapping, list, tuple)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

# These patterns take linear time: their repetitions are possessive, and an unclosed string ends
# with its line.
# The head of a rule or terminal: `?name{parameters}.priority[options]:`.
_RULE = re.compile(r"^[ \t]*+[?!]{0,2}[A-Za-z_]\w*+[^\n:\"'/|]{0,200}+:", re.MULTILINE)
_REFERENCE = re.compile(r'"\$(?:dynamicR|recursiveR|r)ef"\s{0,100}+:')
# Text in which a bracket is only a character: comments, strings, regular expressions.
_LARK_TEXT = re.compile(r'//[^\n]*+|"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\\n])*+/?')
# The same in a regular expression: escapes and classes.
_REGEX_TEXT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?", re.DOTALL)
_BRACKET = re.compile(r"[()\[\]{}]")
