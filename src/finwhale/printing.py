"""The console and the tables of commands and benchmarks."""

from collections.abc import Iterable, Sequence

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
    last: Sequence[object] = (),
    show_header: bool = True,
) -> None:
    """Print a table whose first columns are texts, and whose other columns are numbers.

    Args:
        num_texts: number of columns of texts.
        last: a row of sums, which a line separates from the others; empty: there is none.
    """
    table = Table(title=title, title_justify="left", show_header=show_header)
    for column in columns[:num_texts]:
        table.add_column(column, overflow="fold")
    for column in columns[num_texts:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    if last:
        table.add_section()
        table.add_row(*map(str, last))
    console.print(table)
