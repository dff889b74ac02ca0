"""Coding agents, unmodified, with the settings that `finwhale connect` prints, fix a file.

The embedded model cannot do it, and may write until it has no tokens left. The tests check that
the programs report no other error and that the server answers all their requests. Where the
server's context is small, they must compact a conversation before it is full, or recognise that
it is full.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from finwhale.cli.connect import PROGRAMS

from . import environments
from .servers import DemoServer, Program, free_ports, python, wait_for

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
TASK = "Fix the function in add.py: it must add its arguments."
PACKAGES = {
    "claude-code": ("@anthropic-ai/claude-code@2.1.332", "claude"),
    "codex": ("@openai/codex@0.171.0", "codex"),
    "opencode": ("opencode-ai@1.18.33", "opencode"),
    "cline": ("cline@3.0.65", "cline"),
    "continue": ("@continuedev/cli@1.5.47", "cn"),
    "qwen-code": ("@qwen-code/qwen-code@0.24.4", "qwen"),
}
# How each of them works on a task without asking.
ARGUMENTS = {
    "claude-code": ["--verbose", "--output-format", "stream-json", "--max-turns", "4",
                    "--permission-mode", "acceptEdits", "--print"],
    "codex": ["exec", "--skip-git-repo-check", "--json",
              "-c", "model_providers.finwhale.stream_max_retries=0"],
    "opencode": ["run", "--format", "json"],
    "cline": ["--json"],
    "continue": ["--print", "--auto"],
    "qwen-code": ["--yolo", "--output-format", "json", "--prompt"],
}  # fmt: skip
PROXY_KEY = f"sk-{os.urandom(16).hex()}"
# The embedded model may write until the context is full; this limit saves time.
SHORT = {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "--quiet", str(work)], check=True)
    (work / "add.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "home").mkdir()
    return work


class Agents:
    """Installs each agent once, and runs them with the settings that the command prints."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._programs: dict[str, Path] = {}

    def run(self, name: str, text: str, work: Path, *turn: str) -> str:
        """What an agent prints in a turn, with these settings."""
        package, program = PACKAGES[name]
        if name not in self._programs:
            self._programs[name] = environments.make_npm(self._directory / name, package)
        home = work.parent / "home"
        command = [str(self._programs[name] / program), *ARGUMENTS[name], *turn]
        environment = {"HOME": str(home), "DISABLE_AUTOUPDATER": "1"}
        environment["CLINE_SESSION_BACKEND_MODE"] = "local"  # Cline starts no daemon
        if name == "claude-code":
            command = ["bash", "-c", f'{text}\nexec "$@"', "bash", *command]
            environment |= SHORT
        else:
            place = home / PROGRAMS[name][0].removeprefix("~/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return environments.run(command, work, environment, 400, codes=(0, 1))


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    directory = tmp_path_factory.mktemp("agents")
    yield Agents(directory)
    shutil.rmtree(directory)


def connect(name: str, url: str, *more: str) -> str:
    """What `finwhale connect` prints."""
    command = python("-m", "finwhale", "connect", name, "--url", url, *more)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def entries(output: str) -> list[dict[str, Any]]:
    """The lines of JSON in an output, without other JSON than objects."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def check(server: DemoServer, before: int, endpoint: str) -> list[dict[str, Any]]:
    """The requests after the first `before`, of which the server refused none."""
    found = server.requests()[before:]
    assert found and all(entry["status"] == 200 for entry in found), found
    assert {entry["endpoint"] for entry in found} == {endpoint}
    assert all(entry["finish"] in ("stop", "length", "tool_calls") for entry in found), found
    return found


@pytest.mark.parametrize("name", ["opencode", "cline", "continue", "qwen-code"])
def test_a_task(name: str, demo_server: DemoServer, work: Path, agents: Agents) -> None:
    before = len(demo_server.requests())
    output = agents.run(name, connect(name, demo_server.url), work, TASK)
    found = check(demo_server, before, "/v1/chat/completions")
    assert max(entry["prompt_tokens"] for entry in found) > 2_000
    assert output.strip() and '"type":"error"' not in output and '"is_error":true' not in output


def test_claude_code_compacts_in_time(demo_server: DemoServer, work: Path, agents: Agents) -> None:
    """The second turn would leave less of the context than the 13,000 tokens that it keeps free."""
    before, text = len(demo_server.requests()), connect("claude-code", demo_server.url)
    for turn in ([TASK], ["--continue", "Try it again. " * 1000]):
        found = entries(agents.run("claude-code", text, work, *turn))
        answer = found[-1]
        assert not answer["is_error"] or "output token maximum" in answer["result"], answer
        assert answer["modelUsage"]["finwhale-demo"]["contextWindow"] == 32768
        compacts = any(entry.get("status") == "compacting" for entry in found)
        assert compacts == (turn[0] == "--continue"), found
    requests = check(demo_server, before, "/v1/messages")
    assert requests[0]["prompt_tokens"] > 10_000
    assert requests[1]["cached_tokens"] > 10_000  # the summary's prompt begins with the first one's


def test_codex_compacts_in_time(work: Path, tmp_path: Path, agents: Agents) -> None:
    """It begins before the next turn; the first one leaves less than 10% of the context."""
    server = DemoServer(tmp_path / "log", "--max-model-len", "18000")
    try:
        text = connect("codex", server.url)
        for _ in range(4):  # where the model fills the context, Codex does not know the tokens
            last = entries(agents.run("codex", text, work, TASK * 180))[-1]
            if last["type"] == "turn.completed":
                break
        *_, first = check(server, 0, "/v1/responses")
        before = len(server.requests())
        agents.run("codex", text, work, "resume", "--last", "Try it again.")
        summary = server.requests()[before]
        assert summary["status"] == 200
        assert 0 < summary["prompt_tokens"] < first["prompt_tokens"]  # it has no tools
    finally:
        server.program.close()


def test_a_context_that_their_own_prompts_fill(work: Path, tmp_path: Path, agents: Agents) -> None:
    server = DemoServer(tmp_path / "log", "--max-model-len", "8192")
    try:
        output = agents.run("codex", connect("codex", server.url), work, TASK)
        assert "ran out of room in the model's context window" in output, output
        text = connect("claude-code", server.url)
        last = entries(agents.run("claude-code", text, work, TASK))[-1]
        assert last["terminal_reason"] == "prompt_too_long", last
    finally:
        server.program.close()


@pytest.fixture
def proxy(demo_server: DemoServer, tmp_path: Path) -> Iterator[str]:
    """The address of LiteLLM's proxy with the settings that the command prints."""
    directory = tmp_path / "environment"
    programs = environments.make(directory, "litellm[proxy]==1.108.7")
    (config := tmp_path / "config.yaml").write_text(connect("litellm", demo_server.url))
    (port,) = free_ports(1)
    command = [f"{programs}/litellm", "--config", str(config), "--host", "127.0.0.1"]
    environment = {"LITELLM_MASTER_KEY": PROXY_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    program = Program([*command, "--port", str(port)], tmp_path / "proxy.log", environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_alive(url), 120, [program])
        yield url
    finally:
        program.close()
        shutil.rmtree(directory)


def is_alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/liveliness").status_code == 200
    except httpx.TransportError:
        return False


def test_litellm(demo_server: DemoServer, proxy: str, work: Path, agents: Agents) -> None:
    def post(url: str, path: str, content: str) -> httpx.Response:
        message = {"role": "user", "content": content}
        body: dict[str, Any] = {"model": "finwhale-demo", "messages": [message]}
        if path != "/v1/messages/count_tokens":
            body["max_tokens"] = 4
        headers = {"Authorization": f"Bearer {PROXY_KEY}"}
        return httpx.post(url + path, json=body, headers=headers, timeout=120)

    count = "/v1/messages/count_tokens"
    direct = post(demo_server.url, count, "Tell me about fin whales.").json()["input_tokens"]
    assert post(proxy, count, "Tell me about fin whales.").json()["input_tokens"] == direct > 1
    for path in ("/v1/messages", "/v1/chat/completions"):
        refused = post(proxy, path, "whale " * 40_000)
        assert refused.status_code == 400 and "ContextWindowExceededError" in refused.text
    before = len(demo_server.requests())
    text = connect("claude-code", proxy, "--api-key", PROXY_KEY)
    answer = entries(agents.run("claude-code", text, work, TASK))[-1]
    assert not answer["is_error"] or "output token maximum" in answer["result"], answer
    check(demo_server, before, "/v1/messages")
