"""`finwhale connect` asks a real server; what it prints names that server and its model."""

import json
import tomllib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import yaml

from finwhale.cli.connect import KEY, PROGRAMS
from finwhale.cli.main import main

from .running import MODEL, RunningServer

Capture = pytest.CaptureFixture[str]


def test_settings_of_every_program(
    server: RunningServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY, raising=False)
    context = server.state.max_model_len
    for name, (place, _) in PROGRAMS.items():
        assert main(["connect", name, "--url", f"{server.url}/v1/"]) == 0
        out, err = capsys.readouterr()
        assert err == f"# for {place}:\n"
        assert server.url in out and MODEL in out and str(context) in out
        assert ("none" in out) == (name != "zed")  # Zed asks for the key itself
        if name == "claude-code":
            assert f"export ANTHROPIC_BASE_URL={server.url}\n" in out
        elif name == "codex":
            assert tomllib.loads(out)["model_context_window"] == context
        elif name in ("continue", "litellm"):
            assert yaml.safe_load(out)
        else:
            assert json.loads(out)
    assert main(["connect"]) == 0
    assert set(PROGRAMS) == {line.split()[0] for line in capsys.readouterr().out.splitlines()}


def refused(arguments: list[str], capsys: Capture) -> str:
    assert main(["connect", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_keys(
    start: Callable[..., RunningServer], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = start(api_keys=("ann:secret-of-ann",)).url
    monkeypatch.delenv(KEY, raising=False)
    assert "needs an API key" in refused(["codex", "--url", url], capsys)
    monkeypatch.setenv(KEY, "secret-of-eve")
    assert "needs another API key" in refused(["codex", "--url", url], capsys)
    assert main(["connect", "codex", "--url", url, "--api-key", "secret-of-ann"]) == 0
    assert "secret-of-ann" in capsys.readouterr().out
    monkeypatch.setenv(KEY, "secret-of-ann")
    assert main(["connect", "codex", "--url", url]) == 0
    assert "secret-of-ann" in capsys.readouterr().out


def test_mistakes(capsys: Capture) -> None:
    assert "did you mean codex?" in refused(["codx"], capsys)
    assert "lists the programs" in refused(["emacs"], capsys)
    assert "does not answer" in refused(["zed", "--url", "http://127.0.0.1:9"], capsys)
    assert "does not answer" in refused(["zed", "--url", "localhost:8000"], capsys)


@pytest.mark.parametrize(
    ("body", "what"), [(b'{"data": [{"id": "x"}]}', "context_length"), (b"<p>", "context_length")]
)
def test_another_server(body: bytes, what: str, capsys: Capture) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        assert what in refused(["codex", "--url", url], capsys)
