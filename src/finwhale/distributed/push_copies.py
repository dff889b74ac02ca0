"""Exchanges of many rows by the copy engines of GPUs with peer access, beside kernels.

On one CUDA stream, a rank copies its rows and then a flag into the memory of every other rank. So
the flag arrives after the rows. Copies need no multiprocessor: they run beside GEMMs that occupy
all of them. A kernel of one program waits for the flags of the other ranks, and clears them. Such
an exchange needs no count of exchanges, because no rank sends to a reader again before all ranks
have read what they had (`Collectives.start_all_gather_rows`).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from finwhale.distributed import push_triton
from finwhale.distributed.rank import Rank

FLAG_BYTES = 1024  # at the beginning of a reader's memory
PIECES = 2  # in which a rank's rows are computed and sent
# A function that allocates so many bytes on every rank, and returns a tensor for each rank. All
# ranks can write to all of these tensors.
Allocate = Callable[[int], Sequence[Tensor]]


class Copies:
    """Exchanges rows among ranks.

    Args:
        allocate, barrier: see `Push`.
        limit, faults: see `ops.ranks.Channel`.
    """

    def __init__(
        self,
        rank: Rank,
        device: torch.device,
        allocate: Allocate,
        barrier: Callable[[], object],
        limit: Tensor,
        faults: int,
    ) -> None:
        self._rank, self._allocate, self._barrier = rank, allocate, barrier
        self._limit, self._faults = limit, faults
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory: dict[str, Sequence[Tensor]] = {}
        self._outgrown: list[Sequence[Tensor]] = []  # which captured graphs use
        self._captured = False

    def reserve(self, reader: str, num_bytes: int) -> bool:
        """Give a reader `num_bytes`. All ranks call this together; it may wait for them.

        Returns:
            False if there are fewer bytes, and a graph is being captured.
        """
        capturing = self._stream is not None and torch.cuda.is_current_stream_capturing()
        self._captured |= capturing
        before = self._memory.get(reader)
        if before is not None and before[0].nbytes >= FLAG_BYTES + num_bytes:
            return True
        if capturing:
            return False
        self._memory[reader] = memories = self._allocate(FLAG_BYTES + num_bytes)
        memories[self._rank.index].zero_()
        self._flags(reader, self._rank.index)[self._rank.index] = 1  # a rank waits for others only
        self._barrier()  # no rank sends before all have cleared their flags
        if before is not None and self._captured:
            self._outgrown.append(before)
        return True

    def start_all_gather_rows(self, x: Tensor, num_rows: int, reader: str) -> Callable[[], Tensor]:
        """`Collectives.start_all_gather_rows`; `reserve` comes first, for `num_rows`."""
        own, width = self._rank.rows(num_rows), math.prod(x.shape[1:]) * x.itemsize
        self._begin()
        for peer in self._rank.others():
            self._send(x, reader, peer, own.start * width)
            self._raise_flag(reader, peer)
        self._send(x, reader, self._rank.index, own.start * width)
        landed = self._rows(reader, self._rank.index)[: num_rows * width].view(x.dtype)

        def finish() -> Tensor:
            self._arrive(reader)
            return landed.view(num_rows, *x.shape[1:])

        return finish

    def reduce_scatter_parts(
        self, part: Callable[[int, slice], Tensor], num_rows: int, width: int, early: bool
    ) -> Tensor:
        """`Collectives.reduce_scatter_parts` of rows of `width` bytes.

        `reserve` comes first: for "sum", and the same number of rows for each rank.
        """
        rank, sent = self._rank, []
        most = rank.rows_per_rank(num_rows)
        step = -(-most // PIECES)
        for peer in rank.others():
            for start in range(0, most, step):
                sent.append(part(peer, slice(start, start + step)))  # exists until it is copied
                self._begin()
                self._send(sent[-1], "sum", peer, (rank.index * most + start) * width)
            self._raise_flag("sum", peer)
        x = part(rank.index, slice(None))
        self._arrive("sum")
        out = torch.empty_like(x)
        landed = self._rows("sum", rank.index).view(torch.int32)
        push_triton.sum_landed(x, out, landed, most * width // 4, rank.index, rank.size, early)
        return out

    def _rows(self, reader: str, rank: int) -> Tensor:
        return self._memory[reader][rank][FLAG_BYTES:]

    def _flags(self, reader: str, rank: int) -> Tensor:
        return self._memory[reader][rank][: 4 * self._rank.size].view(torch.int32)

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _begin(self) -> None:
        """Let copies wait for what the current CUDA stream has computed."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _send(self, x: Tensor, reader: str, peer: int, start: int) -> None:
        """Copy x to byte `start` of the rows of a rank."""
        with self._beside():
            target = self._rows(reader, peer)[start : start + x.nbytes]
            target.copy_(x.reshape(-1).view(torch.uint8))

    def _raise_flag(self, reader: str, peer: int) -> None:
        with self._beside():
            index = self._rank.index
            self._flags(reader, peer)[index : index + 1].copy_(self._one)

    def _arrive(self, reader: str) -> None:
        """Let the current CUDA stream wait for this rank's copies and those of the others."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        flags = self._flags(reader, self._rank.index)
        push_triton.await_copies(flags, self._limit, self._faults, self._rank.index)
