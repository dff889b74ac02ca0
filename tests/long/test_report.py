"""A report of this repository's records in headless Chromium."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from finwhale.bench.report import main

RESULTS = sorted((Path(__file__).parents[2] / "bench/results").glob("*.jsonl"))


def test_plots_and_comparisons(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main([*map(str, RESULTS), "--out", str(out)]) == 0
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.goto(out.as_uri())
    places = page.locator(".plot")
    assert places.count() >= 6
    expect(page.locator(".plot canvas")).to_have_count(places.count())
    table = page.locator("section", has=page.locator("h2", has_text="flash, 43 layers, 2 ranks"))
    base, other, *_ = table.locator("thead button").all()
    row = table.locator(".wide tbody tr").first.locator("td")
    first, second = row.nth(0).locator(".delta"), row.nth(1).locator(".delta")
    expect(first).to_have_text("")
    before = str(second.text_content())
    other.click()
    expect(other).to_have_attribute("aria-pressed", "true")
    expect(base).to_have_attribute("aria-pressed", "false")
    expect(second).to_have_text("")
    # The difference from the other side has the other sign.
    assert str(first.text_content())[0] == {"+": "-", "-": "+"}[before[0]]
    base.click()
    expect(second).to_have_text(before)
    assert asked == [out.as_uri()] and not wrong
    page.close()
