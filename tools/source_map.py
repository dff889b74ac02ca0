"""Counts the lines of the maps of the source, and writes them into their tables.

    python tools/source_map.py

README has a short map, docs/architecture.md the whole. The first column of a table has one or more
patterns under src/finwhale. A file belongs to the first row that matches it, and every Python file
must belong to a row. Counts are rounded to hundreds.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/finwhale"
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/architecture.md"]
ROW = re.compile(r"^\| (?P<patterns>`[^|]+`) \| (?P<lines>[\d,]*) \| (?P<what>[^|]+) \|$")


def rows(text: str) -> list[tuple[str, list[str], int]]:
    """(line, patterns, count written there) of each row of the table."""
    found = []
    for line in text.splitlines():
        if match := ROW.match(line):
            patterns = re.findall(r"`([^`]+)`", match["patterns"])
            found.append((line, patterns, int(match["lines"].replace(",", "") or 0)))
    return found


def count(table: list[tuple[str, list[str], int]]) -> list[int]:
    """Lines of each row's files. Raises ValueError if a file has no row, or a row no file."""
    counts = [0] * len(table)
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        row = next((i for i, (_, globs, _) in enumerate(table) if matches(name, globs)), None)
        if row is None:
            raise ValueError(f"a map has no row for src/finwhale/{name}")
        counts[row] += len(path.read_text().splitlines())
    for (line, _, _), lines in zip(table, counts, strict=True):
        if not lines:
            raise ValueError(f"no file matches this row of a map: {line}")
    return counts


def matches(name: str, patterns: list[str]) -> bool:
    """Whether a pattern is the file, a folder that holds it (ends with /), or a glob of it."""
    return any(
        name.startswith(pattern) if pattern.endswith("/") and "*" not in pattern
        else name.count("/") == pattern.count("/") and fnmatch(name, pattern)
        for pattern in patterns
    )  # fmt: skip


def main() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        table = rows(text)
        for (line, _, _), lines in zip(table, count(table), strict=True):
            cells = line.split(" | ")
            text = text.replace(line, " | ".join([cells[0], f"{round(lines, -2):,}", *cells[2:]]))
        document.write_text(text)


if __name__ == "__main__":
    main()
