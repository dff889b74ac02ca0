"""The page at / in headless Chromium, one test for each thing that a user does with it.

FINWHALE_SCREENSHOTS names a folder for pictures of it.
"""

import json
import os
import re
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from .page_answers import HOSTILE, RICH, Model, chunks
from .servers import Program, free_ports, is_ready, python, wait_for

AXE = "axe-core@4.14.1"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("server") / "log"
    program = Program(python("-m", "finwhale", "serve", "--port", str(port)), log)
    try:
        wait_for(lambda: is_ready(port), 120, [program])
        yield f"http://127.0.0.1:{port}"
    finally:
        program.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "pack", AXE], cwd=folder, check=True, capture_output=True, timeout=120)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page in a new profile; afterwards it must have asked no other host, without errors."""
    page = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.on("request", lambda asked: None if is_own(asked.url, url) else wrong.append(asked.url))
    page.on("dialog", lambda dialog: dialog.accept())
    page.set_default_timeout(20_000)
    visit(page, url)
    yield page
    page.context.close()
    assert not wrong


def is_own(asked: str, url: str) -> bool:
    return asked.startswith((f"{url}/", "data:", "blob:"))


def visit(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("html[data-ready]")


def ask(page: Page, text: str = QUESTION, answers: int = 1) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")
    expect(page.locator(".turn.assistant .regenerate")).to_have_count(answers)


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("FINWHALE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_markdown_code_and_formulas(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    Model(page, chunks(RICH))
    ask(page)
    content = page.locator(".turn.assistant .content")
    expect(content.locator("h2")).to_have_text("A heart")
    expect(content.locator("strong")).to_have_text("heart")
    expect(content.locator("td").last).to_have_text("70")
    expect(content.locator("math")).to_have_count(2)
    expect(content.locator(".hljs-keyword").first).to_have_text("def")
    expect(content.locator("a")).to_have_attribute("rel", "noopener noreferrer")
    content.get_by_role("button", name="Copy python code").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == RICH.partition("```python\n")[2].partition("\n```")[0]


def test_text_never_becomes_html(page: Page) -> None:
    model = Model(page, chunks(HOSTILE, size=7))
    ask(page, HOSTILE)
    assert model.bodies[0]["messages"][0]["content"] == HOSTILE.strip()
    page.wait_for_timeout(500)
    talk = page.locator("#talk")
    for tag in ("script", "img", "svg", "iframe", "form.evil", "style", "object", "mglyph"):
        expect(talk.locator(tag)).to_have_count(0)
    attributes = page.evaluate("""[...document.querySelectorAll('#talk *')].flatMap(node =>
        [...node.attributes].map(one => one.name + '=' + one.value))""")
    assert not [one for one in attributes if one.startswith("on") or one.startswith("href=java")]
    assert all("example.org" not in one or one.startswith("href=https://") for one in attributes)
    expect(talk).to_contain_text("<script>window.broken = 1</script>")
    for link in talk.locator("a").all():
        assert str(link.get_attribute("href")).startswith("https://")
    assert page.evaluate("window.broken") is None
    page.reload()
    assert page.evaluate("window.broken") is None


@pytest.mark.parametrize(
    "text",
    [
        "|a|b|\n|-|-|\n" + "|x|y|\n" * 3000,
        ">" * 20_000 + " deep",
        "- " * 20_000,
        "[" * 50_000,
        "*a **b " * 10_000,
        "`" * 30_000 + "$" * 30_000,
        "```python\n" + "x = (\n" * 10_000,
        "$" + r"\frac{" * 150 + "$",
        "word " * 60_000,
    ],
    ids=["table", "quotes", "lists", "brackets", "stars", "ticks", "code", "fractions", "long"],
)
def test_large_answers_end(page: Page, text: str) -> None:
    """The page answers clicks after an answer that is expensive to show."""
    Model(page, chunks(text, size=1000))
    ask(page)
    page.click("#new")
    expect(page.locator(".welcome")).to_be_visible()


def test_streaming_makes_only_the_last_block_again(page: Page) -> None:
    """Elements of earlier blocks stay the same while an answer grows."""
    kept = page.evaluate("""async () => {
        const {MarkdownView} = await import('/page/markdown.js');
        const box = document.createElement('div'), view = new MarkdownView(box);
        const pause = () => new Promise(done => setTimeout(done, 250));
        view.grow('# One\\n\\nfirst\\n\\nsec'); await pause();
        const before = [...box.children];
        view.grow('# One\\n\\nfirst\\n\\nsecond **bold**\\n\\n- item'); await pause();
        const after = [...box.children];
        const same = [before[0] === after[0], before[1] === after[1], before[2] === after[2]];
        let changes = 0;
        new MutationObserver(() => changes++).observe(box, {childList: true});
        let text = view.text;
        for (let i = 0; i < 100; i++) {
            view.grow(text += ' more');
            await new Promise(done => setTimeout(done, 10));
        }
        return {same, changes, html: box.textContent.includes('bold')};
    }""")
    assert kept["same"] == [True, True, False] and kept["html"]
    assert 1 <= kept["changes"] <= 20


def test_conversations_are_kept(page: Page, url: str) -> None:
    Model(page, chunks("An answer about *whales*."))
    ask(page, "first question")
    page.click("#new")
    ask(page, "second question")
    visit(page, url)
    entries = page.locator("button.conversation")
    expect(entries).to_have_text(["second question", "first question"])
    page.fill("#search", "FIRST")
    expect(entries).to_have_text(["first question"])
    page.fill("#search", "whales")
    expect(entries).to_have_count(2)
    entries.last.click()
    page.click("#menu-button")
    page.click("#rename")
    page.fill("#rename-text", "Renamed")
    page.press("#rename-text", "Enter")
    expect(page.locator("#title")).to_have_text("Renamed")
    saved = {}
    for kind in ("markdown", "json"):
        page.click("#menu-button")
        with page.expect_download() as download:
            page.click(f"#export-{kind}")
        saved[kind] = download.value.path().read_text()
        page.keyboard.press("Escape")
    assert saved["markdown"].startswith("# Renamed\n\n## You\n\nfirst question")
    assert "An answer about *whales*." in saved["markdown"]
    record = json.loads(saved["json"])
    assert [node["role"] for node in record["nodes"].values()] == ["user", "assistant"]
    page.click("#menu-button")
    page.click("#delete")
    page.fill("#search", "")
    expect(entries).to_have_text(["second question"])
    visit(page, url)
    expect(entries).to_have_text(["second question"])


def test_two_tabs_share_a_conversation(page: Page, url: str) -> None:
    Model(page, chunks("answer 1"), chunks("answer 2"), chunks("answer 4"))
    ask(page, "one")
    other = page.context.new_page()
    Model(other, chunks("answer 3"))
    visit(other, url)
    other.locator("button.conversation").click()
    turns = ".turn .content"
    expect(other.locator(turns)).to_have_text(["one", "answer 1"])
    ask(page, "two", 2)
    expect(other.locator(turns)).to_have_text(["one", "answer 1", "two", "answer 2"])
    ask(other, "three", 3)
    expect(page.locator(turns).last).to_have_text("answer 3")
    # A tab that shows another conversation writes nothing over it.
    page.click("#new")
    ask(page, "four")
    both = page.locator("button.conversation")
    expect(both).to_have_text(["four", "one"])
    expect(other.locator("button.conversation")).to_have_text(["four", "one"])
    visit(page, url)
    both.last.click()
    expect(page.locator(turns)).to_have_text(
        ["one", "answer 1", "two", "answer 2", "three", "answer 3"]
    )
    page.click("#menu-button")
    page.click("#delete")
    expect(other.locator(turns)).to_have_count(0)
    expect(other.locator("button.conversation")).to_have_text(["four"])


def test_edit_regenerate_and_branches(page: Page, url: str) -> None:
    model = Model(page, *(chunks(f"answer {i}") for i in range(1, 4)))
    ask(page, "one")
    page.click(".regenerate")
    content = page.locator(".turn.assistant .content")
    expect(content).to_have_text("answer 2")
    page.get_by_label("Previous branch").click()
    expect(content).to_have_text("answer 1")
    page.click(".turn.user .edit")
    page.fill(".edit-form textarea", "two")
    page.click(".edit-form .main")
    expect(content).to_have_text("answer 3")
    assert [one["content"] for one in model.bodies[-1]["messages"]] == ["two"]
    page.get_by_label("Previous branch").click()
    expect(page.locator(".turn.user .content")).to_have_text("one")
    expect(content).to_have_text("answer 1")
    visit(page, url)
    page.locator("button.conversation").click()
    expect(content).to_have_text("answer 1")


def test_stop_keeps_the_text(page: Page, url: str) -> None:
    page.click("#settings-button")
    page.fill("#tokens", "1500")
    page.fill("#temperature", "1.5")
    page.click("#settings-close")
    page.fill("#text", "Tell me a very long story about the sea.")
    page.press("#text", "Enter")
    content = page.locator(".turn.assistant .content")
    expect(content).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send")
    text = content.text_content()
    assert text
    visit(page, url)
    page.locator("button.conversation").click()
    expect(content).to_have_text(text)


def test_settings_are_sent_and_kept(page: Page, url: str) -> None:
    model = Model(page, chunks("yes"))
    page.click("#settings-button")
    given = {"system": "Be brief.", "temperature": "0.5", "top-p": "0.9", "top-k": "20",
             "min-p": "0.01", "tokens": "99", "seed": "7", "stop": "END\nSTOP"}  # fmt: skip
    for name, value in given.items():
        page.fill(f"#{name}", value)
    page.select_option("#theme", "dark")
    page.click("#settings-close")
    page.check("#thinking")
    page.select_option("#effort", "max")
    visit(page, url)
    ask(page)
    body = model.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "max_tokens": 99,
            "seed": 7, "stop": ["END", "STOP"], "reasoning_effort": "max",
            "thinking": {"type": "enabled"}}  # fmt: skip
    assert {name: body[name] for name in sent} == sent
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_real_answer_with_every_setting(page: Page) -> None:
    """The server accepts each field that the page sends."""
    page.click("#settings-button")
    given = {"temperature": "0", "top-p": "0.9", "top-k": "20", "min-p": "0.01", "tokens": "16",
             "seed": "7", "presence": "0.1", "frequency": "0.1", "repetition": "1.1",
             "stop": "END", "system": "Be brief."}  # fmt: skip
    for name, value in given.items():
        page.fill(f"#{name}", value)
    page.click("#settings-close")
    page.check("#thinking")
    page.select_option("#effort", "high")
    ask(page)
    expect(page.locator(".usage")).to_contain_text("tokens/s")
    expect(page.locator(".usage")).to_contain_text("first token after")
    expect(page.locator(".error:visible")).to_have_count(0)


def test_tool_calls_and_their_results(page: Page) -> None:
    call = {
        "index": 0,
        "id": "c1",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    model = Model(page, chunks("", [call]), chunks("It is sunny."))
    page.click("#tools-button")
    page.click("#tools-example")
    page.click("#tools-close")
    ask(page)
    assert model.bodies[0]["tools"][0]["function"]["name"] == "weather"
    expect(page.locator(".call")).to_have_text('weather {"city": "Rome"}')
    page.get_by_label("Result of weather").fill("sunny")
    page.click(".continue")
    expect(page.locator(".turn.assistant .content").last).to_have_text("It is sunny.")
    assert model.bodies[1]["messages"][-1] == {
        "role": "tool", "tool_call_id": "c1", "content": "sunny"}  # fmt: skip
    expect(page.locator(".usage").last).to_contain_text("prompt 1,203, 1,024 cached")


def test_engine_view(page: Page, url: str) -> None:
    page.click("#engine-tab")
    expect(page.locator("#pages .bar").first).to_be_visible()
    expect(page.locator("#ranks .bar")).to_contain_text("rank 0, cpu")
    name = page.locator("#model").text_content()
    body = {"model": name, "max_tokens": 60, "messages": [{"role": "user", "content": QUESTION}]}
    for _ in range(3):
        post(url, body)
    expect(page.locator("#ranks .bar")).to_contain_text("LM head")
    figures = page.locator("figure:visible")
    expect(figures).to_have_count(6)
    expect(figures.locator("canvas")).to_have_count(6)
    expect(figures.nth(2).locator("figcaption span")).to_contain_text("ms")
    figures.first.locator(".u-over").hover()
    expect(figures.first.locator(".u-value").nth(1)).to_have_text(re.compile(r"^\d"))
    expect(page.locator("#counts")).to_contain_text("Output tokens")
    picture(page, "engine")


def post(url: str, body: dict[str, object]) -> None:
    headers = {"content-type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    urllib.request.urlopen(request, timeout=60).read()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_accessible(browser: Browser, url: str, axe: str, scheme: str, width: int) -> None:
    """axe finds nothing serious, and nothing is wider than the screen."""
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": "{}"}}
    Model(page, chunks(RICH, [call]))
    visit(page, url)
    name = f"{scheme}-{width}"
    check(page, axe, f"{name}-empty")
    ask(page)
    check(page, axe, f"{name}-chat")
    for dialog in ("settings", "tools"):
        page.click(f"#{dialog}-button")
        check(page, axe, f"{name}-{dialog}")
        page.click(f"#{dialog}-close")
    if width < 800:
        page.click("#sidebar-button")
        expect(page.locator("#sidebar")).to_be_visible()
        check(page, axe, f"{name}-sidebar")
        page.locator("button.conversation").click()
        expect(page.locator("#sidebar")).to_be_hidden()
    page.click("#engine-tab")
    expect(page.locator("#pages .bar").first).to_be_visible()
    time.sleep(3)
    check(page, axe, f"{name}-engine")
    page.context.close()


def check(page: Page, axe: str, name: str) -> None:
    picture(page, name)
    wide = page.evaluate("""[document.documentElement, ...document.querySelectorAll('main')]
        .some(box => box.scrollWidth > box.clientWidth)""")
    assert not wide, name
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(axe)
    found = page.evaluate("axe.run()")
    serious = [
        (one["id"], [node["html"][:200] for node in one["nodes"]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert not serious, (name, serious)


def test_keyboard(page: Page) -> None:
    Model(page, chunks("yes"))
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user .content")).to_have_text("hello\nthere")
    expect(page.locator("#announce")).to_have_text("The answer is complete. yes")


def test_api_key(browser: Browser, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "keys").write_text("secret-key\n")
    serve = python("-m", "finwhale", "serve", "--port", str(port),
                   "--api-key-file", str(tmp_path / "keys"))  # fmt: skip
    program = Program(serve, tmp_path / "log")
    page = browser.new_page()
    try:
        wait_for(lambda: "ready" in health(port), 120, [program])
        visit(page, f"http://127.0.0.1:{port}")
        expect(page.locator("#model")).to_have_text("an API key is needed")
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("secret-key")
        page.click("#settings-close")
        expect(page.locator("#model")).to_have_text("finwhale-demo")
        assert page.evaluate("JSON.stringify(localStorage)").count("secret") == 0
        assert page.evaluate("sessionStorage.getItem('finwhale.key')") == "secret-key"
    finally:
        page.context.close()
        program.close()


def health(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
            return "ready"
    except OSError:
        return ""
