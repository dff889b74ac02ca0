"""A start: how long each part of it took, and what its end does."""

import gc
import time
from collections.abc import Mapping
from pathlib import Path


class Phases:
    """Seconds of each phase; each lasts from the end of the one before it, the first from now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """The phase `name` ends now; a second time its parts add up."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def process_start() -> float:
    """time.monotonic() when this process began; now, where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        ticks = 100.0  # of a second: what Linux counts a process's start in, everywhere
        age = uptime - float(fields[19]) / ticks
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.monotonic() - max(0.0, age)


def whole_start(seconds: Mapping[str, float], began: float) -> dict[str, float]:
    """The phases of an engine that is ready now, with what else passed since its process began.

    Args:
        began: time.monotonic() where its making began: before lies the import.
    """
    now = time.monotonic()
    rest = now - began - sum(seconds.values())
    return {"import": began - process_start(), **seconds, "rest": max(0.0, rest)}


def table(seconds: Mapping[str, float]) -> str:
    """One line: each phase and their sum."""
    parts = [f"{name} {spent:.1f} s" for name, spent in seconds.items()]
    return ", ".join([*parts, f"total {sum(seconds.values()):.1f} s"])


def freeze_heap() -> None:
    """Keeps Python's garbage collector away from everything that exists now.

    What is there when an engine is ready stays there: a full collection would look through all of
    it, during a step.
    """
    gc.collect()
    gc.freeze()
