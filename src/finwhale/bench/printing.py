"""The console and the tables of benchmarks."""

from rich.console import Console
from rich.table import Table


def new_console(width: int = 120) -> Console:
    """Create a console with the width of the terminal; `width`: its width without a terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = width
    return console


def new_table(title: str, *columns: str, no_wrap: bool = False) -> Table:
    """Create a table whose first column is text, and whose other columns are numbers.

    Args:
        no_wrap: keep the text of the first column in one line.
    """
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], no_wrap=no_wrap)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table
