"""docs/replicas.md: two prefill and two decode servers behind vllm-router, killed in each phase."""

import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from tests.server.test_process import engine_of

from . import environments
from .servers import Program, client, free_ports, is_ready, python, wait_for
from .test_replicas import documented_commands

STORY = "Tom went to the old house by the lake, and nobody was there. " * 40
NAMES = ("prefill1", "prefill2", "decode1", "decode2")
NUMBERS = count()
SECONDS = 120


class Server:
    """A demo engine, which may be killed and started again and again."""

    def __init__(self, name: str, directory: Path) -> None:
        self._name, self._directory, self._starts = name, directory, count()
        (self.port,) = free_ports(1)
        self.start()

    def start(self) -> None:
        words = ["serve", "--device", "cpu", "--port", str(self.port)]
        words += ["--prefix-store", f"{self._directory / 'store'}:10GB"]
        if self._name.startswith("prefill"):
            words += ["--role", "prefill"]
        log = self._directory / f"{self._name}-{next(self._starts)}.log"
        self.program = Program(python("-m", "finwhale", *words), log)

    def signal(self, number: signal.Signals) -> None:
        """Stop or continue the engine. The server still accepts requests."""
        os.kill(engine_of(self.program.process), number)

    def metric(self, name: str) -> int:
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            (value,) = re.findall(rf"^{name} ([\d.e+]+)$", answer.read().decode(), re.MULTILINE)
        return int(float(value))

    @property
    def busy(self) -> bool:
        return self.metric("finwhale_requests_in_flight") > 0


class Deployment:
    """The servers, and the routers as the documentation starts them."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.store = directory / "store"
        self.servers = {name: Server(name, directory) for name in NAMES}
        self.wait(*NAMES)
        self.routers: list[Program] = []
        self.ports = free_ports(3)
        metrics = free_ports(3)
        for number, words in enumerate(documented_commands()[1:]):
            text = " ".join(words).replace("0.0.0.0", "127.0.0.1")
            for name, server in self.servers.items():
                text = text.replace(f"{name}:8000", f"127.0.0.1:{server.port}")
            for given, port in zip(("9001", "9002", "9000"), self.ports, strict=True):
                text = re.sub(rf"(?<=[ :]){given}\b", str(port), text)
            text = text.replace("interval-secs 5", "interval-secs 1")
            program, *rest = text.split()
            # A server that comes back gets requests at once.
            rest += ["--prometheus-port", str(metrics[number]), "--cb-timeout-duration-secs", "1"]
            command = [str(programs / program), *rest]
            self.routers.append(Program(command, directory / f"router{number}.log"))
            wait_for(partial(is_ready, self.ports[number]), SECONDS, self.routers)

    def wait(self, *names: str) -> None:
        for name in names:
            server = self.servers[name]
            wait_for(partial(is_ready, server.port), SECONDS, [server.program])

    def restart(self, *names: str) -> None:
        """Start servers that were killed, and wait until their routers use them."""
        for name in names:
            self.servers[name].start()
        self.wait(*names)
        for port in self.ports[:2]:
            wait_for(partial(all_healthy, port), SECONDS, self.routers)

    def some(self, kind: str) -> list[Server]:
        return [server for name, server in self.servers.items() if name.startswith(kind)]

    def close(self) -> None:
        for program in (*self.routers, *(server.program for server in self.servers.values())):
            program.close()

    def ask(self) -> int:
        """Ask for a prompt that no server knows, and get an answer; returns how many of its tokens
        the decode server found.
        """
        answer = client(self.ports[2]).chat.completions.create(
            model="finwhale-demo",
            messages=[{"role": "user", "content": f"{next(NUMBERS)}: {STORY}"}],
            max_tokens=4,
            temperature=0,
        )
        assert answer.choices[0].finish_reason and answer.usage
        return answer.usage.model_dump()["prompt_cache_hit_tokens"]

    def one_busy(self, servers: Sequence[Server]) -> Server:
        """Return the server that answers the test's request. Another server may still compute a
        request whose client has gone.
        """
        programs = [server.program for server in servers]
        wait_for(lambda: any(server.busy for server in servers), SECONDS, programs)
        return next(server for server in servers if server.busy)


def all_healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=30) as answer:
        workers = json.load(answer)["workers"]
    return len(workers) == 2 and all(worker["is_healthy"] for worker in workers)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    programs = environments.make(tmp_path_factory.mktemp("environment"), "vllm-router==0.1.17")
    deployment = Deployment(programs, tmp_path_factory.mktemp("servers"))
    yield deployment
    deployment.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_prompts_go_from_prefill_to_decode_servers(deployment: Deployment) -> None:
    assert [deployment.ask() for _ in range(4)] == [512] * 4
    # The other endpoints, of which the router makes prefill requests in other ways.
    for path, prompt in (
        ("completions", {"prompt": STORY, "max_tokens": 4}),
        ("responses", {"input": STORY, "max_output_tokens": 4}),
        ("messages", {"messages": [{"role": "user", "content": STORY}], "max_tokens": 4}),
    ):
        answer = httpx.post(
            f"http://127.0.0.1:{deployment.ports[2]}/v1/{path}",
            json={"model": "finwhale-demo", **prompt},
            timeout=SECONDS,
        )
        assert answer.status_code == 200, answer.text
    assert not any(s.metric("finwhale_ordinary_requests_total") for s in deployment.some("prefill"))


def test_a_prefill_server_dies_before_requests(deployment: Deployment) -> None:
    deployment.servers["prefill1"].program.close()
    assert [deployment.ask() for _ in range(4)] == [512] * 4
    deployment.restart("prefill1")


def test_a_prefill_server_dies_during_its_prefill(
    deployment: Deployment, pool: ThreadPoolExecutor
) -> None:
    servers = deployment.some("prefill")
    for server in servers:
        server.signal(signal.SIGSTOP)
    found: Future[int] = pool.submit(deployment.ask)
    dies = deployment.one_busy(servers)
    dies.program.close()
    (lives,) = [server for server in servers if server is not dies]
    lives.signal(signal.SIGCONT)
    assert found.result(SECONDS) == 512
    deployment.restart(NAMES[servers.index(dies)])


def test_prefill_servers_die_after_their_prefill(
    deployment: Deployment, pool: ThreadPoolExecutor
) -> None:
    for server in deployment.some("decode"):
        server.signal(signal.SIGSTOP)
    found: Future[int] = pool.submit(deployment.ask)
    deployment.one_busy(deployment.some("decode"))
    for server in deployment.some("prefill"):
        server.program.close()
    for server in deployment.some("decode"):
        server.signal(signal.SIGCONT)
    assert found.result(SECONDS) == 512
    # While no prefill server is there, the router of both kinds answers 500.
    with pytest.raises(openai.InternalServerError):
        deployment.ask()
    deployment.restart("prefill1", "prefill2")


def test_a_decode_server_dies_before_requests(deployment: Deployment) -> None:
    deployment.servers["decode1"].program.close()
    assert [deployment.ask() for _ in range(4)] == [512] * 4
    deployment.restart("decode1")


def test_a_decode_server_dies_while_it_streams(deployment: Deployment) -> None:
    """The connection breaks, or the answer ends without a finish reason."""
    stream = client(deployment.ports[2]).chat.completions.create(
        model="finwhale-demo",
        messages=[{"role": "user", "content": f"{next(NUMBERS)}: {STORY}"}],
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    next(chunks)
    servers = deployment.some("decode")
    for server in servers:
        server.signal(signal.SIGSTOP)
    dies = deployment.one_busy(servers)
    dies.program.close()
    (lives,) = [server for server in servers if server is not dies]
    lives.signal(signal.SIGCONT)
    reasons = []
    try:
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    except (openai.APIError, httpx.TransportError) as error:
        print("the stream ends with", repr(error))
    assert not any(reasons)
    assert deployment.ask() == 512
    deployment.restart(NAMES[2 + servers.index(dies)])


def test_the_store_vanishes(deployment: Deployment) -> None:
    shutil.rmtree(deployment.store)
    assert [deployment.ask() for _ in range(4)] == [0] * 4
    deployment.store.write_text("a file")
    assert deployment.ask() == 0
