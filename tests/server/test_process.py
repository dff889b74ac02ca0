"""`finwhale serve` as a process: starting, draining, ending, and its engine's death."""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from finwhale.cli.main import main
from finwhale.demo import DEMO_PATH

from .test_limits import LONG, wait_until

Serve = Callable[..., "Served"]


class Served:
    """A server's process, once it is ready; `log` holds what it has said."""

    def __init__(self, *args: str, environment: dict[str, str] | None = None) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        command = [sys.executable, "-m", "finwhale", "serve", "--port", "0", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[dict[str, Any]] = []
        self.wait_for("ready")
        self.url = self.log[-1]["url"]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="secret-key", max_retries=0)

    def wait_for(self, message: str) -> None:
        """Reads the log as far as a line that says `message`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if self.log[-1]["message"] == message:
                return
        raise AssertionError(f"it ended with {self.process.wait()}: {self.log}")

    def engine_pid(self) -> int:
        return engine_of(self.process)

    def refuses(self) -> bool:
        """Whether it takes no new connections."""
        host, port = self.url.removeprefix("http://").split(":")
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            return True
        return False

    def end(self) -> tuple[int, str]:
        """The exit code, and the rest of the log."""
        _, rest = self.process.communicate(timeout=120)
        return self.process.returncode, rest


def engine_of(server: "subprocess.Popen[Any]") -> int:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
    for child in map(int, children.split()):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in command and b"resource_tracker" not in command:
            return child
    raise AssertionError("no engine's process")


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Served] = []

    def start(*args: str, **options: Any) -> Served:
        made.append(Served("--device", "cpu", "--max-model-len", "2048", *args, **options))
        return made[-1]

    yield start
    for served in made:
        if served.process.poll() is None:
            served.process.kill()
        served.process.wait()
        assert served.process.stderr is not None
        served.process.stderr.close()


def test_keys_and_draining(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-key\n")
    served = serve(
        *("--api-key-file", str(keys), "--drain-delay", "4"),
        environment={"FINWHALE_API_KEYS": "other-key,"},
    )
    engine = served.engine_pid()
    auth = {"authorization": "Bearer secret-key"}
    done, total = httpx.get(f"{served.url}/live", headers=auth).json()["loaded_bytes"]
    assert done == total > 0, "the page shows how much of the weights is read"
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (served.process.pid, engine)]
    assert ["libtorch" in text for text in maps] == [False, True], "only the engine has torch"
    assert served.client.models.list().data[0].id == "finwhale-demo"
    assert served.client.with_options(api_key="other-key").models.list().data
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="wrong-key").models.list()

    keys.write_text("ann:key-of-ann\nsecret-key\n")
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("read the API keys")
    for key in ("key-of-ann", "secret-key", "other-key"):
        assert served.client.with_options(api_key=key).models.list().data

    options = {**LONG, "model": "finwhale-demo", "max_tokens": 150}
    stream = served.client.completions.create(**options, stream=True)
    pieces = iter(stream)
    next(pieces)
    served.process.send_signal(signal.SIGTERM)
    served.wait_for("not ready")
    assert httpx.get(f"{served.url}/health/ready").status_code == 503
    assert httpx.get(f"{served.url}/health/live").status_code == 200
    assert served.client.models.list().data, "it still accepts requests"
    served.wait_for("stopping")
    wait_until(served.refuses)
    with pytest.raises(openai.APIConnectionError):
        served.client.with_options(timeout=2).models.list()
    # What was running is answered to its end.
    reasons = [chunk.choices[0].finish_reason for chunk in pieces]
    assert reasons[-1] == "length" and len(reasons) == 149
    code, _ = served.end()
    assert code == 0
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["/nowhere"], "is not a directory"),
        (["--api-key-file", "/nowhere"], "cannot read the API keys"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
        (["--request-timeout", "0"], "request_timeout_s must be above 0"),
        (["--device", "nonsense", "--port", "0"], "nonsense"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], wanted: str, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        assert main(["serve", *args]) == 1
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("{")]
    assert len(lines) == 1 and lines[0].startswith("finwhale: error: "), lines
    assert wanted in lines[0]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_an_unread_log_stops_nothing() -> None:
    """The pipe is full before the server starts. A second signal ends the server at once."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b" " * 4096)
    os.set_blocking(writer, True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "finwhale", "serve", "--port", str(port), "--device", "cpu"]
    with subprocess.Popen([*command, "--max-model-len", "2048"], stderr=writer) as process:
        os.close(writer)
        try:
            ready = f"http://127.0.0.1:{port}/health/ready"
            wait_until(lambda: answers(ready), 200)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-")
            asked = {"model": "finwhale-demo", "prompt": "The whale", "max_tokens": 3}
            assert client.completions.create(**asked).choices[0].text
            engine = engine_of(process)
            pieces = iter(
                client.completions.create(**{**LONG, **asked, "max_tokens": 1900}, stream=True)
            )
            next(pieces)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not answers(ready))
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="has cut off this request") as caught:
                list(pieces)
            assert caught.value.code == "server_stopping"
            assert process.wait(120) == 1, "the answer that was running was not cut off"
            assert not Path(f"/proc/{engine}").exists()
        finally:
            process.kill()
            os.close(reader)


def test_too_few_files_may_be_opened() -> None:
    """One line at the start, not a server that refuses every connection."""
    command = f"ulimit -n 64; exec {sys.executable} -m finwhale serve --device cpu --port 0"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert "may open 64 files, and the server needs 160: raise the hard limit" in ended.stderr


def test_options_together(tmp_path: Path) -> None:
    """Options of which no other test starts a server (docs/testing.md); then its engine dies."""
    (tmp_path / "options.yaml").write_text("max-num-seqs: 3\nstep-timeout: 300\n")
    command = [sys.executable, "-m", "finwhale", "serve", "--model", str(DEMO_PATH)]
    command += ["--host", "127.0.0.2", "--port", "0", "--api-key", "secret-key"]
    command += ["--config", str(tmp_path / "options.yaml"), "--log-format", "text"]
    command += ["--log-level", "warning", "--served-model-name", "ours", "--thinking"]
    command += ["--max-model-len", "2048", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(found[0] for line in lines if (found := re.findall(r"http://\S+:\d+", line)))
            assert url.startswith("http://127.0.0.2:")
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret-key")
            messages = [{"role": "user", "content": "What is a whale?"}]
            answer = client.chat.completions.create(model="ours", messages=messages, max_tokens=4)
            message = answer.choices[0].message.model_dump()
            assert message.get("reasoning_content") or message.get("reasoning")
            pieces = iter(client.completions.create(**{**LONG, "model": "ours"}, stream=True))
            next(pieces)
            os.kill(engine_of(process), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="killed by signal 9") as caught:
                list(pieces)
            assert caught.value.code == "engine_dead"
            assert httpx.get(f"{url}/health/live").status_code == 503
            said = "".join(lines)
            assert process.wait() == 1 and "engine died" in said, said
        finally:
            process.kill()
    assert "up to 3 sequences at once" in said, said
    assert "stopping" not in said, "a message of level info"
