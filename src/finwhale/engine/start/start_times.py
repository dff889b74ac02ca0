"""Measures the phases of a start."""

import time
from collections.abc import Mapping
from pathlib import Path


class Phases:
    """Measures how long each phase takes, in seconds.

    The first phase begins when this object is constructed. Each other phase begins when the
    previous phase ends.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """End the phase `name` now. If it has ended before, the times add up."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def process_start() -> float:
    """time.monotonic() when this process began; the present time if the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        ticks = 100.0  # per second: Linux's unit for a process's start time on every architecture
        age = uptime - float(fields[19]) / ticks
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.monotonic() - max(0.0, age)


def whole_start(seconds: Mapping[str, float], began: float) -> dict[str, float]:
    """Phases of an engine that is ready now, with the remaining time since its process began.

    Args:
        began: time.monotonic() when construction of the engine began, after the imports.
    """
    now = time.monotonic()
    rest = now - began - sum(seconds.values())
    return {"import": began - process_start(), **seconds, "rest": max(0.0, rest)}


def table(seconds: Mapping[str, float]) -> str:
    """One line with the seconds of each phase and their sum."""
    parts = [f"{name} {spent:.1f} s" for name, spent in seconds.items()]
    return ", ".join([*parts, f"total {sum(seconds.values()):.1f} s"])
