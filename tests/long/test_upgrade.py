"""docs/production.md: a new version takes over from an old one under load, and the old one returns.

The new version is a copy of the source with another number, and, where a test says so, with another
NUMERICS_VERSION.
"""

import json
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event

import pytest

import finwhale

from . import environments
from .servers import Program, client, free_ports, is_ready, python, wait_for
from .test_prefill_decode import all_healthy
from .test_replicas import documented_commands, finished

ROOT = Path(__file__).parents[2]
SOURCE = Path(finwhale.__file__).parent
SECONDS = 120
STORIES = [
    f"{name} went to the old house by the lake, and nobody was there. " * 40
    for name in ("Tom", "Zoe")
]


def copy_of(directory: Path, numerics: bool = False) -> Path:
    """A copy of the source with another version; returns what PYTHONPATH needs."""
    shutil.copytree(SOURCE, directory / "finwhale", ignore=shutil.ignore_patterns("__pycache__"))
    change(directory / "finwhale/__init__.py", r'(__version__ = ")[^"]+', r"\g<1>9.9.9")
    if numerics:
        path = directory / "finwhale/engine/store/fingerprint.py"
        change(path, r"(NUMERICS_VERSION = )\d+", r"\g<1>99")
    return directory


def change(path: Path, pattern: str, new: str) -> None:
    text, number = re.subn(pattern, new, path.read_text(), count=1)
    assert number == 1
    path.write_text(text)


class Server:
    """A demo engine of one version, with a prefix store that others share."""

    numbers = count()

    def __init__(self, directory: Path, version: Path, port: int | None = None) -> None:
        self.port = port or free_ports(1)[0]
        words = ["serve", "--device", "cpu", "--port", str(self.port)]
        words += ["--prefix-store", f"{directory / 'store'}:10GB", "--drain-delay", "2"]
        log = directory / f"server{next(self.numbers)}.log"
        command = python("-m", "finwhale", *words)
        self.program = Program(command, log, {"PYTHONPATH": str(version)})
        wait_for(lambda: is_ready(self.port), SECONDS, [self.program])

    def version(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/version", timeout=30) as answer:
            return str(json.load(answer)["version"])

    def stop(self) -> None:
        """SIGTERM, as Kubernetes and systemd send it; the server must end by itself."""
        self.program.process.send_signal(signal.SIGTERM)
        assert self.program.process.wait(SECONDS) == 0, self.program.output

    def ask(self, text: str) -> tuple[str, int]:
        """The greedy continuation, and how many tokens of the prompt were not computed."""
        answer = client(self.port).completions.create(
            model="finwhale-demo", prompt=text, max_tokens=4, temperature=0
        )
        assert answer.usage and answer.usage.prompt_tokens_details
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    def metric(self, name: str) -> int:
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            values = re.findall(rf"^{name} ([\d.e+]+)$", answer.read().decode(), re.MULTILINE)
        return int(float(values[0])) if values else 0

    def store(self, text: str) -> str:
        """Ask for a text, and wait until the store has its prefix; returns the continuation."""
        before = self.metric("finwhale_prefix_store_written_bytes_total")
        answer, hits = self.ask(text)
        assert not hits

        def written() -> bool:
            return self.metric("finwhale_prefix_store_written_bytes_total") > before

        wait_for(written, SECONDS, [self.program])
        return answer


class Load:
    """Requests through the router, one after the other on each of two threads, until it ends."""

    def __init__(self, router: int) -> None:
        self._router, self._end, self.answers = router, Event(), 0
        self._pool = ThreadPoolExecutor(2)
        self._threads: list[Future[None]] = [
            self._pool.submit(self._run, stream) for stream in (False, True)
        ]

    def _run(self, stream: bool) -> None:
        one = client(self._router)
        for number in count():
            if self._end.is_set():
                return
            text = f"{number}: Tom went to the old house"  # less than a block: nothing is stored
            if stream:
                chunks = list(
                    one.completions.create(
                        model="finwhale-demo", prompt=text, max_tokens=16, stream=True
                    )
                )
                assert any(c.choices and c.choices[0].finish_reason for c in chunks)
            else:
                answer = one.completions.create(model="finwhale-demo", prompt=text, max_tokens=16)
                assert answer.choices[0].finish_reason
            self.answers += 1

    def wait(self, more: int, programs: list[Program]) -> None:
        """Wait until `more` further answers have come. Fails if a request failed."""
        wanted = self.answers + more
        wait_for(lambda: self.answers >= wanted or self.failed(), SECONDS, programs)
        assert not self.failed()

    def failed(self) -> bool:
        """Whether a request has failed; raises its error."""
        for thread in self._threads:
            if thread.done():
                thread.result()
        return any(thread.done() for thread in self._threads)

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.result(SECONDS)
        self._pool.shutdown()


def start_router(programs: Path, log: Path, *ports: int) -> tuple[Program, int]:
    """vllm-router as docs/replicas.md starts it, before servers on these ports."""
    router, metrics = free_ports(2)
    words = documented_commands()[0]
    first = words.index("--worker-urls") + 1
    words[first : first + 2] = [f"http://127.0.0.1:{port}" for port in ports]
    words = [word.replace("0.0.0.0", "127.0.0.1") for word in words]
    words[words.index("--port") + 1] = str(router)
    words[words.index("--health-check-interval-secs") + 1] = "1"
    # A server that comes back gets requests at once.
    words += ["--prometheus-port", str(metrics), "--cb-timeout-duration-secs", "1"]
    program = Program([str(programs / words[0]), *words[1:]], log)
    wait_for(lambda: is_ready(router), SECONDS, [program])
    return program, router


def run_documented(word: str, router: int, server: int) -> None:
    """Run the command of docs/production.md that has this word."""
    text = (ROOT / "docs/production.md").read_text()
    (command,) = (line.strip() for line in text.splitlines() if f"/{word}?" in line)
    command = command.replace("ROUTER:9000", f"127.0.0.1:{router}")
    command = re.sub(r"(NEW|OLD):8000", f"127.0.0.1:{server}", command)
    subprocess.run(["bash", "-c", command], check=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.make(tmp_path_factory.mktemp("environment"), "vllm-router==0.1.17")


@pytest.fixture
def started() -> Iterator[list[Program]]:
    """Programs that the test has started."""
    found: list[Program] = []
    yield found
    for program in found:
        program.close()


def test_a_new_version_takes_over_and_the_old_one_returns(
    programs: Path, tmp_path: Path, started: list[Program]
) -> None:
    """With GPUs to spare: the new server is there before the old one goes."""
    versions = [SOURCE.parent, copy_of(tmp_path / "new")]
    server = Server(tmp_path, versions[0])
    started.append(server.program)
    router, port = start_router(programs, tmp_path / "router.log", server.port)
    started.append(router)
    load = Load(port)
    for version, story in zip((versions[1], versions[0]), STORIES, strict=False):
        answer = server.store(story)
        load.wait(4, started)
        new = Server(tmp_path, version)
        started.append(new.program)
        assert (new.version() == "9.9.9") == (version != SOURCE.parent)
        run_documented("add_worker", port, new.port)
        wait_for(lambda new=new: finished(new.port) > 0, SECONDS, started)  # type: ignore[misc]
        run_documented("remove_worker", port, server.port)
        server.stop()
        load.wait(4, started)
        # It has not seen this text: the store has its prefix from the other version.
        found, hits = new.ask(story)
        assert found == answer and hits >= 256
        assert new.metric('finwhale_prefix_tier_hits_total{tier="store"}') >= 1
        server = new
    load.end()


def test_replicas_are_replaced_one_after_the_other(
    programs: Path, tmp_path: Path, started: list[Program]
) -> None:
    """Without GPUs to spare: an old server ends before the new one starts at its address."""
    new = copy_of(tmp_path / "new")
    servers = [Server(tmp_path, SOURCE.parent) for _ in range(2)]
    ports = [server.port for server in servers]
    started += [server.program for server in servers]
    router, port = start_router(programs, tmp_path / "router.log", *ports)
    started.append(router)
    load = Load(port)
    for server in servers:
        load.wait(4, started)
        server.stop()
        load.wait(2, started)
        started.append(Server(tmp_path, new, server.port).program)
        wait_for(lambda: all_healthy(port), SECONDS, started)
    load.wait(4, started)
    load.end()


def test_other_bits_start_a_store_anew(tmp_path: Path, started: list[Program]) -> None:
    """A version with another NUMERICS_VERSION finds none of the prefixes, and says why."""
    old = Server(tmp_path, SOURCE.parent)
    started.append(old.program)
    old.store(STORIES[0])
    old.stop()
    new = Server(tmp_path, copy_of(tmp_path / "new", numerics=True))
    started.append(new.program)
    assert new.ask(STORIES[0])[1] == 0
    wait_for(lambda: "numerics" in new.program.output, SECONDS, started)
