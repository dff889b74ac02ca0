"""A route that parses JSON bodies and checks their fields before FastAPI does, and the error for a
body that does not match its schema.
"""

import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from finwhale.chat.history import readable
from finwhale.chat.known_fields import MAX_NAMED, check_fields
from finwhale.server.errors import LENIENT_HINT, ApiError
from finwhale.server.protocols.known_fields import shape_of

logger = logging.getLogger(__name__)

_JSON_SUFFIX = re.compile(r"application/[^/]+\+json")  # RFC 6839
# Fields of OpenAI's protocols whose other values this server does not have.
_UNSUPPORTED: dict[str | int, str] = {
    "previous_response_id": "this server stores no responses; send the earlier items in `input`",
    "background": "this server answers each request at once; leave the field out",
    "truncation": 'this server never shortens a conversation; only "disabled" is supported',
    "modalities": 'the model writes only text; only ["text"] is supported',
}
_Path = tuple[str | int, ...]


class ParsedRequest(Request):
    """A request whose body has been parsed. The bytes are dropped."""

    def __init__(self, request: Request, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"parsed"  # FastAPI asks only whether there is a body

    async def json(self) -> Any:
        return self._value


class BodyRoute(APIRoute):
    """Parses bodies with `app.state.parser`.

    It refuses unknown fields at every depth; if `app.state.lenient` is true, it removes them.

    A body of another media type, or of none, gets status 415. A browser sends such a body for any
    web page without asking the server first (CORS), so it must not start any work.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation
        shape, protocol = shape_of(kind), getattr(kind, "protocol", None)

        async def parse_and_handle(request: Request) -> Response:
            body = await request.body()
            if body:
                _check_media_type(request)
                state = request.scope["state"]
                state["body_bytes"] = len(body)
                lenient = request.app.state.lenient

                def read(value: Any) -> tuple[Any, list[str]]:
                    left_out: list[str] = []
                    if protocol is not None and isinstance(value, dict):
                        value, left_out = readable(protocol, value)
                    return value, check_fields(shape, value, lenient=lenient, left_out=left_out)

                value, ignored = await request.app.state.parser.parse(body, read)
                del body
                if ignored:
                    note_ignored(state, ignored)
                request = ParsedRequest(request, value)
            return await handle(request)

        return parse_and_handle


def note_ignored(state: dict[str, Any], ignored: Sequence[str]) -> None:
    """Names what of a request is ignored in the log and, with all other, in the answer's header.
    `state`: the state of the request's scope."""
    found = [*state.get("ignored", ()), *ignored]
    state["ignored"] = found[:MAX_NAMED] + ["..."] * (len(found) > MAX_NAMED)
    extra = {"request_id": state["request_id"], "fields": state["ignored"]}
    logger.warning("ignored fields of a request", extra=extra)


def _check_media_type(request: Request) -> None:
    """Raises ApiError (415)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not _JSON_SUFFIX.fullmatch(kind):
        raise ApiError(415, "the body must be JSON: send the header content-type: application/json",
                       code="unsupported_media_type")  # fmt: skip


def validation_error(error: RequestValidationError) -> ApiError:
    """The error of the first wrong field, in one line.

    A field that may have several types has an error for each of them. The client probably meant the
    type whose error is deepest, or whose error is not that the value has another type.
    """
    errors = error.errors()
    loc, kind = errors[0]["loc"], errors[0]["type"]
    if kind == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    ranked: list[tuple[tuple[int, bool, int], _Path, str]] = []
    for one in errors:
        if one["loc"][:2] == loc[:2]:
            path = _path(one["loc"], one["type"], error.body)
            index = path[-1] if path and isinstance(path[-1], int) else 0
            rank = (len(path), not one["type"].endswith("_type"), index)
            ranked.append((rank, path, str(one["msg"])))
    best = max(rank for rank, _, _ in ranked)
    path = next(path for rank, path, _ in ranked if rank == best)
    where = ".".join(map(str, path))
    if kind == "extra_forbidden":
        message = f"unknown parameter: {where} ({LENIENT_HINT})"
        return ApiError(400, message, code="unknown_parameter", param=where)
    if path and path[0] in _UNSUPPORTED:
        message = f"{path[0]}: {_UNSUPPORTED[path[0]]}"
        return ApiError(400, message, code="unsupported_value", param=str(path[0]))
    reasons = dict.fromkeys(message for rank, _, message in ranked if rank == best)
    message = " or ".join(reasons).replace(" or Input should be ", " or ")
    message = f"{where}: {message}" if where else message
    return ApiError(400, message, code="invalid_value", param=where or None)


def _path(loc: _Path, kind: str, body: Any) -> _Path:
    """Where a body is wrong: pydantic's path, without the types that it has tried."""
    origin, *parts = loc
    if origin != "body":
        return tuple(parts)
    found: list[str | int] = []
    for part in parts:
        in_object = isinstance(body, Mapping) and part in body
        if in_object or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
        elif kind != "missing" or part is not parts[-1]:
            continue
        found.append(part)
    return tuple(found)
