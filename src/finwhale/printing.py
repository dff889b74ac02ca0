"""The console and the tables of commands and benchmarks, and the tables of the documentation."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table


def new_console(width: int = 120) -> Console:
    """Create a console with the width of the terminal; `width`: its width without a terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = width
    return console


def print_table(
    console: Console,
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    num_texts: int = 1,
) -> None:
    """Print a table whose first columns are texts, and whose other columns are numbers.

    Args:
        num_texts: number of columns of texts.
    """
    table = Table(title=title, title_justify="left")
    for column in columns[:num_texts]:
        table.add_column(column, overflow="fold")
    for column in columns[num_texts:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def with_rows(page: str, rows: Mapping[str, Iterable[str]]) -> str:
    """A page of the documentation with new rows in its tables and lists.

    Args:
        rows: by the line two lines above them: the head of a table, or the sentence before a list.
    """
    lines, old = [], iter(page.splitlines())
    for line in old:
        lines.append(line)
        if line in rows:
            lines += [next(old), *rows[line]]
            if any(not line for line in old):  # the old rows end with a blank line
                lines.append("")
    assert rows.keys() <= set(lines), "the page has no such table"
    return "\n".join([*lines, ""])
