"""Side streams: independent projections of one layer at the same time on a GPU."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class SideStreams:
    """Two CUDA streams on a GPU where they are wanted; else none, and the code runs in order.

    Compressors run on one (attention.py), the shared expert on the other (moe.py). `start` runs
    work on a side stream once all that the current stream has been given is done, `join` lets the
    current stream wait for it. Both may be captured into a CUDA graph.
    """

    NUM = 2

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        cuda = wanted and device.type == "cuda"
        self.streams = tuple(torch.cuda.Stream(device) for _ in range(self.NUM)) if cuda else ()

    def start(self, index: int, work: Callable[[], T]) -> T:
        """Run `work` on a side stream; what it returns may be used after `join(index)`."""
        if not self.streams:
            return work()
        stream = self.streams[index]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return work()

    def join(self, index: int) -> None:
        """What comes next waits for the side stream."""
        if self.streams:
            torch.cuda.current_stream().wait_stream(self.streams[index])
