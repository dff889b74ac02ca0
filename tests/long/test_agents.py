"""Claude Code and Codex, unmodified, fix a file with the embedded model.

The model cannot do it, and may write until it has no tokens left. The tests check that the
programs report no other error and that the server answers all their requests. Their prompts have
30,000 and 13,000 tokens; the model's context has 32,768. Where the server's context is smaller,
they must recognise that it is full.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from . import environments
from .servers import DemoServer

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
TASK = "Fix the function in add.py: it must add its arguments."
CODEX = """
model = "finwhale-demo"
model_provider = "finwhale"
[model_providers.finwhale]
name = "finwhale"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "--quiet", str(work)], check=True)
    (work / "add.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "home").mkdir()
    return work


def check(server: DemoServer, before: int, endpoint: str, turns: int) -> None:
    """Checks that the server answered at least a request for each turn, and refused none."""
    found = server.requests()[before:]
    assert all(entry["status"] == 200 for entry in found), found
    found = [entry for entry in found if entry["endpoint"] == endpoint]
    assert len(found) >= turns
    assert all(entry["finish"] in ("stop", "length") for entry in found)
    assert found[-1]["prompt_tokens"] > found[0]["prompt_tokens"]


@pytest.fixture(scope="module")
def claude_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = "@anthropic-ai/claude-code@2.1.197"
    return environments.make_npm(tmp_path_factory.mktemp("claude"), package)


@pytest.fixture(scope="module")
def codex_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.make_npm(tmp_path_factory.mktemp("codex"), "@openai/codex@0.171.0")


def claude(programs: Path, work: Path, url: str, *turn: str) -> list[dict[str, Any]]:
    """What Claude Code prints in a turn; the last entry is the result."""
    environment = {
        "HOME": str(work.parent / "home"),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "finwhale-demo",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [
        f"{programs}/claude", "--print", *turn, "--model", "finwhale-demo", "--verbose",
        "--output-format", "stream-json", "--max-turns", "4", "--permission-mode", "acceptEdits",
    ]  # fmt: skip
    return entries(environments.run(command, work, environment, 400, codes=(0, 1)))


def codex(programs: Path, work: Path, url: str, *turn: str) -> dict[str, Any]:
    """The last that Codex prints in a turn."""
    home = work.parent / "home"
    (home / "config.toml").write_text(CODEX.format(url=url))
    environment = {"HOME": str(home), "CODEX_HOME": str(home)}
    command = [f"{programs}/codex", "exec", "--skip-git-repo-check", "--json", *turn]
    return entries(environments.run(command, work, environment, 300, codes=(0, 1)))[-1]


def entries(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_claude_code(demo_server: DemoServer, work: Path, claude_programs: Path) -> None:
    before = len(demo_server.requests())
    for turn in ([TASK], ["--continue", "Try it again."]):
        answer = claude(claude_programs, work, demo_server.url, *turn)[-1]
        assert not answer["is_error"] or "output token maximum" in answer["result"], answer
        assert answer["usage"]["output_tokens"] > 0
        assert answer["usage"]["input_tokens"] > 0
    # The second turn's prompt begins with the first one's.
    assert answer["usage"]["cache_read_input_tokens"] > 25_000
    check(demo_server, before, "/v1/messages", 2)


def test_codex(demo_server: DemoServer, work: Path, codex_programs: Path) -> None:
    before = len(demo_server.requests())
    for turn in ([TASK], ["resume", "--last", "Try it again."]):
        last = codex(codex_programs, work, demo_server.url, *turn)
        assert last["type"] == "turn.completed" or "Incomplete response" in str(last), last
    check(demo_server, before, "/v1/responses", 2)


def test_a_context_that_their_own_prompts_fill(
    work: Path, tmp_path: Path, claude_programs: Path, codex_programs: Path
) -> None:
    server = DemoServer(tmp_path / "log", "--max-model-len", "8192")
    try:
        last = codex(codex_programs, work, server.url, TASK)
        assert "ran out of room in the model's context window" in str(last), last
        last = claude(claude_programs, work, server.url, TASK)[-1]
        assert last["terminal_reason"] == "prompt_too_long" and "limit 8191" in last["result"]
    finally:
        server.program.close()


def test_claude_code_compacts(work: Path, tmp_path: Path, claude_programs: Path) -> None:
    server = DemoServer(tmp_path / "log", "--max-model-len", "30600")
    try:
        claude(claude_programs, work, server.url, TASK)
        long = "Try it again. " * 300
        found = claude(claude_programs, work, server.url, "--continue", long)
        assert any(entry.get("status") == "compacting" for entry in found), found
    finally:
        server.program.close()
