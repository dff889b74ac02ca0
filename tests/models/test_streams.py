"""The order of work on side streams, with stand-ins for CUDA's streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from finwhale.models.deepseek_v4.streams import PRIORITIES, SideStreams


class Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority
        self.log: list[object] = []

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(other)


def test_work_waits_for_the_current_stream_and_for_another_side_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    side = SideStreams(torch.device("cuda"))
    streams: Any = side.streams
    first, second, third = streams
    main = current[0]
    assert tuple(stream.priority for stream in (first, second, third)) == PRIORITIES

    def work(name: str) -> str:
        current[-1].log.append(name)
        return name

    assert side.start(0, lambda: work("features")) == "features"
    assert side.start(2, lambda: work("context"), after=0) == "context"
    side.join(2)
    assert first.log == [main, "features"]
    assert third.log == [main, first, "context"]
    assert main.log == [third] and second.log == []

    # A join waits for what has started since the last one.
    for stream in (main, first, third):
        stream.log.clear()
    side.join(2)
    side.join(0)  # the third stream has waited for the first one
    side.join_all()
    assert main.log == []
    side.start(0, lambda: work("mixes"))
    side.start(2, lambda: work("rows"))
    side.join(1)
    assert main.log == []
    side.join_all()
    assert main.log == [first, third]
