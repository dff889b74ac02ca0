"""The stopwatch of a rank: which spans it measures, and that it never waits for the device."""

import time

import pytest
import torch

from finwhale.engine.steps.stopwatch import WINDOW, Stopwatch


class Event:
    """A CUDA event. The device's time is `now`; it has reached the points up to `done`."""

    now, done, num_recorded = 0.0, 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: object) -> None:
        Event.num_recorded += 1
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, later: "Event") -> float:
        assert self.query() and later.query()
        return 1000 * (later.at - self.at)


def test_every_nth_span_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr(time, "process_time", lambda: next(times) ** 2)
    watch = Stopwatch(torch.device("cpu"), 4)
    assert watch.mean is None
    for _ in range(9):  # measures the first, the fifth and the ninth: 1 - 0, 9 - 4, 25 - 16
        watch.begin()
        watch.end()
    assert next(times) == 6 and watch.mean == 15 / 3
    watch.reset()
    assert watch.mean is None
    watch.begin()
    watch.begin()  # a step that failed has no end
    watch.end()
    assert watch.mean is None


def test_a_device_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    watch = Stopwatch(torch.device("cuda:0"), 2)

    def span(seconds: float) -> None:
        watch.begin()
        Event.now += seconds
        watch.end()

    span(3.0)
    assert watch.mean is None and Event.num_recorded == 2
    span(100.0)
    span(100.0)  # the device has not finished the first one, so this one is not measured
    assert Event.num_recorded == 2 and watch.mean is None
    Event.done = Event.now
    span(100.0)
    assert watch.mean == 3.0 and Event.num_recorded == 2
    span(5.0)
    assert Event.num_recorded == 4
    Event.done = Event.now
    span(1.0)
    assert watch.mean == 4.0
    for _ in range(4 * WINDOW):
        Event.done = Event.now
        span(2.0)
    assert watch.mean == 2.0
