"""Runs a server: the engine's process, the socket, signals and draining."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from finwhale.chat.effort import EffortLadder
from finwhale.chat.tokenizer import Tokenizer
from finwhale.engine.rank.start_times import freeze_heap, table
from finwhale.errors import EngineDeadError, FinwhaleError
from finwhale.server.app import create_app
from finwhale.server.client import EngineClient
from finwhale.server.config import ServerConfig
from finwhale.server.state import ServerState

logger = logging.getLogger(__name__)

# After the engine's death, the server answers health checks for this long before it ends.
DEATH_NOTICE_S = 2.0


def serve(
    config: ServerConfig,
    tokenizer: Tokenizer | None,
    ladder: EffortLadder,
    load: Callable[[], object],
) -> int:
    """Serves until a signal. Returns the exit code: 0, or 1 if the engine died or requests were cut
    off.

    Args:
        ladder: the checkpoint's levels of reasoning effort.
        load: opens the engine in another process; it must be picklable.

    Raises:
        FinwhaleError: the server cannot listen on the address, or the model does not load.
    """
    listener = listen(config)
    client = EngineClient.spawn(load)
    if tokenizer is not None:
        # Build these while the engine loads, so that the first request does not wait for them.
        _ = tokenizer.guidance, tokenizer.recipe
    return asyncio.run(_serve(ServerState(config, client, tokenizer, ladder), listener))


async def _serve(state: ServerState, listener: socket.socket) -> int:
    client = state.client
    server = Server(state)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked_to_stop() -> None:
        if state.draining:
            server.force_exit = True
        state.draining = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked_to_stop)
    died = asyncio.Event()
    client.on_failure = died.set
    serving = loop.create_task(server.serve(sockets=[listener]))
    try:
        await state.grammars.start()
        starting = loop.create_task(client.start())
        stopping = loop.create_task(stop.wait())
        await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # raises if the model does not load
            host, port = listener.getsockname()[:2]
            # Without this, a full garbage collection stops all streams for tenths of a second.
            freeze_heap()
            phases = {name: round(spent, 2) for name, spent in state.ready.phases.items()}
            logger.info("started", extra={"phases": table(phases)})
            logger.info("ready", extra={"url": f"http://{host}:{port}", "model": state.model_name})
            dying = loop.create_task(died.wait())
            await asyncio.wait((stopping, dying, serving), return_when=asyncio.FIRST_COMPLETED)
            if died.is_set():
                await asyncio.sleep(DEATH_NOTICE_S)
        else:
            starting.cancel()
        logger.info("stopping", extra={"in_flight": client.num_sequences})
        server.should_exit = True
        await serving
        cut = server.force_exit or client.num_sequences > 0
    except EngineDeadError as error:
        raise FinwhaleError(str(error)) from error
    finally:
        server.should_exit = server.force_exit = True
        with contextlib.suppress(Exception):
            await serving
        await state.grammars.close()
        await client.close()
    return int(client.failure is not None or cut)


class Server(uvicorn.Server):
    """uvicorn without its handling of signals."""

    def __init__(self, state: ServerState) -> None:
        config = uvicorn.Config(
            create_app(state),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(state.config.drain_timeout_s) or 1,
            h11_max_incomplete_event_size=64 << 10,
            server_header=False,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        raise AssertionError("signals are handled by the loop")


def listen(config: ServerConfig) -> socket.socket:
    """Raises FinwhaleError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise FinwhaleError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}"
        ) from error
    listener.setblocking(False)
    return listener
