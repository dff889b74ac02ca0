"""Writes JSON in small pieces, so that a large answer does not stop the event loop.

Python's JSON encoder holds Python's lock (GIL) until it has written a whole value, so a thread does
not help.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Iterator
from itertools import chain
from typing import Any

from starlette.responses import Response

from finwhale.server.sse import Stream

PIECE = 1 << 16  # characters of a piece, except that an item is not divided

ITEMS = 1 << 10  # numbers that are written at once
_NUMBERS = {int, float, bool, type(None)}
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_answer(value: Any, turn: asyncio.Lock) -> Response:
    """The response with a value (`json_pieces`). It streams unless it is a single piece."""
    pieces = json_pieces(value)
    first = next(pieces)
    if len(first) < PIECE:
        return Response(first, media_type="application/json")
    return Stream(in_turns(chain((first,), pieces), turn), "application/json")


async def in_turns(pieces: Iterator[bytes], turn: asyncio.Lock) -> AsyncGenerator[bytes, None]:
    """The pieces, of which only the last has fewer than PIECE bytes.

    After the first one, the event loop makes one piece for all who share `turn`, and then does its
    other work.
    """
    piece = next(pieces)
    yield piece
    while len(piece) >= PIECE:
        async with turn:
            await asyncio.sleep(0)
            piece = next(pieces, b"")
        yield piece


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
