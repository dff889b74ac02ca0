"""A server on a real socket, its engine in a thread."""

import asyncio
import threading
from multiprocessing import Pipe
from typing import Any

import anthropic
import openai
from tests.support.integrity import check_engine

from finwhale.chat.dialect import Dialect
from finwhale.engine.loop.engine import Engine
from finwhale.server.batch.store import Store
from finwhale.server.config import ServerConfig
from finwhale.server.edge.listening import listen, tls_context, url_of
from finwhale.server.link.client import EngineClient
from finwhale.server.link.worker import EngineLoop
from finwhale.server.run import Server, open_traces
from finwhale.server.state import ServerState

MODEL = "demo"


class RunningServer:
    """Serves `engine` until closed; `state` and `client` are to be looked at, not touched."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        config = ServerConfig(model_names=(MODEL,), port=0, default_thinking=False)
        config = ServerConfig(**{**_fields(config), **options})
        ours, theirs = Pipe()
        self.engine = engine
        self._engine_thread = threading.Thread(target=EngineLoop(engine, theirs).run, daemon=True)
        self._engine_thread.start()
        self.client = EngineClient(ours)
        self.state = ServerState(config, self.client, engine.tokenizer, Dialect("april"))
        self.state.traces = open_traces(config)
        self._listener = listen(config)
        self.url = url_of(self._listener, config)
        self.tls = tls_context(config)
        self.store = None if config.batch_dir is None else Store(config.batch_dir)
        self._server = Server(self.state, store=self.store, tls=self.tls)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    async def _run(self) -> None:
        await self.client.start()
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        batches = self._server.batches
        if batches is not None:
            batches.start()
        self._ready.set()
        await serving
        if batches is not None:
            await batches.close()
            batches.store.close()
        await self.state.grammars.close()
        await self.client.close()

    def live(self) -> dict[str, Any]:
        return self.state.metrics.live()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(120)
        self._engine_thread.join(120)
        assert not self._thread.is_alive() and not self._engine_thread.is_alive()
        if self.state.traces is not None:
            self.state.traces.close()

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            **{"api_key": "none", "max_retries": 0, "timeout": 200, **options},
        )

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=self.url, **{"api_key": "none", "max_retries": 0, "timeout": 200, **options}
        )


def _fields(config: ServerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def check_idle(engine: Engine) -> None:
    """No request, page or sampling state is left behind."""
    check_engine(engine)
    assert not engine.has_work
    assert not engine.outputs.streams and not engine.outputs.requests and not engine._loop.in_flight
