"""What every request passes before the application: ASGI middleware, here from the outside inwards.

- `Reported` gives it an id, and reports it to the log, the metrics and the traces.
- `RefusalAnswers` answers with the error that the middleware inside raises.
- `Admitted` checks its host, its key and its user's share of requests.
- `Bounded` passes its body on, up to a limit.

`scope["state"]` holds what they know: request_id, user, key (None: none is needed), batch (whether
it is a request of a batch) and taken, an ExitStack of shares that are held until the answer has
been sent.
"""

import logging
import time
import uuid
from contextlib import ExitStack
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finwhale.chat.grammar_limits import GrammarError
from finwhale.server.api.page import PAGE_PATH
from finwhale.server.batch.upload import OVERHEAD_BYTES
from finwhale.server.config import ServerConfig
from finwhale.server.edge.bodies import Budget
from finwhale.server.edge.listening import HostCheck, user_of
from finwhale.server.edge.shares import Shares
from finwhale.server.errors import ApiError, error_response, is_anthropic, too_many_requests
from finwhale.server.keys import ApiKey
from finwhale.server.observe.logs import note_refusal, printable
from finwhale.server.sse import ClientGone
from finwhale.server.state import ServerState

logger = logging.getLogger("finwhale.server.requests")

STATIC_PATH = "/docs-files"
# Probes may use any host name for these paths.
_HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
# These paths need no key: health checks, the page and the API description, which hold no data.
_OPEN = _HEALTH | {"/", "/ping", "/openapi.json", "/docs"}
_FILES = (f"{STATIC_PATH}/", f"{PAGE_PATH}/")
# The server answers these paths even when it is too busy for others.
_ALWAYS = _HEALTH | {"/", "/ping", "/metrics", "/live"}
MAX_LOGGED_PATH = 200


def cors_options(config: ServerConfig) -> dict[str, Any]:
    """What web pages of other origins may send, and which headers of an answer they may read."""
    return {
        "allow_origins": list(config.cors_origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": ["x-request-id", "retry-after", "finwhale-ignored"],
    }


class _Layer:
    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state


class Reported(_Layer):
    """Marks a request and its answer with an id, and reports it when it has ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if scope["method"] == "HEAD" and path in _HEALTH:
            scope = {**scope, "method": "GET"}  # the HTTP server sends no body
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.monotonic(), 0

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

        try:
            await self._app(scope, receive, send_marked)
        finally:
            self._report(scope, status, begin)

    def _report(self, scope: Scope, status: int, begin: float) -> None:
        found, traces = scope["state"], self._state.traces
        endpoint = getattr(scope.get("route"), "path", "unknown")
        is_file = scope["path"].startswith(_FILES) and status < 400
        if not is_file:
            self._state.metrics.requests.labels(endpoint, str(status)).inc()
        log, key, refusal = found.get("log"), found.get("key"), found.get("refusal")
        fields = {} if log is None else log.fields()
        if traces is not None and endpoint not in _ALWAYS and not is_file:
            trace_id = traces.add(scope, status, begin, log)
            if trace_id is not None:
                fields["trace_id"] = trace_id
        if key is not None:
            fields["key"] = key.name
        if refusal is not None:
            fields |= refusal
            self._state.metrics.refused(refusal.get("code") or f"status_{status}")
        if status == 404:
            fields["path"] = printable(scope["path"], MAX_LOGGED_PATH)
        extra = {
            "request_id": found["request_id"],
            "method": scope["method"],
            "endpoint": endpoint,
            "status": status,
            "duration_s": round(time.monotonic() - begin, 4),
        }
        level = logging.DEBUG if is_file or endpoint in _ALWAYS else logging.INFO
        logger.log(level, "request", extra=extra | fields)


class RefusalAnswers(_Layer):
    """Answers with the error that is raised before an answer has begun.

    Web pages of the allowed origins may read the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def note_and_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except Exception as error:
            if begun:
                raise
            answer, config = self._answer(scope, error), self._state.config
            # The middleware would accept each OPTIONS request of an allowed origin.
            if config.cors_origins and scope["method"] != "OPTIONS":
                answer = CORSMiddleware(answer, **cors_options(config))
            await answer(scope, receive, send)

    def _answer(self, scope: Scope, error: Exception) -> ASGIApp:
        if isinstance(error, ClientGone):
            scope["state"]["client_gone"] = True
            return Response(status_code=499)  # only for the log: the client has gone
        if isinstance(error, GrammarError):
            self._state.metrics.grammar(error.reason)
        told = self._state.to_api_error(error)
        note_refusal(scope, told, self._state.config.log_prompts)
        return error_response(told, scope["path"])


class Admitted(_Layer):
    """Checks a request's host and key, and takes its part of its user's and its key's shares."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        super().__init__(app, state)
        self._hosts = HostCheck(state.config.allowed_hosts)
        size = state.config.max_concurrency
        self._requests = Shares("requests at once", lambda: size, error=too_many_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        found, path = scope["state"], scope["path"]
        with ExitStack() as taken:
            found["taken"] = taken
            found["batch"] = "user" in found  # as `runner.post` calls
            if not found["batch"]:
                found["key"] = key = self._find_key(scope, path)
                found["user"] = user_of(scope["client"][0]) if key is None else key.identity
                if path not in _ALWAYS:
                    taken.enter_context(self._requests.taken(found["user"]))
                    if key is not None:
                        taken.enter_context(key.request())
            await self._app(scope, receive, send)

    def _find_key(self, scope: Scope, path: str) -> ApiKey | None:
        """The request's key; None: it needs none."""
        given = Headers(scope=scope)
        if not self._hosts.allows(given.get("host", "")) and path not in _HEALTH:
            message = "the request's Host is not one of this server's: see --allowed-hosts"
            raise ApiError(400, message, code="host_not_allowed")
        preflight = scope["method"] == "OPTIONS" and self._state.config.cors_origins
        open_to_all = path in _OPEN or path.startswith(_FILES) or preflight
        if open_to_all or not self._state.keys:
            return None
        key = self._state.keys.find(_given_key(given))
        if key is None:
            message = "a valid API key is needed (Authorization: Bearer KEY, or x-api-key)"
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        return key


class Bounded(_Layer):
    """Passes a request's body on, until it has too many bytes or the server holds too many."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError."""
        state, config = self._state, self._state.config
        budget: Budget | None = state.budget
        max_bytes = state.max_body_bytes
        is_upload = (scope["method"], scope["path"]) == ("POST", "/v1/files")
        if is_upload and config.batch_dir is not None:
            # An upload goes to the disk as it arrives.
            max_bytes, budget = config.max_file_bytes + OVERHEAD_BYTES, None
        text = f"the body has more than {max_bytes} bytes"
        too_large = ApiError(413, text, code="body_too_large")
        if budget is not None and config.max_body_bytes is None:  # it follows from the context
            too_large = state.unless_loading(too_large)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > max_bytes:
            raise too_large
        user, seen = scope["state"]["user"], 0
        refused: ApiError | None = None  # the error for which the rest of the body is dropped

        def resize(num_bytes: int) -> None:
            nonlocal seen
            if budget is not None:
                budget.resize(seen, num_bytes, user)
            seen = num_bytes

        async def receive_bounded() -> Message:
            nonlocal refused
            message = await receive()
            if message["type"] == "http.request":
                num_bytes = seen + len(message.get("body", b""))
                try:
                    if num_bytes > max_bytes:
                        raise too_large
                    resize(num_bytes)
                except ApiError as error:
                    refused = error
                    raise
            return message

        async def send_unless_refused(message: Message) -> None:
            # The application sees an incomplete body, so drop its answer.
            if refused is None:
                await send(message)

        try:
            await self._app(scope, receive_bounded, send_unless_refused)
        finally:
            resize(0)  # a request's text lives as long as the request
        if refused is not None:
            raise refused


LAYERS = (Bounded, Admitted, RefusalAnswers, Reported)  # from the inside outwards


def _given_key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
