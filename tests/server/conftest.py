"""Servers with the embedded model."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from finwhale import LLM

from .running import RunningServer, check_idle


@pytest.fixture(scope="session", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients need none here, and loading this machine's takes each client 25 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        patch.delenv("SSL_CERT_FILE", raising=False)  # clients prefer it
        yield


@pytest.fixture(scope="session")
def whole_demo_llm() -> LLM:
    return LLM(device="cpu", max_num_seqs=8, max_model_len=2048)


@pytest.fixture(scope="session")
def demo_llm(short_demo_path: Path) -> LLM:
    return LLM(short_demo_path, device="cpu", max_num_seqs=8, max_model_len=2048)


class SharedServer:
    """A server with default options, started when a test first needs it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._running: RunningServer | None = None

    def get(self) -> RunningServer:
        if self._running is None:
            self._running = RunningServer(self._llm._engine)
        return self._running

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


@pytest.fixture(scope="module")
def shared_server(demo_llm: LLM) -> Iterator[SharedServer]:
    shared = SharedServer(demo_llm)
    yield shared
    shared.close()


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def start(
    demo_llm: LLM, shared_server: SharedServer, one_torch_thread: None
) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with options of their own; afterwards the engine must be idle."""
    running: list[RunningServer] = []

    def make(**options: Any) -> RunningServer:
        assert not running, "one server an engine"
        shared_server.close()
        running.append(RunningServer(demo_llm._engine, **options))
        return running[-1]

    yield make
    for server in running:
        server.close()
    check_idle(demo_llm._engine)


@pytest.fixture
def new_server(start: Callable[..., RunningServer]) -> RunningServer:
    """A server that has seen no request, for tests that count."""
    return start()


@pytest.fixture
def server(
    demo_llm: LLM, shared_server: SharedServer, one_torch_thread: None
) -> Iterator[RunningServer]:
    """The server that tests of a module share; afterwards the engine must be idle."""
    yield shared_server.get()
    engine, end = demo_llm._engine, time.monotonic() + 120
    while engine.has_work and time.monotonic() < end:
        time.sleep(0.01)
    with engine.lock:  # the last step has ended
        check_idle(engine)
