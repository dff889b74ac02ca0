"""Health checks, and a separate port for them that a busy event loop cannot block."""

import asyncio
import logging
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, socket
from typing import Any

from finwhale.errors import FinwhaleError
from finwhale.server.observe.metrics import CONTENT_TYPE
from finwhale.server.protocols.schemas import Health
from finwhale.server.state import ServerState

logger = logging.getLogger(__name__)

READY_S = 3.0  # the server is not ready if the engine or the event loop is silent for longer
PULSE_S = 0.1
MAX_CONNECTIONS = 16
TIMEOUT_S = 5.0


def live(state: ServerState) -> Health:
    """Whether the process works: no part of it has died or hangs."""
    config = state.config
    failure = state.client.failure or _hanging(
        state, config.engine_timeout_s, config.step_timeout_s
    )
    return Health(status="dead" if failure else "alive", reason=failure)


def ready(state: ServerState) -> Health:
    """Whether clients should send requests: the model is loaded, and the server is not stopping."""
    reason = live(state).reason
    if reason is None and state.draining:
        reason = "the server is stopping"
    if reason is None and not state.client.alive:
        reason = "the model is loading"
    reason = reason or _hanging(state, READY_S)
    return Health(status="not ready" if reason else "ready", reason=reason)


def _hanging(state: ServerState, limit_s: float, step_limit_s: float = math.inf) -> str | None:
    """What has not run for longer than a limit; None: everything runs."""
    heartbeat = state.client.heartbeat
    if heartbeat is not None and state.client.ready is not None:
        if heartbeat.silent_s > limit_s:
            return f"the engine's process has not run for {heartbeat.silent_s:.0f} s"
        if heartbeat.step_s > step_limit_s:
            return f"a step has taken {heartbeat.step_s:.0f} s"
    if state.loop_silent_s > limit_s:
        return f"the event loop has been busy for {state.loop_silent_s:.0f} s"
    return None


async def pulse(state: ServerState) -> None:
    """Repeatedly records that the event loop runs, and how late."""
    while True:
        state.loop_seen = time.monotonic()
        await asyncio.sleep(PULSE_S)
        late_s = time.monotonic() - state.loop_seen - PULSE_S
        state.metrics.loop_delay.observe(max(0.0, late_s))


class HealthPort:
    """Serves /health, /health/live, /health/ready and /metrics on threads, without API keys."""

    def __init__(self, host: str, port: int) -> None:
        """Listens, but does not answer yet. Raises FinwhaleError: the server cannot listen on the
        address."""
        try:
            self._server = _Server((host, port))
        except OSError as error:
            raise FinwhaleError(
                f"cannot listen on {host} port {port}: {error.strerror or error}"
            ) from error
        self.port: int = self._server.server_address[1]

    def start(self, state: ServerState) -> None:
        """Answers until the process ends."""
        self._server.state = state
        threading.Thread(target=self._server.serve_forever, name="health-port", daemon=True).start()

    def close(self) -> None:
        """Ends the threads. Only after `start`."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    state: ServerState

    def __init__(self, address: tuple[str, int]) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        if ":" in address[0]:
            self.address_family = AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        logger.debug("a client of the health port has gone", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        state = self.server.state
        if self.path == "/metrics":
            self._answer(200, state.metrics.text(), CONTENT_TYPE)
        elif self.path == "/health/live":
            self._health(live(state))
        elif self.path in ("/health", "/health/ready"):
            self._health(ready(state))
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _health(self, health: Health) -> None:
        body = health.model_dump_json().encode()
        self._answer(503 if health.reason else 200, body, "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def version_string(self) -> str:
        return "finwhale"
