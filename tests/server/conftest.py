"""Servers with the demo model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from finwhale import LLM

from .running import RunningServer, check_idle


@pytest.fixture(scope="session")
def demo_llm() -> LLM:
    return LLM(device="cpu", max_num_seqs=8, max_model_len=2048)


@pytest.fixture
def start(demo_llm: LLM) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with options of their own; afterwards the engine must be idle."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    running: list[RunningServer] = []

    def make(**options: Any) -> RunningServer:
        assert not running, "one server an engine"
        running.append(RunningServer(demo_llm.engine, **options))
        return running[-1]

    yield make
    for server in running:
        server.close()
    torch.set_num_threads(threads)
    check_idle(demo_llm.engine)


@pytest.fixture
def server(start: Callable[..., RunningServer]) -> RunningServer:
    return start()
