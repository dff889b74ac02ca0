"""Between host and device without waiting: arrays sent, tensors awaited."""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
ALIGN = 16  # bytes


def send(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """The arrays on the device, in one transfer that the host does not wait for.

    Args:
        arrays: int64, float64, int32 or float32, contiguous. On a CPU the tensors share their
            memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # torch keeps pinned memory until the transfers that were begun from it are done.
    # Each begins where loads may be wide: whether it does decides which kernel reads it.
    *starts, size = accumulate((-(-a.nbytes // ALIGN) * ALIGN for a in arrays), initial=0)
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    staged_bytes = staged.numpy()
    for array, start in zip(arrays, starts, strict=True):
        staged_bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    placed = staged.to(device, non_blocking=True)
    return [
        placed[start : start + a.nbytes].view(_DTYPES[a.dtype]).view(a.shape)
        for a, start in zip(arrays, starts, strict=True)
    ]


class Instant:
    """Now, in the work of a device.

    Attributes:
        time: when the host was here (time.monotonic()).
    """

    def __init__(self, device: torch.device) -> None:
        self.time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_to(self, later: "Instant") -> float:
        """Waits for the later one, which is seldom not there yet."""
        if self._event is None or later._event is None:
            return later.time - self.time
        later._event.synchronize()
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1000


class Receiver:
    """Brings tensors to the host on a stream of its own, beside whatever the device does next."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, tensors: Sequence[Tensor]) -> "Arrival":
        """Begin the transfer of what the current stream has computed so far."""
        return Arrival(tensors, self._stream)


class Arrival:
    """Tensors on their way to the host; there at once where they are on the host already."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        # The device's tensors are held until they were read.
        self._tensors = tensors
        self._host = tensors
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                # Into pinned memory, which torch gives this transfer.
                self._host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
                self._event = stream.record_event()

    def wait(self) -> Sequence[Tensor]:
        """Wait for the device to get there; the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
