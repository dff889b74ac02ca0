"""Side CUDA streams, which run independent projections of a layer in parallel."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class SideStreams:
    """Two side CUDA streams. Without a GPU, or unless `wanted`, all work runs in order.

    Compressors and the draft head's context use one (attention.py, model.py), the shared expert the
    other (moe.py). `start` runs work on a side stream after all work that is already on the current
    CUDA stream. `join` makes the current CUDA stream wait for the side stream. CUDA graphs can
    capture both.
    """

    NUM = 2

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        cuda = wanted and device.type == "cuda"
        self.streams = tuple(torch.cuda.Stream(device) for _ in range(self.NUM)) if cuda else ()

    def start(self, index: int, work: Callable[[], T]) -> T:
        """Run `work` on a side stream; use its result only after `join(index)`."""
        if not self.streams:
            return work()
        stream = self.streams[index]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return work()

    def join(self, index: int) -> None:
        """Make later work on the current CUDA stream wait for the side stream."""
        if self.streams:
            torch.cuda.current_stream().wait_stream(self.streams[index])
