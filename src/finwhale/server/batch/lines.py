"""The input of a batch: reads its lines and checks them.

A line is {"custom_id": ..., "method": "POST", "url": ..., "body": {...}}. A file is read line by
line, so that its size costs no memory. A digest identifies each line: a result names it, so that a
stopped batch can find the lines that have a result.
"""

import hashlib
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finwhale.server.edge.bodies import parse_body
from finwhale.server.errors import ApiError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_CUSTOM_ID = 512
# Maximum size of a line without the body of its request.
ENVELOPE_BYTES = 16 << 10
_FIELDS = {"custom_id", "method", "url", "body"}
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line as it stands in the file.

    Attributes:
        number: its number; the first line has 1.
        text: its bytes without the line break; None: it has too many bytes.
        digest: a hash of the whole line, blank lines have 0.
    """

    number: int
    text: bytes | None
    digest: int

    @property
    def blank(self) -> bool:
        return self.digest == 0


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One parsed line.

    Attributes:
        custom_id: its name; None: it has no valid one.
        error: (code, message) of the line's first mistake; None: it has none.
    """

    custom_id: str | None = None
    url: str = ""
    body: Any = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """The lines of a whole file, counted and compared.

    Attributes:
        digests: the digest of each line; that of line n is at n - 1.
        num_lines: number of lines that are not blank.
        duplicate: the numbers of two lines with the same custom_id; None: there are none.
    """

    digests: "array[int]"
    num_lines: int
    duplicate: tuple[int, int] | None


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[RawLine, int]]:
    """The lines of a file, each with its size in the file. `max_bytes`: maximum size of a line
    whose text is wanted."""
    with path.open("rb") as file:
        number = 0
        while part := file.readline(_CHUNK):
            number += 1
            size, parts, digest = 0, [], hashlib.blake2b(digest_size=8)
            while True:
                size += len(part)
                ended = part.endswith(b"\n")
                part = part.rstrip(b"\r\n") if ended else part
                digest.update(part)
                if size <= max_bytes + 1:
                    parts.append(part)
                if ended or not (part := file.readline(_CHUNK)):
                    break
            text = b"".join(parts) if size <= max_bytes + 1 else None
            blank = text is not None and not text.strip()
            yield RawLine(number, text, 0 if blank else int.from_bytes(digest.digest())), size


def scan(path: Path, max_bytes: int, max_items: int, *, shares_cpu: bool) -> Scan:
    """Reads a whole file. This takes 33 bytes of memory for each line. `shares_cpu`: pause as long
    as the work takes, because other threads serve requests."""
    digests, num_lines = array("Q"), 0
    names, numbers = bytearray(), array("Q")
    began, since = time.monotonic(), 0
    for raw, size in read_lines(path, max_bytes):
        digests.append(raw.digest)
        if raw.blank:
            continue
        num_lines += 1
        custom_id = read_line(raw, None, max_items).custom_id
        if custom_id is not None:
            names += hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
            numbers.append(raw.number)
        since += size
        if shares_cpu and since > _CHUNK:
            time.sleep(time.monotonic() - began)
            began, since = time.monotonic(), 0
    return Scan(digests, num_lines, _duplicate(names, numbers))


def _duplicate(names: bytearray, numbers: "array[int]") -> tuple[int, int] | None:
    """The first line that repeats a name, after the earlier line with that name."""
    found = np.frombuffer(names, "S16")
    order = np.argsort(found, kind="stable")
    same = np.flatnonzero(found[order[1:]] == found[order[:-1]])
    if not len(same):
        return None
    first = min(same, key=lambda i: int(order[i + 1]))
    return numbers[order[first]], numbers[order[first + 1]]


def read_line(raw: RawLine, url: str | None, max_items: int) -> BatchLine:
    """Reads a line; `BatchLine.error` names a mistake.

    Args:
        url: the only endpoint that it may name; None: any of URLS.
        max_items: as for `bodies.parse_body`.
    """
    if raw.text is None:
        return BatchLine(error=("line_too_long", "the line has too many bytes for a request"))
    try:
        return check_line(parse_body(raw.text, max_items), url)
    except ApiError as error:
        message = error.message.replace("the body", "the line", 1)
        return BatchLine(error=(error.code or "invalid_line", message))


def check_line(value: Any, url: str | None) -> BatchLine:
    """Checks the parsed value of a line."""
    if not isinstance(value, dict):
        return BatchLine(error=("invalid_line", "a line must be a JSON object"))
    name = value.get("custom_id")
    custom_id = name if isinstance(name, str) and 0 < len(name) <= MAX_CUSTOM_ID else None

    def wrong(code: str, message: str) -> BatchLine:
        return BatchLine(custom_id, error=(code, message))

    if custom_id is None:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters"
        return wrong("invalid_custom_id", message)
    unknown = sorted(value.keys() - _FIELDS)
    if unknown:
        return wrong("unknown_parameter", f"unknown field of a line: {unknown[0][:100]}")
    if value.get("method") != "POST":
        return wrong("invalid_method", "method must be POST")
    urls = URLS if url is None else (url,)
    given = value.get("url")
    if not isinstance(given, str) or given not in urls:
        return wrong("invalid_url", f"url must be {' or '.join(urls)}")
    body = value.get("body")
    if not isinstance(body, dict):
        return wrong("invalid_body", "body must be a JSON object")
    if body.get("stream"):
        return wrong("stream_not_supported", "a request of a batch cannot stream")
    return BatchLine(custom_id, given, body)
