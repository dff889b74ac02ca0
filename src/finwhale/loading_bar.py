"""The progress bar of a model that loads."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class _Bytes(DownloadColumn):
    """Read bytes and all bytes; nothing before their number is known."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """Shows one line on standard error, if that is a terminal: the weights, then what follows them.
    Yields a function that takes the numbers of bytes read and of all bytes.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), _Bytes(), TimeElapsedColumn())
    console, disable = Console(file=sys.stderr), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("starting", total=None)

        def progress(done: int, total: int) -> None:
            loaded = total and done >= total
            bar.update(
                task,
                description="preparing kernels and cache" if loaded else "loading weights",
                completed=done,
                total=total or None,
            )

        yield progress
