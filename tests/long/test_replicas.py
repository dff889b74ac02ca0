"""docs/replicas.md: two demo engines behind vllm-router."""

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from . import environments
from .servers import Program, client, free_ports, is_ready, python, wait_for

ROOT = Path(__file__).parents[2]
STORIES = [
    "Tom went to the old house by the lake, and nobody was there. " * 8,
    "A small red fox asked the moon why it was always so quiet at night. " * 8,
    "Every morning Zoe took bread, apples and a book to her grandmother. " * 8,
    "In winter the ships stayed in the harbour, under a thick roof of ice. " * 8,
]


class Replicas:
    """Two engines, and the router before them as the documentation starts it."""

    def __init__(self, programs: Path, logs: Path) -> None:
        *self.ports, self.router, metrics = free_ports(4)
        self.engines = [
            Program(
                python("-m", "finwhale", "serve", "--device", "cpu", "--port", str(port)),
                logs / f"engine{port}.log",
            )
            for port in self.ports
        ]
        wait_for(lambda: all(map(is_ready, self.ports)), 120, self.engines)
        words = documented_commands()[0]
        words = [word.replace("replica1:8000", f"127.0.0.1:{self.ports[0]}") for word in words]
        words = [word.replace("replica2:8000", f"127.0.0.1:{self.ports[1]}") for word in words]
        words = [word.replace("0.0.0.0", "127.0.0.1") for word in words]
        words[words.index("--port") + 1] = str(self.router)
        program = [str(programs / words[0]), *words[1:], "--prometheus-port", str(metrics)]
        self.program = Program(program, logs / "router.log")
        wait_for(lambda: is_ready(self.router), 60, [self.program, *self.engines])

    def requests(self) -> list[int]:
        """The number of completions that each engine has finished."""
        return [finished(port) for port in self.ports]

    def close(self) -> None:
        for program in (self.program, *self.engines):
            program.close()


def documented_commands() -> list[list[str]]:
    """The words of the routers' commands in the documentation."""
    text = (ROOT / "docs/replicas.md").read_text()
    commands = re.findall(r"^vllm-router .*?[^\\]$", text, re.MULTILINE | re.DOTALL)
    return [command.replace("\\\n", " ").split() for command in commands]


def finished(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    lines = re.findall(r"^finwhale_requests_total\{(.*)\} ([\d.e+]+)$", text, re.MULTILINE)
    return sum(int(float(count)) for labels, count in lines if "completions" in labels)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.make(tmp_path_factory.mktemp("environment"), "vllm-router")


@pytest.fixture
def replicas(programs: Path, tmp_path: Path) -> Iterator[Replicas]:
    replicas = Replicas(programs, tmp_path)
    yield replicas
    replicas.close()


def ask(replicas: Replicas, text: str, **options: Any) -> str:
    answer = client(replicas.router).completions.create(
        model="finwhale-demo", prompt=text, temperature=0, **{"max_tokens": 4, **options}
    )
    return answer.choices[0].text


def test_a_common_prefix_reaches_one_replica_and_a_dead_one_loses_no_request(
    replicas: Replicas,
) -> None:
    with ThreadPoolExecutor() as pool:  # at once, so that the router uses both replicas
        list(pool.map(lambda story: ask(replicas, story, max_tokens=100), STORIES))
    assert all(replicas.requests())
    for story in STORIES:
        before = replicas.requests()
        for question in ("Why?", "How?", "When?", "With whom?"):
            ask(replicas, story + question)
        counts = [now - then for now, then in zip(replicas.requests(), before, strict=True)]
        assert sorted(counts) == [0, 4], (story, counts)
    chat = client(replicas.router).chat.completions.create(
        model="finwhale-demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert chat.choices
    # The replica that has just answered dies.
    dead = counts.index(4)
    answered = finished(replicas.ports[1 - dead])
    replicas.engines[dead].close()
    for number in range(12):
        ask(replicas, STORIES[number % 4] + f"And then {number}?")
    assert finished(replicas.ports[1 - dead]) == answered + 12


def test_a_router_finds_prefixes_by_kv_events(programs: Path, tmp_path: Path) -> None:
    """It knows how many tokens of a prompt of token ids the chosen replica has."""
    *ports, first, second, router, metrics = free_ports(6)
    events = (first, second)
    words = ["--host", "127.0.0.1", "--port", str(router), "--prometheus-port", str(metrics)]
    words += ["--policy", "kv_aware", "--kv-event-block-size", "256", "--log-level", "debug"]
    words += ["--kv-event-model", "finwhale-demo", "--health-check-endpoint", "/health/ready"]
    words += ["--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports)]
    started = []
    for port, event in zip(ports, events, strict=True):
        serve = ["serve", "--device", "cpu", "--port", str(port), "--kv-events", str(event)]
        started.append(Program(python("-m", "finwhale", *serve), tmp_path / f"engine{port}.log"))
        words += ["--kv-event-source", f"http://127.0.0.1:{port}=tcp://127.0.0.1:{event}"]
    try:
        wait_for(lambda: all(map(is_ready, ports)), 120, started)
        log = tmp_path / "router.log"
        started.append(Program([str(programs / "vllm-router"), *words], log))
        wait_for(lambda: is_ready(router), 60, started)
        ids = [20 + 7 * i * i % 900 for i in range(800)]

        def asked() -> bool:  # again until the router has heard of the prompt's blocks
            client(router).completions.create(model="finwhale-demo", prompt=ids, max_tokens=1)
            return "credited_prefix_tokens=768" in plain(log)

        wait_for(asked, 60, started)
    finally:
        for program in started:
            program.close()


def plain(log: Path) -> str:
    """A log without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
