"""Reads request bodies within bounds, so that no body can stop the event loop or fill the memory.

Python's JSON parser and pydantic hold Python's lock (GIL) while they work, so a thread does not
help: other requests wait for them all the same. The cost is therefore bounded before it arises, by
the size of a body and by its number of arrays, objects and members. Large bodies are parsed one at
a time, with a pause after each in which other requests proceed.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from finwhale.chat.client_schemas import is_nested_deeper
from finwhale.chat.grammar_limits import MAX_NESTING
from finwhale.server.edge.shares import Shares
from finwhale.server.errors import ApiError

# The default limit of a body's size depends on the context: an id in JSON takes up to 9 bytes, and
# a token of text rarely more than 16, escapes included. The constant leaves room for tools, schemas
# and a grammar (1 MiB), whatever the context.
BASE_BYTES = 4 << 20
BYTES_PER_TOKEN = 16
# The server always accepts a body up to this size, and parses and encodes it without waiting.
SMALL_BYTES = 64 << 10
# The most expensive JSON value is a list: parsing this many holds the GIL for 50 ms.
MAX_STRUCTURES = 1 << 17
MAX_FIELDS = 256  # pydantic makes an error of each unknown field
T = TypeVar("T")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def max_body_bytes(max_model_len: int) -> int:
    """The size limit of a body for a context of `max_model_len` tokens."""
    return BASE_BYTES + BYTES_PER_TOKEN * max_model_len


def max_items(max_model_len: int) -> int:
    """The number of items that a body may have, so that a prompt of token ids fits."""
    return MAX_STRUCTURES + 2 * max_model_len


class TooManyItems(ApiError):
    """A body has more items than a prompt of this context needs."""


class Budget(Shares):
    """The bytes of all bodies that the server holds now.

    The first SMALL_BYTES of a body do not count, so large bodies cannot keep out small ones.
    """

    def __init__(self, max_bytes: int, largest: Callable[[], int]) -> None:
        """`largest`: the size of the largest body; on an idle server, it fits."""
        error = partial(ApiError, 503, code="overloaded")
        super().__init__("bytes of large requests", lambda: max_bytes, largest, error)

    def resize(self, before: int, after: int, user: str = "") -> None:
        """Counts a body that grows from `before` to `after` bytes, or is dropped (`after` = 0).
        Raises ApiError (503): there is no room; the body still counts as `before` bytes."""
        more = max(0, after - SMALL_BYTES) - max(0, before - SMALL_BYTES)
        if more > 0:
            self.check(user, more)
        self.add(user, more)


class BodyParser:
    """Parses bodies on one event loop."""

    def __init__(self, max_items: Callable[[], int]) -> None:
        """`max_items`: the number of commas that a body may have."""
        self._max_items = max_items
        self._free = asyncio.Semaphore(1)
        # One thread, because the memory allocator keeps memory for each thread.
        self._thread = ThreadPoolExecutor(1, "parser")

    async def parse(self, body: bytes, read: Callable[[Any], T] = lambda value: value) -> T:
        """What `read` makes of a body's JSON value. For a large body, it runs in a thread, too.
        Raises ApiError (400): it is not JSON in UTF-8, has a lone surrogate, or has too many or too
        deep structures."""
        return await self.run(len(body), lambda: read(parse_body(body, self._max_items())))

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Works on a body of this size: on large ones in a thread, one at a time, with pauses."""
        if num_bytes <= SMALL_BYTES:
            return work()
        async with self._free:
            begin = time.monotonic()
            value = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            # Between large bodies, other requests get at least as much time as a body took.
            await asyncio.sleep(time.monotonic() - begin)
        return value


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_NESTING} levels", code="too_deep")


def count_outside_strings(text: bytes, marks: bytes, enough: int) -> int:
    """The number of certain ASCII characters outside the strings of JSON text.

    The strings are searched too if there are at most `enough` of the characters in the whole text.
    After the first syntax error the number means nothing, but a parser stops there.
    """
    found = sum(map(text.count, marks))
    if found <= enough:
        return found
    # numpy works without the GIL.
    chars = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(chars == ord('"'))
    if b"\\" in text:
        # A quote that follows an odd number of backslashes does not end its string.
        indices = np.arange(len(chars), dtype=np.int32)
        others = np.maximum.accumulate(np.where(chars == ord("\\"), -1, indices))
        slashes = np.where(quotes > 0, quotes - 1 - others[quotes - 1], 0)
        quotes = quotes[slashes % 2 == 0]
    toggles = np.zeros(len(chars), np.bool_)
    toggles[quotes] = True
    in_string = np.logical_xor.accumulate(toggles)
    return sum(int(np.count_nonzero((chars == mark) & ~in_string)) for mark in marks)


def parse_body(body: bytes, max_items: int) -> Any:
    """The JSON value of a body, at once. Raises ApiError, as `BodyParser.parse` does."""
    for marks, what, allowed, kind in (
        (b"[{:", "arrays, objects and members", MAX_STRUCTURES, ApiError),
        (b",", "items", max_items, TooManyItems),
    ):
        found = count_outside_strings(body, marks, allowed)
        if found > allowed:
            message = f"the body has {found} {what}; this server allows {allowed}"
            raise kind(400, message, code="too_complex")
    try:
        # Bytes would be decoded as UTF-16 or UTF-32 if they look like it; JSON is UTF-8.
        value = json.loads(body.decode())
    except ValueError as error:
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        message = f"the body has {len(value)} fields; no request has more than {MAX_FIELDS}"
        raise ApiError(400, message, code="too_complex")
    if is_nested_deeper(value):
        raise _too_deep()
    if _SURROGATE.search(body):
        _check_unicode(value)
    return value


def _check_unicode(value: object) -> None:
    """Raises ApiError if a string of parsed JSON has half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = ord(error.object[error.start])
        message = f"the body has a lone surrogate (\\u{surrogate:04x}), which is not Unicode text"
        raise ApiError(400, message, code="invalid_unicode") from error
