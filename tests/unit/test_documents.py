"""README and docs name what exists, and say nothing that belongs to the notes."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/design").glob("*.md")])
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
NOTES = sorted((ROOT / "docs/notes").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile("^#+ (.+)$", re.MULTILINE)
# A path in backticks: `engine/plan/pages.py`, `docs/notes/`, `tests/ops/test_triton_*.py`.
PATH = re.compile(r"`([\w.*-]+/[\w./*-]*|\w+\.(?:py|md|toml|jsonl))(?:::[^`]*)?`")
# The last part of a name in backticks: `Engine.metrics()`, `LLM(draft_tokens=N)`.
NAME = re.compile(r"`(?:\w+\.)*([A-Za-z_]\w*)(?:\([^`]*\))?`")
PLACES = [ROOT, ROOT / "docs", ROOT / "src/finwhale", ROOT / "bench/results"]
# They look like paths of this repository and are none.
OTHERS = {"encoding/encoding_dsv4.py", "build/site", "text/event-stream", "in.jsonl", "out.jsonl"}
OTHERS |= {"deepseek-ai/DeepSeek-V4-Flash"}
# The addresses, packages and images that these files name must exist.
PUBLISHED = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("pyproject.toml", "mkdocs.yml", "justfile")),
    *PAGES,
    *(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
    *(ROOT / "examples").rglob("*.ipynb"),
    *(ROOT / ".github").rglob("*.y*ml"),
]
UNPUBLISHED = re.compile(
    r"git(?:hub|lab)\.com/finwhale|pypi\.org/\S*finwhale|finwhale\.(?:ai|com|dev|io|org)\b"
    r"|\b(?:ghcr|quay|docker|registry)\.io/\S*finwhale"
    r"|pip install [^\n`;&|]*(?<![\w./])finwhale(?![\w/-])"
)


def name_of(document: Path) -> str:
    """The document's path in the repository."""
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTES], ids=name_of)
def test_every_path_exists(document: Path) -> None:
    for name in PATH.findall(document.read_text()):
        if name in OTHERS:
            continue
        anywhere = "" if "/" in name else "**/"
        assert any(True for place in PLACES for _ in place.glob(anywhere + name)), name


@pytest.fixture(scope="session")
def code() -> str:
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "justfile"]
    return "".join(path.read_text() for path in files)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_name_of_the_code_exists(document: Path, code: str) -> None:
    """A name with an underscore, or one like BlockTable, in backticks."""
    for name in NAME.findall(document.read_text()):
        if "_" in name or re.search("[a-z][A-Z]", name):
            assert name in code, name


@pytest.mark.parametrize("document", PUBLISHED, ids=name_of)
def test_nothing_is_named_that_was_not_published(document: Path) -> None:
    """The repository has no address of its own yet, and PyPI has no package `finwhale`."""
    assert not UNPUBLISHED.findall(document.read_text())


def test_names_that_were_not_published_are_found() -> None:
    for text in (
        "https://github.com/finwhale/finwhale",
        "image: ghcr.io/finwhale/finwhale:0.1.0",
        "pip install 'finwhale[hub]'",
        "pip install -U finwhale==0.1.0",
    ):
        assert UNPUBLISHED.search(text), text
    assert not UNPUBLISHED.search("/opt/finwhale/bin/pip install '.[server]'; finwhale serve")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commits_are_named_in_notes_alone(document: Path) -> None:
    """And in the rows of the log in docs/testing.md, which begin with a date."""
    text = re.sub(r"^\| \d{4}-\d\d-\d\d .*$", "", document.read_text(), flags=re.MULTILINE)
    words = re.findall(r"\b[0-9a-f]{7,12}\b", text)
    assert not [word for word in words if re.search(r"[a-f]", word) and re.search(r"\d", word)]


def test_pictures_are_shown_and_small() -> None:
    """`just screenshots` makes them."""
    text = "".join(path.read_text() for path in DOCUMENTS)
    pictures = list((ROOT / "docs/images").iterdir())
    assert all(f"(images/{picture.name})" in text for picture in pictures)
    assert sum(picture.stat().st_size for picture in pictures) <= 300_000


def test_the_examples_are_listed_and_the_notebook_has_no_outputs() -> None:
    """Outputs would go stale, and every run would change the file."""
    listed = (ROOT / "docs/examples.md").read_text()
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]:
        assert f"`examples/{path.name}`" in listed, path
    notebook = json.loads((ROOT / "examples/tour.ipynb").read_text())
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTES], ids=name_of)
def test_every_link_leads_to_a_heading(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        page = document.parent / name if name else document
        assert page.is_file(), target
        if page.suffix != ".md":
            continue
        headings = HEADING.findall(page.read_text())
        ids = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in ids, target


@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_every_page_is_in_the_navigation_and_says_for_whom_it_is(document: Path) -> None:
    name = document.relative_to(ROOT / "docs").as_posix()
    assert f": {name}\n" in (ROOT / "mkdocs.yml").read_text()
    text = document.read_text()
    if included := re.fullmatch(r'--8<-- "(\w+\.md)"\n', text):
        text = (ROOT / included[1]).read_text()
    if document.name != "changelog.md":
        assert re.search("^This page is for ", text, re.MULTILINE)


def test_the_maps_of_the_source_are_complete_and_nearly_right() -> None:
    """`just map` writes the counts."""
    spec = importlib.util.spec_from_file_location("source_map", ROOT / "tools/source_map.py")
    assert spec is not None and spec.loader is not None
    source_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source_map)
    for document in source_map.DOCUMENTS:
        table = source_map.rows(document.read_text())
        assert table
        for (line, _, written), lines in zip(table, source_map.count(table), strict=True):
            assert abs(written - lines) <= max(250, 0.25 * lines), f"{lines} lines now: {line}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
