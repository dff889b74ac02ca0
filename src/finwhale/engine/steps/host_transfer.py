"""Asynchronous transfers between host and device."""

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
# When an engine starts, it reserves pinned memory: SMALL_BLOCKS blocks of every size up to
# SMALL_BYTES, and LARGE_BLOCKS of every larger size. A step needs many small blocks and one large
# block. While the host prepares a step, the two steps before it may still use their blocks.
SMALL_BYTES, SMALL_BLOCKS, LARGE_BLOCKS = 2**16, 16, 4


def hold_pinned_memory(device: torch.device, largest: int) -> None:
    """Reserve pinned memory for transfers of up to `largest` bytes.

    torch rounds sizes up to powers of two, and keeps a block for later transfers of its size. If it
    has no free block, it asks the driver, which may wait until the GPU has no work.
    """
    if device.type != "cuda":
        return
    held, size = [], ALIGN // 2
    while size < largest:
        size *= 2
        count = SMALL_BLOCKS if size <= SMALL_BYTES else LARGE_BLOCKS
        held += [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]


def send(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copy arrays to the device in one transfer that the host does not wait for.

    Args:
        arrays: int64, float64, int32 or float32, contiguous. On a CPU the result shares their
            memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # torch keeps pinned memory until all transfers from it are done. Each array is aligned for wide
    # loads, because Triton compiles another kernel for unaligned pointers.
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


def send_named(device: torch.device, **arrays: NDArray[Any]) -> dict[str, Tensor]:
    """`send`, with the arrays' names."""
    return dict(zip(arrays, send(device, *arrays.values()), strict=True))


class Instant:
    """The point in a device's work, and the time of the host, at which this object was made."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_to(self, later: "Instant") -> float:
        """Seconds from this point to `later`. Waits until the device has reached `later`."""
        if self._event is None or later._event is None:
            return later.time - self.time
        later._event.synchronize()
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1000

    def done(self) -> bool:
        """Whether the device has reached this point."""
        return self._event is None or self._event.query()


class Transfer:
    """A transfer to the host of tensors that the current CUDA stream has computed so far. It runs
    on its own stream, in parallel with later work. None: the tensors are on the host.
    """

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None = None) -> None:
        # Keep the device's tensors alive until the transfer is done.
        self._tensors = tensors
        self._host = tensors
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                # torch allocates pinned memory for this transfer.
                self._host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
                self._event = stream.record_event()

    def done(self) -> bool:
        """Whether the transfer is done."""
        return self._event is None or self._event.query()

    def wait(self) -> Sequence[Tensor]:
        """Wait for the transfer, and return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
