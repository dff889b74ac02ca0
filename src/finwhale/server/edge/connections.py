"""The server's connections: time limits for slow clients, and a limit on the number of connections.

A connection waits for the client (for a request's head, its body, or the next request) or the
client waits for the server. While it waits for the client it has a deadline, and it may be closed
to make room for another: the connection that has waited longest goes first. So clients that open
connections and send nothing cannot keep out others, health checks among them. Each address has a
share of the connections, so that one that keeps its connections busy cannot keep out others either.

uvicorn documents no interface for these limits: `timeout_keep_alive` covers idle connections alone,
and `limit_concurrency` refuses requests when their heads have come. So `Connection` extends its
protocol class; tests/unit/test_uvicorn_interface.py names each attribute that it uses.
"""

import asyncio
import errno
import json
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from itertools import islice
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from finwhale.errors import FinwhaleError, QueueFullError
from finwhale.platform import max_files
from finwhale.server.config import UNIX, ServerConfig
from finwhale.server.edge.listening import plain_address, user_of
from finwhale.server.edge.shares import Shares

logger = logging.getLogger(__name__)

# The time limit for a body grows by a second for each this many bytes: a slow line is no attack.
MIN_BYTES_PER_S = 64 << 10
# Descriptors kept for files, the engine, the process that tries grammars, and the health port.
RESERVED_FILES = 128
MIN_CONNECTIONS = 32  # the server does not start if it has room for fewer
# If no descriptor is left, this many waiting connections are closed at once.
MADE_ROOM = 16
REPEAT_S = 60.0  # the log gets the same message once in this time

Phase = Literal["idle", "head", "body", "busy"]
ConnectionRefusal = Literal["slow_client", "too_many_connections"]


class RepeatedMessages:
    """Lets each message pass once in REPEAT_S, so that no client can fill the log."""

    def __init__(self) -> None:
        self._passed: dict[str, tuple[float, int]] = {}

    def left_out(self, message: str) -> int | None:
        """How often a message was left out since it passed; None: leave it out, too."""
        now = time.monotonic()
        before, count = self._passed.get(message, (-REPEAT_S, 0))
        passes = now - before >= REPEAT_S
        self._passed[message] = (now, 0) if passes else (before, count + 1)
        return count if passes else None


class Connections:
    """The state that all connections of one server share.

    Attributes:
        max_connections: number of connections; one more is refused, or replaces a waiting one.
        shares: the connections of each address, as the user who is there.
        waiting: the connections that wait for their clients, the longest wait first.
        on_refusal: receives the reason for each connection that the server refuses.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises FinwhaleError: this process may open too few files."""
        self.config = config
        limit = max_files(1 << 16)
        least = RESERVED_FILES + min(MIN_CONNECTIONS, config.max_connections)
        if limit < least:
            raise FinwhaleError(
                f"this process may open {limit} files, and the server needs {least}: raise the "
                "hard limit (ulimit -n, LimitNOFILE of systemd, --ulimit nofile of docker)"
            )
        self.max_connections = min(config.max_connections, limit - RESERVED_FILES)
        self.shares = Shares("connections", lambda: self.max_connections)
        self.waiting: dict[Connection, None] = {}
        self.on_refusal: Callable[[ConnectionRefusal], None] = lambda reason: None
        self._repeated = RepeatedMessages()

    def has_room(self, user: str) -> bool:
        """Whether a user may have one more connection, maybe instead of one that waits: of the same
        user, unless the server is full."""
        try:
            self.shares.check(user)
            return True
        except QueueFullError:
            self.log("too many connections: the one that waits longest is closed")
            full = self.shares.total >= self.max_connections
            return self.make_room(1, None if full else user)

    def make_room(self, count: int, user: str | None = None) -> bool:
        """Closes up to `count` waiting connections, of `user` or of all; returns whether it did."""
        oldest = list(islice((c for c in self.waiting if user in (None, c.user)), count))
        for connection in oldest:
            connection.refuse(503, "there are too many connections; try again")
        return bool(oldest)

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's handler of exceptions."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            # The loop tries again after a second.
            self.log("no file descriptor is left for a new connection")
            self.make_room(MADE_ROOM)
        else:
            loop.default_exception_handler(context)

    def log(self, message: str) -> None:
        """Logs a warning, unless it came a moment ago. The next one says how many were left out."""
        if (omitted := self._repeated.left_out(message)) is not None:
            logger.warning(message, extra={"omitted": omitted})


class Connection(H11Protocol):
    """One connection; the arguments besides `shared` are uvicorn's."""

    def __init__(self, shared: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.user = ""
        self._shared = shared
        self._phase: Phase = "idle"
        self._since = 0.0
        self._phase_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # uvicorn calls the following methods.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host, port = self.client or (UNIX, 0)
        self.client = (host if host == UNIX else plain_address(host), port)
        self.user = user_of(host)
        has_room = self._shared.has_room(self.user)
        self._shared.shares.add(self.user)
        if has_room:
            self._enter("idle")
        else:
            self.refuse(503, "there are too many connections; try again")

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._cancel_stalled()
        self._shared.shares.add(self.user, -1)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._phase_bytes += len(data)
        self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_stalled()
        self._stalled = self.loop.call_later(self._shared.config.idle_timeout_s, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stalled()

    # uvicorn does not know the following methods.

    def refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an answer unless one has begun."""
        self._leave()
        if self.transport.is_closing():
            return
        self._shared.on_refusal("slow_client" if status == 408 else "too_many_connections")
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps({"error": {"message": message, "type": "server_error"}})
            reason = HTTPStatus(status).phrase
            head = (
                f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
            )
            self.transport.write((head + body).encode())
        self.transport.close()

    def _update(self) -> None:
        """Finds the phase after something has happened."""
        if self.transport.is_closing():
            self._leave()
        elif self.conn.their_state is h11.SEND_BODY:
            self._enter("body")
        elif self.conn.their_state is not h11.IDLE or self.conn.our_state is not h11.IDLE:
            self._enter("busy")
        else:
            self._enter("head" if self.conn.trailing_data[0] else "idle")

    def _enter(self, phase: Phase) -> None:
        if phase == self._phase and self._timer is not None:
            return
        self._leave()
        self._phase, self._phase_bytes = phase, 0
        if phase != "busy":
            self._since = time.monotonic()
            self._shared.waiting[self] = None
            self._timer = self.loop.call_later(self._time_limit(), self._check)

    def _leave(self) -> None:
        self._shared.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_limit(self) -> float:
        config = self._shared.config
        if self._phase == "idle" and self.cycle is not None:
            return config.idle_timeout_s
        if self._phase == "body":
            return config.body_timeout_s + self._phase_bytes / MIN_BYTES_PER_S
        return config.header_timeout_s

    def _check(self) -> None:
        left = self._since + self._time_limit() - time.monotonic()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check)
        elif self._phase == "idle":
            self._leave()
            self.transport.close()
        else:
            self._shared.log(f"a client is too slow: its {self._phase} did not arrive in time")
            self.refuse(408, f"the request's {self._phase} did not arrive in time")

    def _abort(self) -> None:
        self._shared.log("a client does not read its answer: its connection is closed")
        self.transport.abort()

    def _cancel_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
