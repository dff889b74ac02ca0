"""A route that parses JSON bodies and checks their fields before FastAPI does."""

import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from finwhale.chat.history import readable
from finwhale.chat.known_fields import MAX_NAMED, check_fields
from finwhale.server.errors import ApiError
from finwhale.server.protocols.known_fields import shape_of

logger = logging.getLogger(__name__)

_JSON_SUFFIX = re.compile(r"application/[^/]+\+json")  # RFC 6839


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
