"""The files of the page: small, complete, with licences, and without inline scripts."""

import json
import re
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import finwhale.server
from finwhale.server.api.page import PAGE_PATH, PageFiles, page_response

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
