"""Checks before the endpoints (API keys, body size, concurrency); request ids and log lines."""

import logging
import time
import uuid
from contextlib import ExitStack
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finwhale.server.api.page import PAGE_PATH
from finwhale.server.batch.inside import InsideCall
from finwhale.server.batch.upload import OVERHEAD_BYTES
from finwhale.server.config import ServerConfig
from finwhale.server.edge.bodies import Budget
from finwhale.server.edge.listening import HostCheck, user_of
from finwhale.server.edge.shares import Shares
from finwhale.server.errors import ApiError, error_response, is_anthropic
from finwhale.server.keys import ApiKey
from finwhale.server.observe.logs import note_refusal, printable
from finwhale.server.state import ServerState

logger = logging.getLogger("finwhale.server.requests")

# These paths need no key: health checks, the page and the API description, which hold no data.
_OPEN = frozenset(
    {"/", "/health", "/ping", "/health/live", "/health/ready", "/openapi.json", "/docs"}
)
STATIC_PATH = "/docs-files"
# The server answers these paths even when it is too busy for others.
_ALWAYS = frozenset({"/", "/health", "/ping", "/health/live", "/health/ready", "/metrics", "/live"})


# Probes may use any host name for these paths.
_HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
_FILES = (f"{STATIC_PATH}/", f"{PAGE_PATH}/")
MAX_LOGGED_PATH = 200


def cors_options(config: ServerConfig) -> dict[str, Any]:
    """What web pages of other origins may send, and which headers of an answer they may read."""
    return {
        "allow_origins": list(config.cors_origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": ["x-request-id", "retry-after", "finwhale-ignored"],
    }


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._hosts = HostCheck(state.config.allowed_hosts)
        size = state.config.max_concurrency
        self._requests = Shares("requests at once", lambda: size, error=state.busy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if scope["method"] == "HEAD" and path in _HEALTH:
            scope = {**scope, "method": "GET"}  # the HTTP server sends no body
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.monotonic(), 0
        config = self._state.config
        max_body_bytes = self._state.max_body_bytes
        budget: Budget | None = self._state.budget
        if path == "/v1/files" and scope["method"] == "POST" and config.batch_dir is not None:
            # An upload goes to the disk as it arrives.
            max_body_bytes, budget = config.max_file_bytes + OVERHEAD_BYTES, None
        too_large = _too_large(max_body_bytes)
        if budget is not None and config.max_body_bytes is None:  # it follows from the context
            too_large = self._state.unless_loading(too_large)
        body = _LimitedBody(receive, max_body_bytes, too_large, budget)

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(path):
                    headers["request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
                if ignored := scope["state"].get("ignored"):
                    headers["finwhale-ignored"] = ",".join(ignored)
            await send(message)

        async def send_unless_refused(message: Message) -> None:
            if body.refused is None:
                await send_marked(message)
            elif message["type"] == "http.response.start":
                # The application sees an incomplete body, so replace its answer.
                await self._refuse(body.refused, scope, receive, send_marked)

        inside = "inside_call" in scope["state"]
        try:
            with ExitStack() as taken:
                scope["state"]["taken"] = taken
                key = self._check(scope, path, body)
                body.user = scope["state"]["user"]
                if not inside and path not in _ALWAYS:
                    taken.enter_context(self._requests.taken(body.user))
                    if key is not None:
                        taken.enter_context(key.request(config.retry_after_s))
                await self._app(scope, body.receive, send_unless_refused)
        except Exception as error:
            if status:
                raise
            await self._refuse(self._state.told(error), scope, receive, send_marked)
        finally:
            body.release()
            self._report(scope, status, request_id, begin)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with an error, which pages of the allowed origins may read."""
        config = self._state.config
        note_refusal(scope, error, config.log_prompts)
        answer: ASGIApp = error_response(error, scope["path"])
        # The middleware would accept each OPTIONS request of an allowed origin.
        if config.cors_origins and scope["method"] != "OPTIONS":
            answer = CORSMiddleware(answer, **cors_options(config))
        await answer(scope, receive, send)

    def _check(self, scope: Scope, path: str, body: "_LimitedBody") -> ApiKey | None:
        """Returns the request's key; None: it needs none. Raises ApiError."""
        call: InsideCall | None = scope["state"].get("inside_call")
        if call is not None:
            if call.key is not None:
                scope["state"]["key"] = call.key
            scope["state"]["user"] = call.user
            return call.key
        headers = Headers(scope=scope)
        config = self._state.config
        if not self._hosts.allows(headers.get("host", "")) and path not in _HEALTH:
            raise ApiError(
                400,
                "the request's Host is not one of this server's: see --allowed-hosts",
                code="host_not_allowed",
            )
        preflight = scope["method"] == "OPTIONS" and config.cors_origins
        open_to_all = path in _OPEN or path.startswith(_FILES) or preflight
        key = None
        if self._state.keys.required and not open_to_all:
            key = self._state.keys.find(_given_key(headers))
            if key is None:
                raise ApiError(
                    401,
                    "a valid API key is needed (Authorization: Bearer KEY, or x-api-key)",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            scope["state"]["key"] = key
        scope["state"]["user"] = user_of(scope["client"][0]) if key is None else key.identity
        length = headers.get("content-length", "")
        if length.isdecimal():
            body.check_size(int(length[:20]))
        return key

    def _report(self, scope: Scope, status: int, request_id: str, begin: float) -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path", "unknown")
        self._state.metrics.answered(endpoint, status)
        log = scope["state"].get("log")
        key = scope["state"].get("key")
        fields = {} if log is None else log.fields()
        traces = self._state.traces
        if traces is not None and endpoint not in _ALWAYS and not scope["path"].startswith(_FILES):
            trace_id = traces.add(scope, status, begin, log)
            if trace_id is not None:
                fields["trace_id"] = trace_id
        if key is not None:
            fields["key"] = key.name
        refusal = scope["state"].get("refusal")
        if refusal is not None:
            fields |= refusal
            self._state.metrics.refused(refusal.get("code") or f"status_{status}")
        if status == 404:
            fields["path"] = printable(scope["path"], MAX_LOGGED_PATH)
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

    Args:
        too_large: the error for a body of more bytes.
        budget: counts the bytes that the server holds; None: the server does not hold this body.

    Attributes:
        user: whose share of `budget` the body takes.
        refused: the error for which the rest of the body is dropped; None: there is none.
    """

    def __init__(
        self, receive: Receive, max_bytes: int, too_large: ApiError, budget: Budget | None
    ) -> None:
        self._receive = receive
        self._max_bytes, self._too_large = max_bytes, too_large
        self._budget = budget
        self._seen = 0
        self.user = ""
        self.refused: ApiError | None = None

    async def receive(self) -> Message:
        """Raises ApiError."""
        message = await self._receive()
        if message["type"] == "http.request":
            seen = self._seen + len(message.get("body", b""))
            try:
                self.check_size(seen)
                if self._budget is not None:
                    self._budget.resize(self._seen, seen, self.user)
            except ApiError as error:
                self.refused = error
                self.release()
                raise
            self._seen = seen
        return message

    def check_size(self, num_bytes: int) -> None:
        """Raises ApiError if a body of this size is too large."""
        if num_bytes > self._max_bytes:
            raise self._too_large

    def release(self) -> None:
        """Stops counting the body. A request's text lives as long as the request."""
        if self._budget is not None:
            self._budget.resize(self._seen, 0, self.user)
        self._seen = 0


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes", code="body_too_large")


def _given_key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
