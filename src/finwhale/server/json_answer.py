"""Writes JSON in small pieces, so that a large answer does not stop the event loop.

Python's JSON encoder holds Python's lock (GIL) until it has written a whole value, so a thread does
not help.
"""

import base64
import json
from collections.abc import AsyncGenerator, Iterator
from itertools import chain
from typing import Any

from starlette.responses import Response

from finwhale.server.sse import PIECE, Stream

ITEMS = 1 << 10  # numbers that are written at once
_NUMBERS = {int, float, bool, type(None)}
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_answer(value: Any) -> Response:
    """The response with a value (`json_pieces`). It streams unless it is a single piece."""
    pieces = json_pieces(value)
    first = next(pieces)
    if len(first) < PIECE:
        return Response(first, media_type="application/json")

    async def source() -> AsyncGenerator[bytes, None]:
        for piece in chain((first,), pieces):
            yield piece

    return Stream(source(), "application/json")


def json_pieces(value: Any, head: str = "", tail: str = "") -> Iterator[bytes]:
    """JSON between two texts, in pieces of PIECE characters or a few more; the last may have fewer.

    An iterator is an array whose items, which must be small, are made when they are written; bytes
    are a string in base64.
    """
    held, size = [head], 0
    for part in _parts(value):
        held.append(part)
        size += len(part)
        if size >= PIECE:
            yield "".join(held).encode()
            held, size = [], 0
    yield "".join([*held, tail]).encode()


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        mark = "{"
        for key, item in value.items():
            yield f"{mark}{_encode(key)}:"
            yield from _parts(item)
            mark = ","
        yield "}" if value else "{}"
    elif isinstance(value, list):
        mark = "["
        for begin in range(0, len(value), ITEMS):
            some = value[begin : begin + ITEMS]
            if _NUMBERS.issuperset(map(type, some)):
                yield mark + _encode(some)[1:-1]
                mark = ","
                continue
            for item in some:
                yield mark
                yield from _parts(item)
                mark = ","
        yield "]" if value else "[]"
    elif isinstance(value, Iterator):
        mark = "["
        for item in value:
            yield mark + _encode(item)
            mark = ","
        yield "[]" if mark == "[" else "]"
    elif isinstance(value, str | bytes):
        yield '"'
        step = PIECE // 4 * 3  # whole groups of base64
        for begin in range(0, len(value), step):
            text = value[begin : begin + step]
            if isinstance(text, bytes):
                yield base64.b64encode(text).decode()
            else:
                yield _encode(text)[1:-1]
        yield '"'
    else:
        yield _encode(value)
