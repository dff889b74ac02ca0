"""Copies pages of the cache to and from a staging buffer that all ranks of a host share, or one
data-parallel rank and the engine.

The buffer begins with a counter for each rank: how many batches of loads the rank has finished. A
rank's device writes its counter itself, after the copies, so the engine knows without a message
when every rank has loaded a batch, and when the buffer's places are free again. After the counters
come random bytes, by which a rank knows that it opened this buffer.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.engine.plan.step_plan import PageCopy
from finwhale.errors import FinwhaleError, ResourceError

HEADER_BYTES = 4096
MARK_BYTES = 16  # the last ones of the header


class PageCopies:
    """The copies of one rank.

    Args:
        file: a file in memory, of which the buffer is made.
        mark: what the engine wrote to the end of the buffer's header.
        pages: by group, uint8 [num_pages, page_bytes] (PagedCache.pages).
        rank: this rank's index, and the number of ranks that use the buffer.
        counts_saves: the counter counts batches of saves, too.

    Raises:
        FinwhaleError: this rank does not see the engine's memory, because it is on another host.
        ResourceError: the memory cannot be pinned.
    """

    def __init__(
        self,
        file: str,
        mark: bytes,
        pages: Mapping[str, Tensor],
        device: torch.device,
        rank: tuple[int, int],
        *,
        counts_saves: bool = False,
    ) -> None:
        self._pages, self._device, self._counts_saves = pages, device, counts_saves
        self._rank, self._num_ranks = rank
        try:
            with open(file, "r+b") as memory:
                mapped = mmap.mmap(memory.fileno(), 0)
            if mapped[HEADER_BYTES - MARK_BYTES : HEADER_BYTES] != mark:
                raise OSError("it is another file")
        except (OSError, ValueError) as error:
            raise FinwhaleError(
                f"prefix_store needs all ranks on one host, and rank {rank[0]} cannot open the "
                f"engine's memory ({error}): leave prefix_store out"
            ) from None
        self._buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        self._counters = self._buffer[:HEADER_BYTES].view(torch.int64)
        self._batches = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            address, size = self._buffer.data_ptr(), self._buffer.nbytes
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
                raise ResourceError(
                    f"{size:,} bytes of memory cannot be pinned for the prefix store"
                )
            self._stream = torch.cuda.Stream(device)
            self._count = torch.zeros(1, dtype=torch.int64, device=device)

    def close(self) -> None:
        """Wait for the copies, and unpin the buffer. No call may follow."""
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())

    def begin(self, copies: Sequence[PageCopy]) -> "Copying":
        """Launch copies after all work that was launched before.

        All ranks that use the buffer must be told the same loads in the same order. Only the first
        of them saves.
        """
        counted = self._counts_saves or any(copy.load for copy in copies)
        self._batches += counted
        if self._stream is None:
            self._copy(copies)
            if counted:
                self._counters[self._rank] = self._batches
            return Copying(self._counters[: self._num_ranks], self._batches * counted)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(copies)
            if counted:
                self._count.add_(1)
                place = self._counters[self._rank : self._rank + 1]
                place.copy_(self._count, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copying(self._counters[: self._num_ranks], self._batches * counted, event)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        for group, number, offset, load in copies:
            page = self._pages[group][number]
            place = self._buffer[offset : offset + page.nbytes]
            if load:
                page.copy_(place, non_blocking=True)
            else:
                place.copy_(page, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Copying:
    """Copies that were launched (PendingCopies).

    Attributes:
        counters: those of all ranks.
        batch: the loads' number, from 1; 0: no page is loaded.
        event: when this rank's copies have ended; None: they have.
    """

    counters: Tensor
    batch: int
    event: torch.cuda.Event | None = None

    def done(self) -> bool:
        if self.event is not None and not self.event.query():
            return False
        return not self.batch or int(self.counters.min()) >= self.batch
