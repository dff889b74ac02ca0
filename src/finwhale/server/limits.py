"""Checks before the endpoints (API keys, body size, concurrency); request ids and log lines."""

import hashlib
import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finwhale.server.bodies import Budget
from finwhale.server.errors import ApiError, error_response
from finwhale.server.state import ServerState

logger = logging.getLogger("finwhale.server.requests")

# These paths need no key: health checks, and the page and the description, which hold no data.
_OPEN = frozenset({"/", "/health", "/health/live", "/health/ready", "/openapi.json", "/docs"})
STATIC_PATH = "/docs-files"
# The server answers these paths even when it is too busy for others.
_ALWAYS = frozenset({"/", "/health", "/health/live", "/health/ready", "/metrics", "/live"})


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [_digest(key) for key in state.config.api_keys]
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.monotonic(), 0
        body = _LimitedBody(receive, self._state.max_body_bytes, self._state.budget)

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        async def send_unless_refused(message: Message) -> None:
            if body.refused is None:
                await send_marked(message)
            elif message["type"] == "http.response.start":
                # The application sees an incomplete body, so replace its answer.
                await error_response(body.refused, path)(scope, receive, send_marked)

        self._in_flight += 1
        try:
            self._check(scope, path)
            await self._app(scope, body.receive, send_unless_refused)
        except ApiError as error:
            if status:
                raise
            await error_response(error, path)(scope, receive, send_marked)
        finally:
            self._in_flight -= 1
            body.release()
            self._report(scope, status, request_id, begin)

    def _check(self, scope: Scope, path: str) -> None:
        headers = Headers(scope=scope)
        config = self._state.config
        preflight = scope["method"] == "OPTIONS" and config.cors_origins
        open_to_all = path in _OPEN or path.startswith(f"{STATIC_PATH}/") or preflight
        if self._keys and not open_to_all and not self._has_key(headers):
            raise ApiError(
                401,
                "a valid API key is needed (Authorization: Bearer KEY, or x-api-key)",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        max_body_bytes = self._state.max_body_bytes
        if length.isdecimal() and int(length[:20]) > max_body_bytes:
            raise _too_large(max_body_bytes)
        if self._in_flight > config.max_concurrency and path not in _ALWAYS:
            raise ApiError(
                429,
                "too many requests at once; try again",
                code="too_many_requests",
                headers={"retry-after": str(config.retry_after_s)},
            )

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # Compare every key, each in constant time, so that the time reveals nothing.
        return sum(hmac.compare_digest(digest, key) for key in self._keys) > 0

    def _report(self, scope: Scope, status: int, request_id: str, begin: float) -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path", "unknown")
        self._state.metrics.answered(endpoint, status)
        log = scope["state"].get("log")
        fields = {} if log is None else log.fields()
        level = logging.DEBUG if endpoint in _ALWAYS else logging.INFO
        logger.log(
            level,
            "request",
            extra={
                "request_id": request_id,
                "method": scope["method"],
                "endpoint": endpoint,
                "status": status,
                "duration_s": round(time.monotonic() - begin, 4),
                **fields,
            },
        )


class _LimitedBody:
    """Passes a request's body on, until it has too many bytes or the server holds too many.

    Attributes:
        refused: why the rest of the body is not passed on; None: it is.
    """

    def __init__(self, receive: Receive, max_bytes: int, budget: Budget) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._budget = budget
        self._seen = 0
        self.refused: ApiError | None = None

    async def receive(self) -> Message:
        """Raises ApiError."""
        message = await self._receive()
        if message["type"] == "http.request":
            seen = self._seen + len(message.get("body", b""))
            try:
                if seen > self._max_bytes:
                    raise _too_large(self._max_bytes)
                self._budget.resize(self._seen, seen)
            except ApiError as error:
                self.refused = error
                self.release()
                raise
            self._seen = seen
        return message

    def release(self) -> None:
        """Counts the body no longer. A request's text lives as long as the request."""
        self._budget.resize(self._seen, 0)
        self._seen = 0


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes", code="body_too_large")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
