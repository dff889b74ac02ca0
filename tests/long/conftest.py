"""Long tests run when they are asked for: `just long` sets FINWHALE_LONG."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from .servers import DemoServer

if not os.environ.get("FINWHALE_LONG"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, or Playwright's, which is installed where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        install = [sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"]
        subprocess.run(install, check=True, timeout=540)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    server = DemoServer(tmp_path_factory.mktemp("server") / "log")
    try:
        yield server
    finally:
        server.program.close()
