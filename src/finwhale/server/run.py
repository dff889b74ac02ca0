"""Runs a server: the engine's process, the socket, signals and draining."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from finwhale.chat.dialect import Dialect
from finwhale.chat.tokenizer import Tokenizer
from finwhale.collection import freeze_heap
from finwhale.engine.start.start_times import table
from finwhale.errors import EngineDeadError, FinwhaleError
from finwhale.extras import import_extra
from finwhale.server.api import health
from finwhale.server.api.app import create_app
from finwhale.server.banner import banner
from finwhale.server.batch.batches import Batches
from finwhale.server.batch.store import Store
from finwhale.server.config import ServerConfig
from finwhale.server.edge import listening
from finwhale.server.edge.connections import Connection, Connections
from finwhale.server.grammars.check import GrammarChecker
from finwhale.server.link.client import EngineClient
from finwhale.server.observe import logs
from finwhale.server.state import ServerState

if TYPE_CHECKING:
    from finwhale.server.observe.tracing import Traces

logger = logging.getLogger(__name__)

# After the engine's death, the server answers health checks for this long before it ends.
DEATH_NOTICE_S = 2.0
ERRORS_S = 2  # time for the error answers to requests that the end of draining cuts off


def serve(
    config: ServerConfig,
    tokenizer: Tokenizer | None,
    dialect: Dialect,
    load: Callable[..., object],
    defaults: Mapping[str, Any],
    read_keys: Callable[[], tuple[str, ...]],
) -> int:
    """Serves until a signal. Returns the exit code: 0, or 1 if the engine died or requests were cut
    off.

    Args:
        dialect: the checkpoint's chat format.
        load: opens the engine in another process (EngineClient.spawn).
        defaults: sampling parameters of requests that leave them out.
        read_keys: reads the lines of the API keys again, on SIGHUP.

    Raises:
        FinwhaleError: the server cannot listen on the address, or the model does not load.
    """
    tls = listening.tls_context(config)
    traces = open_traces(config)
    connections = Connections(config)
    listener = listening.listen(config)
    store = None if config.batch_dir is None else Store(config.batch_dir)
    number = config.health_port
    port = None if number is None else health.HealthPort(config, number)
    client = EngineClient.spawn(load)
    if tokenizer is not None:
        # Build these while the engine loads, so that the first request does not wait for them.
        _ = tokenizer.guidance, tokenizer.recipe
    state = ServerState(config, client, tokenizer, dialect, defaults)
    if defaults:
        logger.info("sampling defaults by generation_config.json", extra=dict(defaults))
    state.traces = traces
    if port is not None:
        port.start(state)
        logger.info("health port", extra={"port": port.port})
    server = Server(state, connections, store=store, tls=tls)
    try:
        return asyncio.run(_serve(state, server, listener, read_keys))
    finally:
        if port is not None:
            port.close()
        if store is not None:
            store.close()
        listening.close(listener, config)
        if traces is not None:
            traces.close()


def open_traces(config: ServerConfig) -> "Traces | None":
    """Where the server sends traces; None: nowhere. Raises FinwhaleError: the extra `trace` is
    missing, or a setting of OpenTelemetry is wrong."""
    if config.otlp_traces_endpoint is None:
        return None
    tracing = import_extra("finwhale.server.observe.tracing")
    try:
        traces: Traces = tracing.Traces(config.otlp_traces_endpoint)
    except ValueError as error:
        raise FinwhaleError(f"a setting of OpenTelemetry is wrong: {error}") from error
    return traces


async def _serve(
    state: ServerState,
    server: "Server",
    listener: socket.socket,
    read_keys: Callable[[], tuple[str, ...]],
) -> int:
    client, config = state.client, state.config
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        if state.draining:
            server.force_exit = True
            stop_now.set()
        state.draining = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_stop)
    loop.add_signal_handler(signal.SIGHUP, reload, state, server.tls, read_keys)
    died = asyncio.Event()
    client.on_failure = died.set
    serving = loop.create_task(server.serve(sockets=[listener]))
    pulse = loop.create_task(health.pulse(state))
    try:
        await state.grammars.start()
        starting = loop.create_task(client.start())
        await _first(starting, stop.wait(), serving)
        if starting.done():
            starting.result()  # raises if the model does not load
            _report_start(state, server, listener)
            await _first(stop.wait(), died.wait(), serving)
            if died.is_set():
                await asyncio.sleep(DEATH_NOTICE_S)
            elif config.drain_delay_s and not serving.done():
                logger.info("not ready", extra={"drain_delay_s": config.drain_delay_s})
                waits = stop_now.wait(), died.wait(), serving
                await _first(*waits, timeout=config.drain_delay_s)
        else:
            starting.cancel()
        logger.info("stopping", extra={"in_flight": client.num_sequences})
        if server.batches is not None:
            await server.batches.close()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=config.drain_timeout_s)
        cut = client.cut_off() > 0 or server.force_exit
        await serving
    except EngineDeadError as error:
        raise FinwhaleError(str(error)) from error
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(Exception):
            await serving
        pulse.cancel()
        await end_processes(client, state.grammars, stop_now)
    return int(client.failure is not None or cut)


def _report_start(state: ServerState, server: "Server", listener: socket.socket) -> None:
    """Begins the batches of a loaded model, and reports that it is ready."""
    # Without this, a full garbage collection stops all streams for tenths of a second.
    freeze_heap()
    if server.batches is not None:
        server.batches.start()
    phases = {name: round(spent, 2) for name, spent in state.ready.phases.items()}
    logger.info("started", extra={"phases": table(phases)})
    url, config = listening.url_of(listener, state.config), state.config
    logger.info("ready", extra={"url": url, "model": state.model_name})
    if logs.is_text(config.log_format):
        text = banner(state.ready, state.model_name, url, bool(config.api_keys))
        print(text, file=sys.stderr, flush=True)


async def _first(
    *awaited: Coroutine[Any, Any, object] | asyncio.Future[Any], timeout: float | None = None
) -> None:
    """Waits for the first of several, and ends the coroutines among them."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task, one in zip(tasks, awaited, strict=True):
        if task is not one:
            task.cancel()


async def end_processes(
    client: EngineClient, grammars: GrammarChecker, stop_now: asyncio.Event
) -> None:
    """Ends the engine's process and the one that tries grammars. `stop_now`: when it is set, kill
    both instead of waiting for them."""
    closing = asyncio.gather(client.close(), grammars.close())
    await _first(closing, stop_now.wait())
    if stop_now.is_set():
        client.kill()
        grammars.kill()
    await closing


def reload(
    state: ServerState, tls: ssl.SSLContext | None, read: Callable[[], tuple[str, ...]]
) -> None:
    """Reads the API keys and the certificate again; if one is wrong, it stays as it was."""
    keys = state.keys
    try:
        if tls is not None:
            listening.load_certificate(tls, state.config)
    except FinwhaleError as error:
        logger.error("the certificate stays as it was", extra={"reason": str(error)})
    try:
        lines = read()
        if keys and not lines:
            raise FinwhaleError("there is no API key left")
        keys.replace(lines)
    except FinwhaleError as error:
        logger.error("the API keys stay as they were", extra={"reason": str(error)})
    else:
        logger.info("read the API keys", extra={"keys": len(keys)})


class Server(uvicorn.Server):
    """uvicorn without its handling of signals."""

    def __init__(
        self,
        state: ServerState,
        connections: Connections | None = None,
        *,
        store: Store | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tls = tls
        self.connections = connections or Connections(state.config)
        self.connections.on_refusal = state.metrics.refused
        app = create_app(state, store)
        self.batches: Batches | None = app.state.batches
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=partial(Connection, self.connections),  # type: ignore[arg-type]
            ws="none",
            # The event loop tries to accept this many connections in a row, even if no file
            # descriptor is left, and complains each time. `startup` sets the real backlog.
            backlog=1,
            timeout_keep_alive=state.config.idle_timeout_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=int(state.config.drain_timeout_s) + ERRORS_S,
            h11_max_incomplete_event_size=64 << 10,
            server_header=False,
            # By default, uvicorn would believe every client on a loopback address.
            proxy_headers=bool(state.config.trusted_proxies),
            forwarded_allow_ips=list(state.config.trusted_proxies),
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(listening.BACKLOG)
        asyncio.get_running_loop().set_exception_handler(self.connections.handle)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
