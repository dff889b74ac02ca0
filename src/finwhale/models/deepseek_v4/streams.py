"""Side CUDA streams, which run independent projections of a layer in parallel."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


# A GPU starts waiting programs of a stream with a lower number first.
PRIORITIES = (0, 0, -1)


class SideStreams:
    """Three side CUDA streams. Without a GPU, or unless `wanted`, all work runs in order.

    DeepSeek-V4 runs compressors and the draft head's features on the first, and in attention by
    tokens writes the window's rows there; DeepSeek-V4.1 runs a block's mixes on it. Both run the
    shared expert on the second (moe.py). The third has a high priority: V4 writes the draft head's
    context there, which would otherwise wait until all programs of the LM head have started, and
    V4.1 reads Engram's rows. CUDA graphs can capture all of them.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.started = set[int]()  # and not joined yet
        if wanted and device.type == "cuda":
            self.streams = tuple(torch.cuda.Stream(device, priority=p) for p in PRIORITIES)

    def start(self, index: int, work: Callable[[], T], after: int | None = None) -> T:
        """Run `work` on a side stream; use its result only after `join(index)`.

        It runs after all work that is already on the current CUDA stream, and on the side stream
        `after`, for which `join(index)` waits, too.
        """
        if not self.streams:
            return work()
        stream = self.streams[index]
        self.started.add(index)
        stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            stream.wait_stream(self.streams[after])
            self.started.discard(after)
        with torch.cuda.stream(stream):
            return work()

    def join(self, index: int) -> None:
        """Make later work on the current CUDA stream wait for the side stream.

        If nothing has started there since the last join, this does nothing: a CUDA graph must not
        wait for work from before its capture.
        """
        if index in self.started:
            self.started.remove(index)
            torch.cuda.current_stream().wait_stream(self.streams[index])

    def join_all(self) -> None:
        for index in tuple(self.started):
            self.join(index)
