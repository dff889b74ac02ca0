"""What the server does for its page: its files, and the state that it shows."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import finwhale.server
from finwhale.server.api.page import PAGE_PATH, PageFiles, PageState, page_response

from .running import RunningServer
from .test_limits import request, wait_until

WEB = Path(finwhale.server.__file__).parent / "web"
VENDOR = WEB / "vendor"


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=[Mount(PAGE_PATH, PageFiles())]))


def test_policy_allows_no_inline_script() -> None:
    response = page_response()
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy and "script-src 'self'" in policy
    text = (WEB / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"(src|href)=\"(https?:)?//", text)


def test_every_file_that_the_page_names_is_served(client: TestClient) -> None:
    named = set(re.findall(r'"(page/[^"]+)"', (WEB / "index.html").read_text()))
    for path in WEB.glob("*.js"):
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert {"page/main.js", "page/style.css", "page/vendor/purify.js"} <= named
    for name in named:
        answer = client.get(f"/{name}")
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", ["%2e%2e/page.py", "..%2fpage.py", "none.js", "", "vendor"])
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"{PAGE_PATH}/{name}").status_code == 404


def test_vendored_libraries_are_small_and_have_licences() -> None:
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < 600_000
    listed = json.loads((VENDOR / "versions.json").read_text())
    assert all(one["licence"] in ("MIT", "Apache-2.0", "BSD-3-Clause") for one in listed)
    scripts = sorted(path.stem for path in VENDOR.glob("*.js"))
    assert scripts == sorted(path.name.split(".")[0] for path in VENDOR.glob("*.LICENSE.txt"))
    assert len(scripts) == len(listed)


def test_page_loads_are_neither_logged_nor_counted(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no file is logged and counted, and so are requests for the model."""
    caplog.set_level(logging.DEBUG, "finwhale.server.requests")
    paths = ["/", "/page/main.js", "/page/style.css", "/page/none.js", "/v1/models"]
    assert [request(server, "GET", path)[0] for path in paths] == [200, 200, 200, 404, 200]
    wait_until(lambda: len(caplog.records) == len(paths))  # a request is logged after its answer
    levels = [record.levelname for record in caplog.records]
    assert sorted(levels) == ["DEBUG", "DEBUG", "DEBUG", "INFO", "INFO"]
    _, _, text = request(server, "GET", "/metrics")
    counts = [line for line in text.decode().splitlines() if "requests_total{" in line]
    unknown = [line for line in counts if 'endpoint="unknown"' in line]
    assert unknown == ['finwhale_requests_total{endpoint="unknown",status="404"} 1.0']


def test_the_state_that_the_page_shows(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(request(server, "GET", "/live")[2])
    assert (found["model"], found["max_model_len"]) == ("demo", 2048)
    assert found["alive"] and not found["loading"] and found["reason"] is None
    plain, thinking = found["defaults"]["disabled"], found["defaults"]["enabled"]
    assert plain["temperature"] == 1.0 and plain["repetition_penalty"] == 1.0
    assert 2000 < plain["max_tokens"] <= thinking["max_tokens"] < 2048
    monkeypatch.setattr(server.client, "ready", None)
    found = PageState(server.state).now()
    assert found["loading"] and not found["alive"] and found["max_model_len"] == 0
    assert found["reason"] == "the model is loading" and not found["defaults"]
    monkeypatch.setattr(server.client, "failure", "killed")
    found = PageState(server.state).now()
    assert not found["loading"] and not found["alive"] and found["reason"] == "killed"


def test_defaults_are_those_of_the_checkpoint(start: Callable[..., RunningServer]) -> None:
    server = start()
    server.state.sampling_defaults = {"temperature": 0.25, "top_k": 7}
    found = PageState(server.state).now()["defaults"]["enabled"]
    assert (found["temperature"], found["top_k"], found["top_p"]) == (0.25, 7, 1.0)


def test_a_limit_below_every_prompt(start: Callable[..., RunningServer]) -> None:
    """It leaves the page without defaults, but not without an answer."""
    status, _, text = request(start(max_prompt_tokens=1), "GET", "/live")
    assert status == 200 and json.loads(text)["defaults"] == {}
