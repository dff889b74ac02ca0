"""Prefixes of other hosts over the real NIXL, which the tests install: peers that die or stop."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import environments
from .servers import Program, client, free_ports, is_ready, wait_for

NUMBER = 24  # of records: 21 blocks and 3 states
TRANSPORTS = pytest.mark.parametrize("transports", ["tcp,self", "all"])


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = environments.make(tmp_path_factory.mktemp("environment"), "nixl-cu13==1.5.1")
    return made / "python"


class Host:
    """A process of nixl_host.py."""

    def __init__(self, arguments: list[str], transports: str) -> None:
        script = Path(__file__).with_name("nixl_host.py")
        self.process = subprocess.Popen(
            [arguments[0], str(script), *arguments[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "UCX_TLS": transports},
        )
        assert self.process.stdout is not None
        # NIXL and UCX say nothing on standard output.
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End as a server does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0


class Pair:
    """Two hosts; the second asks the first."""

    def __init__(self, python: Path, path: Path, transports: str) -> None:
        self.python, self.path, self.transports = str(python), path, transports
        (self.port,) = free_ports(1)
        self.hosts: list[Host] = []
        self.first = self.open_first()
        assert self.first("put", NUMBER) == [True] * NUMBER
        arguments = [self.python, str(path / "second"), "0", str(self.port)]
        self.second = Host(arguments, transports)
        self.hosts.append(self.second)

    def open_first(self) -> Host:
        arguments = [self.python, str(self.path / "first"), str(self.port), "0"]
        self.hosts.append(Host(arguments, self.transports))
        return self.hosts[-1]

    def wait(self, wanted: list[bool]) -> None:
        """Read until that many records come, all of them right."""
        end = time.monotonic() + 120
        while (found := self.second("read", NUMBER)) != wanted:
            assert "wrong" not in found and time.monotonic() < end, found


@pytest.fixture
def pair(python: Path, tmp_path: Path) -> Iterator[Callable[[str], Pair]]:
    made: list[Pair] = []

    def make(transports: str) -> Pair:
        made.append(Pair(python, tmp_path, transports))
        return made[-1]

    yield make
    for one in made:
        for host in one.hosts:
            host.kill()


@TRANSPORTS
def test_records_of_another_host(pair: Callable[[str], Pair], transports: str) -> None:
    hosts = pair(transports)
    assert hosts.second("find", NUMBER + 2) == [True] * NUMBER + [False] * 2
    for threads in (1, 8):
        assert hosts.second("read", NUMBER + 2, threads) == [True] * NUMBER + [False] * 2
    hosts.second.end()
    hosts.first.end()


@TRANSPORTS
@pytest.mark.parametrize("moment", ["before", "idle", "reading"])
def test_a_killed_host(pair: Callable[[str], Pair], transports: str, moment: str) -> None:
    """Whatever is missing is a miss; no record is wrong; a restarted host is asked again."""
    hosts = pair(transports)
    if moment != "before":
        assert hosts.second("read", NUMBER) == [True] * NUMBER
    if moment == "reading":
        for delay in (0.0, 0.01, 0.02, 0.05):
            timer = threading.Timer(delay, hosts.first.kill)
            timer.start()
            assert "wrong" not in hosts.second("read", NUMBER)
            timer.join()
            hosts.first = hosts.open_first()
            hosts.wait([True] * NUMBER)
    hosts.first.kill()
    assert hosts.second("find", NUMBER) == [False] * NUMBER
    assert hosts.second("read", NUMBER) == [False] * NUMBER
    hosts.open_first()
    hosts.wait([True] * NUMBER)
    hosts.second.end()


@TRANSPORTS
def test_a_host_that_stops_and_continues(pair: Callable[[str], Pair], transports: str) -> None:
    """Reads end at their deadline. What arrives later reaches no record."""
    hosts = pair(transports)
    assert hosts.second("read", NUMBER) == [True] * NUMBER
    for delay in (0.0, 0.01, 0.03):
        stop = threading.Timer(delay, os.kill, (hosts.first.process.pid, signal.SIGSTOP))
        stop.start()
        assert "wrong" not in hosts.second("read", NUMBER, 8, 0.5)
        stop.join()
        assert hosts.second("read", NUMBER, 8, 0.5) == [False] * NUMBER
        os.kill(hosts.first.process.pid, signal.SIGCONT)
        hosts.wait([True] * NUMBER)
    hosts.second.end()


def test_two_demo_servers(python: Path, tmp_path: Path) -> None:
    """The second loads what the first has computed, and answers the same; alone, too."""
    *ports, peer_port = free_ports(3)
    common = ["--device", "cpu", "--prefix-salt", "salt"]
    options = [["--prefix-peer-port", str(peer_port)], ["--prefix-peers", f"localhost:{peer_port}"]]
    servers = []
    try:
        for number, (port, more) in enumerate(zip(ports, options, strict=True)):
            store = ["--prefix-store", str(tmp_path / f"store{number}")]
            arguments = ["-m", "finwhale", "serve", "--port", str(port), *common, *store, *more]
            servers.append(Program([str(python), *arguments], tmp_path / f"log{number}"))
        wait_for(lambda: all(map(is_ready, ports)), 180, servers)
        prompt = "Tom went to the old house by the lake, and nobody was there. " * 60
        first, cached = ask(ports[0], prompt)
        assert cached == 0
        wait_for(lambda: len(list((tmp_path / "store0").rglob("*.state"))) > 0, 60, servers)
        second, cached = ask(ports[1], prompt)
        assert second == first and cached >= 512
        longer = prompt + first + " And then"
        assert ask(ports[1], longer)[1] >= 512
        os.kill(servers[0].process.pid, signal.SIGKILL)
        servers[0].close()
        assert ask(ports[1], prompt) == (first, cached)
        assert ask(ports[1], "Another story: " + prompt)[1] == 0
    finally:
        for server in servers:
            server.close()


def ask(port: int, prompt: str) -> tuple[str, int]:
    """The greedy continuation, and how many tokens of the prompt were cached."""
    answer = client(port).completions.create(
        model="finwhale-demo", prompt=prompt, temperature=0, max_tokens=20
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, (details and details.cached_tokens) or 0
