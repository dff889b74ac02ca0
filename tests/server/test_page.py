"""The page at / in headless Chromium: chat, thinking, tool calls, the live numbers."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from finwhale import LLM
from finwhale.engine.plan.step_sizes import StepSizes

from .running import RunningServer
from .test_openai import ANSWER

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """The page, open; afterwards it must have asked no other host, and had no error."""
    page = browser.new_page(viewport={"width": 1100, "height": 720})
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.url)
    page.wait_for_selector("html[data-ready]")
    yield page
    page.close()
    assert not errors
    assert all(url.startswith((server.url, "data:")) for url in asked)


def configure(page: Page, **settings: str) -> None:
    page.click("#settings-button")
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    page.click("#settings-close")


def ask(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def test_chat_with_thinking_and_live_numbers(page: Page) -> None:
    expect(page.locator("#model")).to_have_text("demo")
    configure(page, temperature="0")
    ask(page, "What is the capital of France?")
    expect(page.locator(".turn.assistant .content")).to_have_text(ANSWER)
    page.check("#thinking")
    ask(page, "What is the capital of France?")
    second = page.locator(".turn.assistant").nth(1)
    expect(second.locator(".usage")).to_contain_text("written in", timeout=20_000)
    expect(second.locator("details.thinking div")).not_to_be_empty()
    expect(page.locator("#state")).to_have_text("ready")
    page.click("#engine-tab")
    expect(page.locator("#pages .bar").first).to_be_visible()
    expect(page.locator("figure .u-value").nth(1)).to_have_text(re.compile(r"^\d"))
    folder = os.environ.get("FINWHALE_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(3000)
        page.screenshot(path=str(Path(folder) / "page.png"))


def test_tool_calls_and_errors_are_shown(page: Page, server: RunningServer) -> None:
    configure(page, temperature="0")
    page.click("#tools-button")
    page.click("#tools-example")
    page.click("#tools-close")
    expect(page.locator("#tools-button")).to_have_text("Tools (1)")
    # The demo calls no tools by itself: the server's answer is one that does.
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=200, content_type="text/event-stream", body=TOOL_CALL))  # fmt: skip
    ask(page, "What is the weather in Rome?")
    call = page.locator(".turn .call")
    expect(call).to_have_text('weather {"city": "Rome"}')
    page.unroute("**/v1/chat/completions")
    configure(page, tokens="0")
    ask(page, "again")
    expect(page.locator(".turn .error")).to_contain_text("max_tokens")


def test_progress_of_a_long_prompt(
    page: Page, demo_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_llm._engine.scheduler, "sizes", StepSizes.given(8, 16))
    page.evaluate("""() => {
        window.seen = [];
        const look = () => seen.push(document.querySelector(".waiting")?.textContent);
        new MutationObserver(look).observe(document, {subtree: true, childList: true});
    }""")
    configure(page, temperature="0", tokens="2")
    ask(page, "Page after page, the whale read on. " * 60)
    expect(page.locator(".turn.assistant .usage")).to_contain_text("written in", timeout=60_000)
    seen = [text for text in page.evaluate("window.seen") if text and text.startswith("Reading")]
    shares = [int(text.removeprefix("Reading the prompt: ").removesuffix("%")) for text in seen]
    assert shares == sorted(shares) and 0 < shares[0] < 100
    assert page.locator(".waiting").count() == 0


def test_stop_frees_the_request(page: Page, server: RunningServer) -> None:
    configure(page, tokens="1500", temperature="2")
    ask(page, "Tell me a very long story about the sea.")
    expect(page.locator("#send")).to_have_text("Stop")
    page.wait_for_timeout(200)
    if page.locator("#send").text_content() == "Stop":
        page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")


def test_description(page: Page, server: RunningServer) -> None:
    page.goto(f"{server.url}/docs")
    expect(page.locator(".opblock-summary-path").first).to_be_visible()
    assert page.locator(".opblock").count() >= 13


TOOL_CALL = "".join(
    f"data: {text}\n\n"
    for text in (
        '{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}',
        '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","type":"function",'
        '"function":{"name":"weather","arguments":""}}]}}]}',
        '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,'
        '"function":{"arguments":"{\\"city\\": "}}]}}]}',
        '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,'
        '"function":{"arguments":"\\"Rome\\"}"}}]},"finish_reason":"tool_calls"}]}',
        "[DONE]",
    )
)
