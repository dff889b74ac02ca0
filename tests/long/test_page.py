"""The page at / in headless Chromium, one test for each thing that a user does with it.

FINWHALE_SCREENSHOTS names a folder for pictures of it.
"""

import json
import os
import re
import signal
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from .page_answers import HOSTILE, RICH, Model, chunks
from .servers import Program, descendants, free_ports, is_ready, python, wait_for

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
    expect(page.locator(".turn.assistant .regenerate")).to_have_count(answers, timeout=60_000)


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
    expect(figures.nth(2).locator(".u-value").nth(1)).to_contain_text("ms")
    values = figures.first.locator(".u-value")
    expect(values.nth(0)).to_have_text(re.compile(r"^\d+:\d\d:\d\d [AP]M$"))
    expect(values.nth(1)).to_have_text(re.compile(r"^\d"))
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
    page.click("#chat-tab")
    show_trouble(page, axe, name)
    page.context.close()


def show_trouble(page: Page, axe: str, name: str) -> None:
    """Every state in which the page is in trouble."""
    expect(page.locator("#context")).to_be_visible()
    page.set_input_files("#attach-files", {"name": "notes.txt", "mimeType": "", "buffer": b"Notes"})
    expect(page.locator("#attached li")).to_have_count(1)
    Model(page, chunks("cut", finish="length"))
    ask(page, answers=2)
    page.locator(".file summary").click()
    check(page, axe, f"{name}-file-and-continue")
    refuse(page, 400, "context_length_exceeded")
    ask(page, answers=3)
    expect(page.locator(".full button")).to_be_visible()
    check(page, axe, f"{name}-full")
    for view in ("chat", "engine"):
        page.click(f"#{view}-tab")
        state = answer_live(page, alive=False, loading=True, loaded_bytes=[43, 100])
        expect(page.locator("#notice-text")).to_have_text("The model is loading. 43%")
        check(page, axe, f"{name}-loading-{view}")
        state.clear()
        expect(page.locator("#notice-text")).to_contain_text("does not answer")
        check(page, axe, f"{name}-gone-{view}")
    page.unroute("**/live")
    page.route("**/live", lambda route: route.fulfill(status=401, body="{}"))
    expect(page.locator("#key-dialog")).to_be_visible()
    check(page, axe, f"{name}-key")


def answer_live(page: Page, **fields: object) -> dict[str, object]:
    """Answers for the server with changed fields; none: it does not answer. The caller may change
    them."""

    def answer(route: Route) -> None:
        if fields:
            route.fulfill(json=route.fetch().json() | fields)
        else:
            route.abort()

    page.unroute("**/live")
    page.route("**/live", answer)
    return fields


def refuse(page: Page, status: int, code: str) -> None:
    error = {"message": "the server's words", "code": code}
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions",
               lambda route: route.fulfill(status=status, json={"error": error}))  # fmt: skip


def check(page: Page, axe: str, name: str) -> None:
    picture(page, name)
    wide = page.evaluate("""[document.documentElement, ...document.querySelectorAll('main')]
        .some(box => box.scrollWidth > box.clientWidth)""")
    assert not wide, name
    cut = page.evaluate(
        "(model => model.scrollWidth > model.clientWidth)(document.getElementById('model'))"
    )
    assert not cut, name
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


@contextmanager
def served(folder: Path, *options: str, port: int | None = None) -> Iterator[tuple[Program, str]]:
    """A server whose socket is open; its model may still load."""
    port = port or free_ports(1)[0]
    serve = python("-m", "finwhale", "serve", "--port", str(port), *options)
    program = Program(serve, folder / "log")
    try:
        wait_for(lambda: is_open(port), 120, [program])
        yield program, f"http://127.0.0.1:{port}"
    finally:
        program.close()


def is_open(port: int) -> bool:
    """Whether the server answers, even if only to say that it is not ready."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=5).close()
    except OSError:
        return False
    return True


def engine_of(program: Program) -> int:
    """The process that loads the model."""
    for pid in descendants(program.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"spawn_main" in command and b"resource_tracker" not in command:
            return pid
    raise AssertionError("no engine's process")


def test_loading(browser: Browser, tmp_path: Path) -> None:
    """The page follows the loading, and is ready without a click."""
    with served(tmp_path) as (program, url):
        engine = engine_of(program)
        os.kill(engine, signal.SIGSTOP)
        page = browser.new_page()
        visit(page, url)
        expect(page.locator("#model")).to_have_text("finwhale-demo")
        expect(page.locator("#state")).to_have_text("loading")
        expect(page.locator("#notice-text")).to_have_text("The model is loading.")
        expect(page.locator("#send")).to_be_disabled()
        expect(page.locator(".examples button").first).to_be_disabled()
        answer_live(page, loaded_bytes=[43, 100])
        expect(page.locator("#state")).to_have_text("loading, 43%")
        expect(page.locator("#notice-progress")).to_have_attribute("value", "0.43")
        answer_live(page, loaded_bytes=[100, 100])
        expect(page.locator("#notice-text")).to_contain_text("The weights are loaded")
        page.unroute("**/live")
        page.fill("#text", QUESTION)
        page.press("#text", "Enter")
        expect(page.locator("#text")).to_have_value(QUESTION)
        page.click("#engine-tab")
        expect(page.locator("#engine-cards")).to_be_hidden()
        expect(page.locator("#engine-view p")).to_be_visible()
        page.click("#chat-tab")
        os.kill(engine, signal.SIGCONT)
        expect(page.locator("#state")).to_have_text("ready", timeout=60_000)
        expect(page.locator("#notice")).to_be_hidden()
        page.click("#send")
        expect(page.locator(".turn.assistant .regenerate")).to_be_enabled(timeout=60_000)
        expect(page.locator(".error:visible")).to_have_count(0)
        page.context.close()


def test_dead_server(browser: Browser, tmp_path: Path) -> None:
    """The page says so in its own words, shows no old numbers, and is ready again by itself."""
    page = browser.new_page()
    with served(tmp_path) as (program, url):
        visit(page, url)
        expect(page.locator("#state")).to_have_text("ready", timeout=60_000)
        page.click("#settings-button")
        page.fill("#temperature", "1.5")
        page.fill("#tokens", "5000")
        page.click("#settings-close")
        page.click("#engine-tab")
        expect(page.locator("#pages .bar").first).to_be_visible()
        page.click("#chat-tab")
        page.fill("#text", "Tell me a very long story about the sea.")
        page.press("#text", "Enter")
        content = page.locator(".turn.assistant .content")
        expect(content).not_to_be_empty()
        program.close()
        expect(page.locator(".turn .error")).to_have_text(
            "The connection to the server broke before the answer was complete."
        )
        expect(page.locator("#notice-text")).to_have_text(
            "The server does not answer. Trying again …"
        )
        expect(page.locator("#state")).to_have_text("no answer")
        expect(page.locator("#load")).to_be_empty()
        expect(page.locator("#send")).to_be_disabled()
        expect(page.locator(".resume")).to_be_disabled()
        page.click("#engine-tab")
        expect(page.locator("#engine-cards")).to_be_hidden()
        page.click("#chat-tab")
        with page.expect_request("**/live"):
            page.get_by_role("button", name="Retry").click()
    with served(tmp_path, port=int(url.rpartition(":")[2])):
        expect(page.locator("#state")).to_have_text("ready", timeout=60_000)
        expect(page.locator("#notice")).to_be_hidden()
        kept = content.text_content()
        page.click("#settings-button")
        page.fill("#tokens", "8")
        page.click("#settings-close")
        page.click(".resume")
        expect(page.locator(".turn .error")).to_have_count(0)
        expect(page.locator("#send")).to_have_text("Send")
        assert kept and str(content.text_content()).startswith(kept[:-1])
        page.click("#engine-tab")
        expect(page.locator("#pages .bar").first).to_be_visible()
    page.context.close()


def test_dead_engine(page: Page) -> None:
    """The page says why the server accepts nothing."""
    answer_live(
        page, alive=False, loading=False, reason="the engine's process was killed by signal 9"
    )
    expect(page.locator("#notice-text")).to_have_text(
        "The server has a problem: the engine's process was killed by signal 9. Trying again …"
    )
    answer_live(page, reason="the server is stopping")
    expect(page.locator("#notice-text")).to_have_text(
        "The server has a problem: the server is stopping."
    )
    expect(page.locator("#send")).to_be_enabled()


def test_api_key(browser: Browser, tmp_path: Path) -> None:
    """A new tab asks for a key, and so does an open one whose key is no longer valid."""
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    page = browser.new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    with served(tmp_path, "--api-key-file", str(keys)) as (program, url):
        wait_for(lambda: "ready" in health(url), 120, [program])
        visit(page, url)
        dialog, error = page.locator("#key-dialog"), page.locator("#key-error")
        expect(page.locator("#state")).to_have_text("an API key is needed")
        expect(page.locator("#key-why")).to_contain_text("only those who have a key")
        expect(page.locator("#key")).to_be_focused()
        expect(error).to_be_empty()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(page.locator("#send")).to_be_disabled()
        page.get_by_role("button", name="Enter the key").click()
        page.keyboard.type("wrong-key")
        page.keyboard.press("Enter")
        expect(error).to_have_text("The server does not accept this key.")
        page.fill("#key", "secret-key")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#model")).to_have_text("finwhale-demo")
        expect(page.locator("#notice")).to_be_hidden()
        assert page.evaluate("JSON.stringify(localStorage)").count("secret") == 0
        assert page.evaluate("sessionStorage.getItem('finwhale.key')") == "secret-key"
        ask(page)
        keys.write_text("other-key\n")
        os.kill(program.process.pid, signal.SIGHUP)
        expect(dialog).to_be_visible()
        expect(error).to_contain_text("does not accept the key")
        page.fill("#key", "other-key")
        page.keyboard.press("Enter")
        expect(page.locator("#send")).to_be_enabled()
        ask(page, answers=2)
        expect(page.locator(".error:visible")).to_have_count(0)
    assert not [text for text in told if "form" in text.lower()]
    page.context.close()


def health(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
            return "ready"
    except OSError:
        return ""


def test_full_context(browser: Browser, tmp_path: Path) -> None:
    """The page shows how full the context is, and goes on in a new conversation."""
    page = browser.new_page()
    with served(tmp_path, "--max-model-len", "384") as (program, url):
        wait_for(lambda: "ready" in health(url), 120, [program])
        visit(page, url)
        expect(page.locator("#context")).to_be_hidden()
        page.click("#settings-button")
        page.fill("#temperature", "0")
        page.fill("#tokens", "20")
        page.click("#settings-close")
        full, used, answers = page.locator(".full"), [], 0
        while not full.count():
            answers += 1
            ask(page, f"What do you know of whale number {answers}?", answers)
            if not full.count():
                used.append(str(page.locator("#context-text").text_content()))
        numbers = [int(text.removesuffix(" of 384 tokens")) for text in used]
        assert len(numbers) > 4 and numbers == sorted(set(numbers)) and numbers[-1] < 384
        expect(full).to_contain_text("The context is full")
        page.get_by_role("button", name="Go on in a new conversation").click()
        expect(page.locator("#title")).to_contain_text("(continued)")
        turns = page.locator(".turn.user")
        expect(turns.last).to_contain_text(f"whale number {answers}?")
        expect(page.locator("#context-text")).to_have_text(re.compile(r"^\d+ of 384 tokens$"))
        assert 1 < turns.count() < answers
        expect(full).to_have_count(0)
        expect(page.locator("button.conversation")).to_have_count(2)
        # One long answer: the new conversation keeps its end, and the model goes on with it.
        page.click("#new")
        Model(page, chunks(" ".join(f"word{i}" for i in range(300)), finish="length"))
        ask(page, "Tell me a very long story about the sea.")
        page.unroute("**/v1/chat/completions")
        long = str(page.locator(".turn.assistant .content").text_content())
        page.get_by_role("button", name="Go on in a new conversation").click()
        expect(page.locator("#title")).to_contain_text("(continued)")
        kept = str(page.locator(".turn.assistant .content").text_content())
        assert 20 < len(kept) < len(long) and kept.split()[-5:] == long.split()[-5:]
        page.click(".resume")
        expect(page.locator(".usage")).to_contain_text("20 tokens written in")
        # A message that is too long by itself.
        page.click("#new")
        ask(page, "whale " * 500)
        expect(full).to_contain_text("longer than the model's context")
        expect(full.locator("button")).to_have_count(0)
    page.context.close()


@pytest.mark.parametrize("thinking", [False, True])
def test_continue_after_the_limit(page: Page, thinking: bool) -> None:
    """Three tokens at a time make the same answer as one request."""
    page.set_checked("#thinking", thinking)
    page.click("#settings-button")
    page.fill("#temperature", "0")
    page.click("#settings-close")
    ask(page)
    turn = page.locator(".turn.assistant").last
    parts = turn.locator(".content"), turn.locator(".thinking div")
    whole = [part.text_content() for part in parts]
    assert whole[0] and bool(whole[1]) == thinking
    expect(page.locator(".resume")).to_have_count(0)
    page.click("#new")
    page.click("#settings-button")
    page.fill("#tokens", "3")
    page.click("#settings-close")
    ask(page)
    expect(turn.locator(".usage")).to_contain_text("3 tokens written")
    assert [part.text_content() for part in parts] != whole
    for _ in range(20):
        if not turn.locator(".resume").count():
            break
        turn.locator(".resume").click()
        expect(page.locator("#send")).to_have_text("Send")
    assert [part.text_content() for part in parts] == whole
    expect(page.locator(".turn.assistant")).to_have_count(1)
    # Only the last answer can be continued.
    page.click("#new")
    ask(page)
    expect(page.locator(".resume")).to_have_count(1)
    ask(page, answers=2)
    expect(page.locator(".resume")).to_have_count(1)
    expect(turn.locator(".resume")).to_be_visible()


def test_import(page: Page, url: str, tmp_path: Path) -> None:
    Model(page, chunks("An answer about *whales*."))
    ask(page, "first question")
    page.click("#new")
    ask(page, "second question")
    with page.expect_download() as download:
        page.click("#export-all")
    file = tmp_path / "all.json"
    download.value.save_as(file)
    entries = page.locator("button.conversation")
    page.click("#menu-button")
    page.click("#delete")
    entries.click()
    page.click("#menu-button")
    page.click("#delete")
    expect(entries).to_have_count(0)
    for _ in range(2):  # the second time changes nothing
        page.set_input_files("#import-file", file)
        expect(page.locator("#note")).to_have_text("Imported 2 conversations.")
        expect(entries).to_have_text(["second question", "first question"])
    visit(page, url)
    entries.last.click()
    expect(page.locator(".turn .content")).to_have_text(
        ["first question", "An answer about whales."]
    )
    expect(page.locator(".usage")).to_contain_text("prompt 1,203")
    record = json.loads(file.read_text())[0]
    # What the page does not know is left out, and what it cannot show.
    first, second = record["nodes"]
    chosen = {"": first, first: second, second: first}
    record |= {"id": "other", "title": HOSTILE, "chosen": chosen}
    for node in record["nodes"].values():
        node |= {"content": HOSTILE, "usage": "much", "calls": [1], "files": [1], "new": 1}
    file.write_text(json.dumps(record))
    page.set_input_files("#import-file", file)
    expect(page.locator("#note")).to_have_text("Imported a conversation.")
    entries.filter(has_text="window.broken").click()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".call, .file")).to_have_count(0)
    assert page.evaluate("window.broken") is None
    for wrong, reason in (
        (b"{", "not JSON"),
        (b"[{}]", "no exported conversation"),
        (b"[]", "no conversation"),
        (b"\xff\xfe", "not text"),
    ):
        page.set_input_files("#import-file", {"name": "x.json", "mimeType": "", "buffer": wrong})
        expect(page.locator("#note")).to_contain_text(reason)


def test_attached_files(page: Page, url: str) -> None:
    model = Model(page, chunks("A list."))
    files = [
        {"name": "numbers.csv", "mimeType": "text/csv", "buffer": "a,b\n1,ü\n".encode()},
        {"name": "picture.png", "mimeType": "image/png", "buffer": b"\x89PNG"},
        {"name": "wide.txt", "mimeType": "text/plain", "buffer": "wide".encode("utf-16-le")},
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"some notes"},
    ]
    page.set_input_files("#attach-files", files)  # type: ignore[arg-type]
    expect(page.locator("#attach-error")).to_have_text(
        "picture.png is not attached: it is not text (UTF-8). "
        "wide.txt is not attached: it is not text (UTF-8)."
    )
    expect(page.locator("#attached li")).to_have_count(2)
    page.get_by_label("Remove notes.txt").click()
    ask(page, "What is this?")
    expected = (
        "[file name]: numbers.csv\n[file content begin]\na,b\n1,ü\n\n[file content end]\n"
        "What is this?"
    )
    assert model.bodies[0]["messages"] == [{"role": "user", "content": expected}]
    expect(page.locator("#attached li")).to_have_count(0)
    visit(page, url)
    page.locator("button.conversation").click()
    expect(page.locator(".file summary")).to_have_text("numbers.csv")
    page.click(".turn.user .edit")
    page.fill(".edit-form textarea", "And this?")
    page.click(".edit-form .main")
    expect(page.locator(".turn.user .content")).to_have_text("And this?")
    assert model.bodies[-1]["messages"][0]["content"] == expected.replace("What is", "And")
    # A file needs no text beside it.
    page.click("#new")
    page.set_input_files("#attach-files", files[:1])  # type: ignore[arg-type]
    page.click("#send")
    expect(page.locator("#title")).to_have_text("numbers.csv")


def test_defaults_in_settings(page: Page, url: str) -> None:
    """Fields that are left empty show what the server takes instead."""
    with urllib.request.urlopen(f"{url}/live") as answer:
        defaults = json.load(answer)["defaults"]
    page.click("#settings-button")
    for thinking in ("disabled", "enabled"):
        found = {
            name: page.get_attribute(f"#{name}", "placeholder")
            for name in ("temperature", "tokens")
        }
        wanted = defaults[thinking]
        assert found == {
            "temperature": f"{wanted['temperature']:g}",
            "tokens": f"{wanted['max_tokens']}",
        }
        page.evaluate("document.getElementById('thinking').click()")
    assert defaults["disabled"] != defaults["enabled"]
    expect(page.locator("#seed")).to_have_attribute("placeholder", "random")


def test_times_as_the_locale_writes_them(browser: Browser, url: str) -> None:
    page = browser.new_page(locale="de-DE")
    visit(page, url)
    page.click("#engine-tab")
    time_of_day = page.locator("figure .u-value").first
    expect(time_of_day).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    page.context.close()
