"""Uploads of files: multipart bodies that go to the disk as they arrive."""

import asyncio
import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from finwhale.server.batch.store import Owner, StoredFile, new_id, no_space
from finwhale.server.errors import ApiError
from finwhale.server.sse import ClientGone

# Maximum size of a multipart body without the file.
OVERHEAD_BYTES = 64 << 10
_MAX_PARTS = 8
_MAX_HEADER_BYTES = 4096
_MAX_FIELD_BYTES = 1024
_MAX_BOUNDARY = 70  # RFC 2046


async def receive(request: Request, owner: Owner, max_bytes: int, max_lines: int) -> StoredFile:
    """Stores the file of a body, and describes it. Raises ApiError: the body is not such a form, or
    the file is too large; ClientGone: the client has disconnected."""
    file_id = new_id("file-")
    path = owner.content(file_id)
    try:
        with path.open("xb") as file:
            form = _Form(_boundary(request), file, max_bytes, max_lines)
            async for chunk in request.stream():
                # The parser is slow on hostile bytes: on a thread, it leaves the event loop turns.
                await asyncio.to_thread(form.parser.write, chunk)
            found = form.end(file_id)
            await asyncio.to_thread(os.fsync, file.fileno())
        owner.add(found)
    except BaseException as error:
        with contextlib.suppress(OSError):
            path.unlink()
        if isinstance(error, FormParserError):
            raise _wrong(f"the form is not valid: {error}") from error
        if isinstance(error, ClientDisconnect):
            raise ClientGone from error
        if isinstance(error, OSError):
            raise no_space(error) from error
        raise
    return found


class _Form:
    """A form that arrives in pieces: the field `purpose`, and the file.

    Attributes:
        parser: takes the pieces (`write`), and raises ApiError, FormParserError, OSError.
    """

    def __init__(self, boundary: bytes, file: Any, max_bytes: int, max_lines: int) -> None:
        self._file, self._max_bytes, self._max_lines = file, max_bytes, max_lines
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": partial(self._header_part, 0),
                "on_header_value": partial(self._header_part, 1),
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_end": self._complete,
            },
        )
        self._parts, self._lines, self._bytes = 0, 0, 0
        self._last = b""
        self._name = ""
        self._headers: dict[bytes, bytes] = {}
        self._header = [b"", b""]
        self._header_bytes = 0
        self._fields: dict[str, bytes] = {}
        self._filename: str | None = None
        self._ended = False

    def end(self, file_id: str) -> StoredFile:
        """The file's description. Raises ApiError."""
        if not self._ended:
            raise _wrong("the form is not complete")
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != "batch":
            raise _wrong(f"purpose must be batch, got {purpose[:40]!r}", "purpose")
        if self._filename is None or not self._bytes:
            raise _wrong("file must be a file that is not empty", "file")
        return StoredFile(file_id, self._bytes, self._filename, "batch")

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _wrong(f"the form has more than {_MAX_PARTS} parts")
        self._headers, self._header, self._header_bytes = {}, [b"", b""], 0

    def _header_part(self, which: int, data: bytes, start: int, end: int) -> None:
        """Adds to a header's name (0) or value (1)."""
        self._header_bytes += end - start
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise _wrong(f"the head of a part has more than {_MAX_HEADER_BYTES} bytes")
        self._header[which] += data[start:end]

    def _header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _headers_end(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or name not in ("file", "purpose"):
            raise ApiError(400, f"unknown parameter: {name[:100]}", code="unknown_parameter",
                           param=name[:100] or None)  # fmt: skip
        if name in self._fields:
            raise _wrong(f"{name} is given twice", name)
        self._name, self._fields[name] = name, b""
        if name == "file":
            given = options.get(b"filename", b"file.jsonl").decode("utf-8", "replace")
            base = Path(given.replace("\\", "/")).name[:256]
            self._filename = "".join(c for c in base if c.isprintable()) or "file.jsonl"

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = data[start:end]
        if self._name != "file":
            self._fields[self._name] += part
            if len(self._fields[self._name]) > _MAX_FIELD_BYTES:
                raise _wrong(f"{self._name} has more than {_MAX_FIELD_BYTES} bytes", self._name)
            return
        self._bytes += len(part)
        if self._bytes > self._max_bytes:
            raise ApiError(413, f"the file has more than {self._max_bytes} bytes",
                           code="file_too_large", param="file")  # fmt: skip
        self._lines += part.count(b"\n")
        self._last = part[-1:] or self._last
        if self._lines + (self._last != b"\n") > self._max_lines:
            raise ApiError(413, f"the file has more than {self._max_lines} lines",
                           code="too_many_lines", param="file")  # fmt: skip
        self._file.write(part)

    def _complete(self) -> None:
        self._ended = True


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise ApiError(415, "the body must be multipart/form-data with a boundary",
                       code="unsupported_media_type")  # fmt: skip
    return boundary


def _wrong(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
