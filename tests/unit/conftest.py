"""These tests start no process and construct no engine: they take seconds, on any machine."""

import multiprocessing.process
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from finwhale.engine.loop.engine import Engine

FORBIDDEN = (
    (subprocess.Popen, "__init__", "tests/process", "starts a process"),
    (multiprocessing.process.BaseProcess, "start", "tests/process", "starts a process"),
    (os, "fork", "tests/process", "starts a process"),
    (os, "posix_spawn", "tests/process", "starts a process"),
    (Engine, "__init__", "tests/engine", "constructs an engine"),
)


@pytest.fixture(autouse=True)
def only_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(directory: str, what: str) -> Callable[..., Any]:
        def refuse(*args: Any, **options: Any) -> Any:
            pytest.fail(f"a test in tests/unit {what}: move it to {directory}", pytrace=False)

        return refuse

    for owner, name, directory, what in FORBIDDEN:
        monkeypatch.setattr(owner, name, refusal(directory, what), raising=False)
