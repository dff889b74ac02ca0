"""Checkpoints that are named by a repository, from an endpoint on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

import finwhale
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.demo import DEMO_PATH
from finwhale.errors import CheckpointError, FinwhaleError, ResourceError

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
from huggingface_hub import constants  # noqa: E402

NAME = "whales/Fin-V4"
COMMIT = "0123456789" * 4
GATED = "whales/Gated"


@dataclass
class Endpoint:
    """The part of the Hub's protocol that downloads use, for one repository.

    Attributes:
        files: contents by name.
        fetched: names of the files whose contents were sent, in order.
        breaks: a file whose transfer breaks off in the middle.
    """

    files: dict[str, bytes]
    fetched: list[str] = field(default_factory=list)
    breaks: str = ""
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    endpoint: Endpoint

    def do_HEAD(self) -> None:
        self.answer(send=False)

    def do_GET(self) -> None:
        self.answer(send=True)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, send: bool) -> None:
        path = unquote(urlparse(self.path).path)
        if path.startswith(f"/api/models/{GATED}"):
            self.refuse(403, "GatedRepo")
        elif path == f"/api/models/{NAME}/revision/main":
            self.send({"id": NAME, "sha": COMMIT, "siblings": []})
        elif path.startswith(f"/api/models/{NAME}/revision/"):
            self.refuse(404, "RevisionNotFound")
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            self.send(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                    for name, data in self.endpoint.files.items()
                ]
            )
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self.send_file(path.removeprefix(f"/{NAME}/resolve/{COMMIT}/"), send)
        else:
            self.refuse(404, "RepoNotFound")

    def send(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_file(self, name: str, send: bool) -> None:
        data = self.endpoint.files[name]
        self.send_response(200)
        self.send_header("ETag", f'"{etag(data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if send:
            self.endpoint.fetched.append(name)
            broken = name == self.endpoint.breaks
            self.wfile.write(data[: len(data) // 2] if broken else data)
            self.close_connection = True

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    files = {
        path.name: path.read_bytes()
        for path in DEMO_PATH.iterdir()
        if path.suffix in (".json", ".safetensors")
    }
    endpoint = Endpoint({**files, "README.md": b"# not needed", "original/x.pth": b"nor this"})
    handler = type("OneHandler", (Handler,), {"endpoint": endpoint})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint.url = f"http://127.0.0.1:{server.server_port}"
        template = f"{endpoint.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield endpoint
        server.shutdown()
        thread.join()


def test_the_command_runs_a_repository(endpoint: Endpoint, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": endpoint.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "finwhale", "inspect", NAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "complete: every tensor" in done.stdout


def test_only_what_is_needed_is_downloaded_and_once(endpoint: Endpoint) -> None:
    directory = checkpoint_directory(NAME)
    needed = {name for name in endpoint.files if name not in ("README.md", "original/x.pth")}
    assert {path.name for path in directory.iterdir()} == needed
    assert sorted(endpoint.fetched) == sorted(needed)
    endpoint.fetched.clear()
    assert checkpoint_directory(NAME) == directory
    assert not endpoint.fetched


def test_a_broken_download_goes_on_with_the_missing_files(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the library's attempts
    endpoint.breaks = "tokenizer.json"
    with pytest.raises(ResourceError, match=r"cannot download whales/Fin-V4: peer closed"):
        checkpoint_directory(NAME)
    endpoint.breaks = ""
    complete = set(endpoint.fetched) - {"tokenizer.json"}
    endpoint.fetched.clear()
    directory = checkpoint_directory(NAME)
    assert (directory / "tokenizer.json").read_bytes() == endpoint.files["tokenizer.json"]
    assert "tokenizer.json" in endpoint.fetched
    assert not complete & set(endpoint.fetched)


def test_without_network_the_cache_serves(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint_directory(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert checkpoint_directory(NAME) == directory
    with pytest.raises(ResourceError, match=r"lacks files of whales/Other.*refused"):
        checkpoint_directory("whales/Other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint_directory(NAME) == directory
    with pytest.raises(ResourceError, match=r"whales/Other.*HF_HUB_OFFLINE is set"):
        checkpoint_directory("whales/Other")


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["finwhale.checkpoint.hub"]
    usage = module.shutil._ntuple_diskusage(10**9, 10**9 - 5_000_000, 5_000_000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)


def test_files_in_the_cache_need_no_room(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint_directory(NAME)
    fill_disk(monkeypatch)
    assert checkpoint_directory(NAME) == directory


def test_a_full_disk_is_reported_first(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(ResourceError, match=r"needs [\d.]+ GB in .*hub, which has 0.0 GB free"):
        checkpoint_directory(NAME)
    assert not endpoint.fetched


@pytest.mark.parametrize(
    "name, revision, message",
    [
        ("whales/Unknown", None, "there is no such directory, and no such repository"),
        (NAME, "no-such-branch", "has no revision no-such-branch"),
        (GATED, None, "is gated: accept its terms"),
    ],
)
def test_errors_of_the_endpoint(
    name: str, revision: str | None, message: str, endpoint: Endpoint
) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint_directory(name, revision)


def test_a_directory_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whales" / "Fin-V4").mkdir(parents=True)
    assert checkpoint_directory(NAME) == Path(NAME)
    assert checkpoint_directory(None) == DEMO_PATH
    for path in ("/no/such", "./whales/No", "whales", "a/b/c"):
        assert checkpoint_directory(path) == Path(path)
    with pytest.raises(FinwhaleError, match="only a repository has revisions"):
        checkpoint_directory(NAME, "main")


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "finwhale.checkpoint.hub", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        FinwhaleError, match=r"needs huggingface_hub: pip install 'finwhale\[hub\]'"
    ):
        finwhale.LLM("whales/Fin-V4")
