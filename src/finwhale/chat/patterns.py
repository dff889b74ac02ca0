"""Regular expressions of JSON Schema, for llguidance.

JSON Schema searches for a pattern of JavaScript; llguidance has Rust's syntax. In JSON, llguidance
searches, too. A string outside JSON must match as a whole, without anchors.
"""

import re
from collections.abc import Iterator

_PIECE = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*+\]?|\(\?<?[=!]|.", re.DOTALL)
_NOT_REGULAR = re.compile(r"\\[bBk1-9]|\(\?<?[=!]")  # word boundaries, references, lookarounds
_OPERATOR = re.compile(r"\\.|[\[&~]", re.DOTALL)  # operators in a class of Rust, not of JavaScript
_ESCAPED = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_LARK = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"} | {
    "/": r"\/", "\n": r"\n", "\r": r"\r",
}  # fmt: skip


def portable(pattern: str) -> str | None:
    """The pattern for llguidance; None: it is not a regular expression.

    llguidance 1.9 allows quotes and backslashes in a string of JSON wherever a class has all
    control characters, so no negated class has NUL.
    """
    pieces = []
    for piece in _PIECE.findall(pattern):
        if _NOT_REGULAR.fullmatch(piece):
            return None
        if piece[0] == "[" and len(piece) > 1:
            begin = 2 if piece[1] == "^" else 1
            inner = _OPERATOR.sub(lambda m: m[0] if m[0][0] == "\\" else f"\\{m[0]}", piece[begin:])
            piece = ("[^\\x00" if begin == 2 else "[") + inner
        pieces.append(piece)
    return "".join(pieces)


def whole(pattern: str) -> str | None:
    """A regular expression of Lark that matches a string as a whole where `pattern` is found in it;
    None: there is none, since an anchor is not at the end of an alternative."""
    regex = portable(pattern)
    branches = [] if regex is None else list(_branches(regex))
    made = []
    for pieces in branches:
        begin, end = pieces[:1] == ["^"], pieces[-1:] == ["$"]
        body = pieces[begin : len(pieces) - end]
        if "^" in body or "$" in body:
            return None
        text = _ESCAPED.sub(lambda m: _LARK.get(m[0], m[0]), "".join(body))
        made.append(f"{'' if begin else '(?s:.*)'}(?:{text}){'' if end else '(?s:.*)'}")
    return "|".join(made) or None


def _branches(regex: str) -> Iterator[list[str]]:
    """Yields each alternative of an expression, outside groups, as a list of its pieces."""
    pieces: list[str] = []
    depth = 0
    for piece in _PIECE.findall(regex):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            yield pieces
            pieces = []
        else:
            pieces.append(piece)
    yield pieces
