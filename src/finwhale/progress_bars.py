"""Progress bars on standard error: of a model that loads, and of prompts that are answered."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

INTERVAL_S = 0.1


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
            about = "preparing kernels and cache" if loaded else "loading weights"
            bar.update(task, description=about, completed=done, total=total or None)

        yield progress


@contextmanager
def token_bar(
    what: str, total: int, read: Callable[[], tuple[int, int]], *, show: bool = True
) -> Iterator[Callable[[], None]]:
    """Shows finished prompts and tokens per second on standard error, if that is a terminal.

    Args:
        what: what is counted, such as "prompts".
        read: returns how many of them are finished, and the number of tokens so far.

    Yields:
        A function that updates the bar, a few times a second.
    """
    if not (show and total and sys.stderr.isatty()):
        yield lambda: None
        return
    began = shown = time.monotonic()
    speed = TextColumn(f"{what}, {{task.fields[rate]:.0f}} tokens/s")
    columns = (BarColumn(), MofNCompleteColumn(), speed, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, rate=0.0)

        def update(interval: float = INTERVAL_S) -> None:
            nonlocal shown
            if (now := time.monotonic()) - shown <= interval:
                return
            shown = now
            finished, tokens = read()
            bar.update(task, completed=finished, rate=tokens / max(now - began, 1e-9))

        try:
            yield update
        finally:
            update(0.0)
