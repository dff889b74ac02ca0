"""Makes the pictures of the docs: the banner of `finwhale serve`, and the page.

    python tools/screenshots.py [--out docs/images]

The embedded model answers, so the pictures show what a reader sees after installing Finwhale. They
are made in headless Chromium, which Playwright installs where there is none. All pictures together
must stay below MAX_BYTES, because they are part of the repository.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
MAX_BYTES = 300_000
START_S = 120
QUESTIONS = ["What is the capital of France?", "What do bees make?"]
FINWHALE = [sys.executable, "-m", "finwhale"]
REQUESTS = ["--input-tokens", "50:300", "--output-tokens", "20:100", "--num-requests", "24"]


@contextmanager
def served(port: int, *options: str) -> Iterator[str]:
    """Run `finwhale serve` in a terminal of its own; yields what it has written when ready."""
    ours, theirs = pty.openpty()
    command = [*FINWHALE, "serve", "--port", str(port), *options]
    environment = {**os.environ, "COLUMNS": "110", "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    try:
        text, end = "", time.monotonic() + START_S
        while "python -c" not in text:
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit(f"finwhale serve is not ready:\n{text}")
            text += os.read(ours, 65536).decode(errors="replace")
        # A terminal that nobody reads would stop the server.
        threading.Thread(target=drain, args=(ours,), daemon=True).start()
        yield text
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def drain(file: int) -> None:
    """Read a terminal until it closes."""
    with suppress(OSError):
        while os.read(file, 65536):
            pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as end:
        return int(end.getsockname()[1])


def write_banner(written: str, port: int, path: Path) -> None:
    """The banner as an SVG. `written` is the whole output of the terminal."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace(str(port), "8000")
    lines = plain.replace("\r\n", "\n").replace("\r", "\n").splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"\s+Finwhale [\d.]+", line))
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text("$ finwhale serve", style="bold"))
    console.print(Text("\n".join(lines[first - 1 :]).rstrip()), highlight=False)
    # The style sheet names a font of another host; the reader's own is as good.
    svg = console.export_svg(title="finwhale serve")
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


def shoot(page: Page, path: Path) -> None:
    page.screenshot(path=path, type="jpeg", quality=72)


def write_page(browser: Browser, url: str, folder: Path) -> None:
    """The chat with two answers, and the engine view while a load runs."""
    page = browser.new_page(viewport={"width": 1100, "height": 640})
    visit(page, url)
    for count, question in enumerate(QUESTIONS, 1):
        ask(page, question, count)
    shoot(page, folder / "page-chat.jpg")
    page.click("#engine-tab")
    load = [*FINWHALE, "bench", "serving", "--url", url, "--model", "finwhale-demo", *REQUESTS]
    running = subprocess.Popen(
        [*load, "--request-rate", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    page.wait_for_timeout(13_000)
    shoot(page, folder / "page-engine.jpg")
    running.terminate()
    running.wait(30)
    page.close()


def write_trouble(browser: Browser, url: str, folder: Path) -> None:
    """The page while the model loads, without an answer of the server, and without a key."""
    page = browser.new_page(viewport={"width": 1100, "height": 540})
    loading = {"alive": False, "loading": True, "loaded_bytes": [43, 100]}

    def answer_loading(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | loading)

    page.route("**/live", answer_loading)
    visit(page, url)
    shoot(page, folder / "page-loading.jpg")
    page.unroute("**/live")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("#send")).to_be_enabled()
    ask(page, QUESTIONS[0], 1)
    page.route("**/live", lambda route: route.abort())
    expect(page.locator("#notice-text")).to_contain_text("does not answer")
    shoot(page, folder / "page-gone.jpg")
    page.route("**/live", lambda route: route.fulfill(status=401, body="{}"))
    expect(page.locator("#key-dialog")).to_be_visible()
    shoot(page, folder / "page-key.jpg")
    page.close()


def write_full(browser: Browser, url: str, folder: Path) -> None:
    """A conversation that has filled a small context, on a phone."""
    page = browser.new_page(viewport={"width": 390, "height": 720})
    visit(page, url)
    for count in range(1, 100):
        ask(page, QUESTIONS[count % 2], count)
        if page.locator(".full").count():
            break
    page.locator(".full").scroll_into_view_if_needed()
    shoot(page, folder / "page-full.jpg")
    page.close()


def visit(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("html[data-ready]")


def ask(page: Page, question: str, count: int) -> None:
    """Ask, and wait for the answer, which is the conversation's `count`th."""
    page.fill("#text", question)
    page.press("#text", "Enter")
    expect(page.locator(".turn.assistant .regenerate")).to_have_count(count, timeout=60_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images", help="folder to write to")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        install = [sys.executable, "-m", "playwright", "install", "chromium"]
        subprocess.run(install, check=True)
    port = free_port()
    with served(port) as written, sync_playwright() as playwright:
        write_banner(written, port, folder / "banner.svg")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        url = f"http://127.0.0.1:{port}"
        write_page(browser, url, folder)
        write_trouble(browser, url, folder)
        with served(port := free_port(), "--max-model-len", "384"):
            write_full(browser, f"http://127.0.0.1:{port}", folder)
        browser.close()
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    print("\n".join(f"{size:8,}  {name}" for name, size in sizes.items()))
    if sum(sizes.values()) > MAX_BYTES:
        raise SystemExit(f"the pictures take more than {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()
