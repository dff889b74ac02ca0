"""The phases of a start add up to it."""

import pytest

from finwhale.engine.start import start_times as phases
from finwhale.engine.start.start_times import Phases, table, whole_start


class Clock:
    """time.monotonic of a test."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    return clock


def test_phases_follow_each_other(clock: Clock) -> None:
    found = Phases()
    for name, seconds in (("weights", 1.0), ("kernels", 0.5), ("weights", 2.0)):
        clock.now += seconds
        found.end(name)
    assert found.seconds == {"weights": 3.0, "kernels": 0.5}
    assert list(found.seconds) == ["weights", "kernels"]


def test_a_whole_start_has_what_else_passed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "process_start", lambda: 95.0)
    found = whole_start({"weights": 0.5}, began=98.0)
    assert found == {"import": 3.0, "weights": 0.5, "rest": 1.5}
    assert list(found) == ["import", "weights", "rest"]
    assert sum(found.values()) == clock.now - 95.0


def test_a_table_is_one_line() -> None:
    assert table({"a": 1.0, "b": 0.25}) == "a 1.0 s, b 0.2 s, total 1.2 s"
