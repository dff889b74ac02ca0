"""Processes that serve a model over HTTP, and what the tests ask of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [end.getsockname()[1] for end in sockets]
    for end in sockets:
        end.close()
    return ports


class Program:
    """A process in a session of its own, with its output in a file."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        """End the process, and every descendant that is still there."""
        found = [self.process.pid, *descendants(self.process.pid)]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class DemoServer:
    """`finwhale serve` with the embedded model and more options, and its log of requests."""

    def __init__(self, log: Path, *options: str) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = ["serve", "--device", "cpu", "--port", str(self.port), *options]
        self.program = Program(python("-m", "finwhale", *arguments), log)
        try:
            wait_for(lambda: is_ready(self.port), 120, [self.program])
        except BaseException:
            self.program.close()
            raise

    def requests(self) -> list[dict[str, Any]]:
        """The log's entries of the requests for generation, in the order in which they ended."""
        lines = (json.loads(line) for line in self.program.output.splitlines() if line)
        entries = [line for line in lines if line["message"] == "request"]
        return [entry for entry in entries if entry["method"] == "POST"]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(path.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float, programs: Sequence[Program]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "\n".join(program.output for program in programs)
        time.sleep(0.1)


def client(port: int) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
    )


def is_ready(port: int) -> bool:
    with suppress(openai.APIError):
        return bool(client(port).models.list().data)
    return False


def complete(port: int, prompt: object, max_tokens: int = 16) -> list[int]:
    """The tokens of the greedy continuation of a prompt."""
    one = client(port)
    answer = one.completions.create(
        model=one.models.list().data[0].id,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens: list[int] = answer.choices[0].model_dump()["token_ids"]
    return tokens
