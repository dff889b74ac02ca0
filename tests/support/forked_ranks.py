"""Ranks forked from a server that has imported the engine, which takes seconds in each rank.

tests/server/test_ranks.py starts ranks as users do, and so does the process that
tests/distributed/test_ranks.py ends.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.processes import importable_tests

from finwhale.distributed import workers

PRELOADED = ["torch.distributed", "finwhale.llm", "finwhale.engine.ranks.local_executor"]


class Forked:
    """What `workers.py` uses of subprocess.Popen."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        code, path, *numbers = command[2:]
        passed = [Connection(os.dup(fd)) for fd in pass_fds]
        arguments = (code, path, passed, numbers[len(passed) :], dict(os.environ), os.getpid())
        self._process = context.Process(target=run, args=arguments)
        with importable_tests():
            self._process.start()
        for connection in passed:
            connection.close()
        assert self._process.pid is not None
        self.pid, self.kill = self._process.pid, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, seconds: float | None) -> None:
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a rank", seconds or 0)


def run(
    code: str,
    path: str,
    passed: list[Connection],
    others: list[str],
    environ: dict[str, str],
    owner: int,
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.setsid()
    os.getppid = lambda: owner  # the server's, which a rank would take for the end of its owner
    sys.argv = ["-c", path, *(str(one.fileno()) for one in passed), *others]
    exec(code, {"__name__": "__main__"})


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        known = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
        patch.setattr(workers, "subprocess", SimpleNamespace(Popen=Forked, **known))
        yield
