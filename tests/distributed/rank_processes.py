"""Rank processes on the CPU, which a test module starts once and gives several jobs.

They are forked from a server that has imported the engine, because importing it in each process
takes seconds.
"""

import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from tests.support.forked_ranks import PRELOADED
from tests.support.processes import importable_tests
from torch._C._distributed_c10d import FileStore

from finwhale.distributed.collectives import Collectives
from finwhale.distributed.gloo import Gloo
from finwhale.distributed.rank import Rank

from .rank_engines import SCENARIOS, Given


class RankProcesses:
    """The processes of up to `most` ranks."""

    def __init__(self, most: int) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._directory = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes = []
        for index in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, index, self._directory.name), daemon=True
            )
            with importable_tests():
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, size: int, scenario: str, given: Given, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a scenario of rank_engines.py on `size` ranks; returns their results in order."""
        ranks = self._connections[:size]
        for connection in ranks:
            connection.send((size, scenario, given, args, kwargs))
        answers = [connection.recv() for connection in ranks]
        errors = [error for _, error in answers if error is not None]
        assert not errors, "\n".join(errors)
        return [result for result, _ in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._directory.cleanup()


def serve(connection: Connection, index: int, directory: str) -> None:
    """Answer jobs until the connection closes."""
    groups: dict[int, Collectives] = {}
    while True:
        try:
            size, scenario, given, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            if size not in groups:
                store = FileStore(os.path.join(directory, str(size)), size)
                groups[size] = Gloo(Rank(index, size), store)
            run: Callable[..., Any] = SCENARIOS[scenario]
            own = replace(given, collectives=groups[size])
            answer: Any = run(own, *args, **kwargs), None
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)
