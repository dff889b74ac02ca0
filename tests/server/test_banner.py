"""The text that `finwhale serve` prints in a terminal, and the commands in it, which must work."""

import json
import logging
import shlex
import subprocess
import sys

import pytest

from finwhale.server.banner import banner
from finwhale.server.link.wire import Ready
from finwhale.server.observe import logs

from .running import RunningServer

READY = Ready(8192, 64, 2048, 4096, 0, ranks="2 ranks, cuda:0")


def commands(text: str) -> dict[str, list[str]]:
    """The commands of a banner by their programs."""
    lines = [shlex.split(line) for line in text.splitlines() if "messages" in line]
    return {line[0]: line for line in lines}


def test_the_commands_run_as_they_stand(server: RunningServer) -> None:
    text = banner(server.state.ready, server.state.model_name, server.url, needs_key=False)
    assert server.url in text and "1 rank, cpu" in text
    assert "--draft-tokens auto lets the checkpoint's MTP layer draft" in text
    found = commands(text)
    curl = subprocess.run(found["curl"], capture_output=True, check=True, timeout=200)
    assert json.loads(curl.stdout)["choices"][0]["message"]["content"]
    _, *arguments = found["python"]
    python = subprocess.run(
        [sys.executable, *arguments], capture_output=True, check=True, timeout=200
    )
    assert python.stdout.strip()


def test_a_key_and_a_unix_socket() -> None:
    keyed = commands(banner(READY, "v4", "https://127.0.0.1:8000", needs_key=True))
    assert "Authorization: Bearer YOUR_KEY" in keyed["curl"]
    assert 'api_key="YOUR_KEY"' in keyed["python"][-1]
    text = banner(READY, "v4", "unix:/run/finwhale.sock", needs_key=False)
    found = commands(text)
    assert found["curl"][1:3] == ["--unix-socket", "/run/finwhale.sock"]
    assert "python" not in found
    assert "--draft-tokens" not in text
    assert "8,192 tokens" in text and "2 ranks, cuda:0" in text


@pytest.mark.parametrize("log_format, is_json", [("json", True), ("text", False), ("auto", True)])
def test_the_form_of_the_log(
    log_format: str, is_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here stderr is no terminal."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure("info", log_format)
        root.warning("started", extra={"seconds": 1.5, "name_of_it": "é"})
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    line = capsys.readouterr().err.strip()
    assert line.startswith("{") == is_json
    if not is_json:
        assert line.split(" ", 1)[1] == 'warning started seconds=1.5 name_of_it="é"'
