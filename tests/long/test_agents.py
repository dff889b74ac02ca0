"""Claude Code and Codex, unmodified, fix a file with the embedded model.

The model cannot do it, and may write until it has no tokens left. The tests check that the
programs report no other error and that the server answers all their requests. Their prompts have
30,000 and 13,000 tokens; the model's context has 32,768.
"""

import json
import shutil
import subprocess
from pathlib import Path

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


def test_claude_code(demo_server: DemoServer, work: Path, tmp_path: Path) -> None:
    programs = environments.make_npm(tmp_path / "npm", "@anthropic-ai/claude-code@2.1.197")
    environment = {
        "HOME": str(tmp_path / "home"),
        "ANTHROPIC_BASE_URL": demo_server.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "finwhale-demo",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    before = len(demo_server.requests())
    for turn in ([TASK], ["--continue", "Try it again."]):
        command = [
            f"{programs}/claude", "--print", *turn, "--model", "finwhale-demo",
            "--output-format", "json", "--max-turns", "4", "--permission-mode", "acceptEdits",
        ]  # fmt: skip
        output = environments.run(command, work, environment, 200, codes=(0, 1))
        answer = json.loads(output.splitlines()[-1])
        assert not answer["is_error"] or "output token maximum" in answer["result"], answer
        assert answer["usage"]["output_tokens"] > 0
    check(demo_server, before, "/v1/messages", 2)


def test_codex(demo_server: DemoServer, work: Path, tmp_path: Path) -> None:
    programs = environments.make_npm(tmp_path / "npm", "@openai/codex@0.169.0")
    home = tmp_path / "home"
    (home / "config.toml").write_text(CODEX.format(url=demo_server.url))
    environment = {"HOME": str(home), "CODEX_HOME": str(home)}
    before = len(demo_server.requests())
    for turn in ([TASK], ["resume", "--last", "Try it again."]):
        command = [f"{programs}/codex", "exec", "--skip-git-repo-check", "--json", *turn]
        output = environments.run(command, work, environment, 300, codes=(0, 1))
        last = [json.loads(line) for line in output.splitlines() if line.startswith("{")][-1]
        assert last["type"] == "turn.completed" or "Incomplete response" in str(last), output
    check(demo_server, before, "/v1/responses", 2)
