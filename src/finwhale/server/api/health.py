"""Health checks, and a separate port for them that a busy event loop cannot block."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from finwhale.server.config import ServerConfig
from finwhale.server.edge import listening
from finwhale.server.edge.connections import Connection, Connections
from finwhale.server.observe.metrics import CONTENT_TYPE
from finwhale.server.protocols.schemas import Health
from finwhale.server.state import ServerState

READY_S = 3.0  # the server is not ready if the engine or the event loop is silent for longer
PULSE_S = 0.1
MAX_CONNECTIONS = 16


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


def health_response(found: Health) -> Response:
    return JSONResponse(found.model_dump(), 503 if found.reason else 200)


class HealthPort:
    """Serves health checks and /metrics without API keys, on an event loop of its own."""

    def __init__(self, config: ServerConfig, port: int) -> None:
        """Listens, but does not answer yet. Raises FinwhaleError: it cannot listen there."""
        self._listener = listening.listen(replace(config, uds=None, port=port))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()

    def start(self, state: ServerState) -> None:
        """Answers until `close`."""
        answers: dict[str, Callable[[], Response]] = {
            "/health": lambda: health_response(ready(state)),
            "/health/ready": lambda: health_response(ready(state)),
            "/health/live": lambda: health_response(live(state)),
            "/metrics": lambda: Response(state.metrics.text(), media_type=CONTENT_TYPE),
        }

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            answer = answers.get(scope["path"], lambda: Response(status_code=404))
            await answer()(scope, receive, send)

        connect = partial(
            Connection,
            Connections(replace(state.config, max_connections=MAX_CONNECTIONS)),
            config=uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"),
            server_state=uvicorn.server.ServerState(),
            app_state={},
        )

        def run() -> None:
            server = self._loop.create_server(connect, sock=self._listener)
            self._loop.run_until_complete(server)
            self._loop.run_forever()

        threading.Thread(target=run, name="health-port", daemon=True).start()

    def close(self) -> None:
        """Ends the thread. Only after `start`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._listener.close()
