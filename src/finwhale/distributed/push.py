"""Collectives of GPUs with peer access, by kernels that push into the other ranks' memory.

| message | all_reduce | all_gather |
|---|---|---|
| small | one shot: every rank sends x to all ranks | one shot |
| medium | two shots: each rank sums one part and sends the sum | NCCL |
| large | two shots with one flag for each program instead of each word | NCCL |
| very large | pieces of large messages, or NCCL (`PushSizes.nccl`, not if `ordered`) | NCCL |

`all_gather_each` gathers three small x in one exchange, and others one after the other.
`reduce_scatter_rows` and `all_gather_rows` are the two halves of a large all-reduce.
`push_triton.py` describes the protocol. What runs beside other work is in `push_copies.py`.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from finwhale.distributed import push_triton
from finwhale.distributed.collectives import Collectives, Reader
from finwhale.distributed.push_copies import Allocate, Copies
from finwhale.distributed.push_sizes import SIZES, PushSizes
from finwhale.distributed.rank import Rank
from finwhale.errors import EngineDeadError
from finwhale.ops.ranks import Channel
from finwhale.ops.ranks_triton import POISON

# A poll reads this GPU's own L2; an H200 makes about this many a second.
POLLS_PER_SECOND = 2_000_000
TIMEOUT_SECONDS = 60.0
WORD_BYTES = 4
HOPPER = (9, 0)


class Push(Collectives):
    """Collectives over memory that every rank can write.

    All all-reduces below `sizes.nccl` have the order of the tree of pairs.

    Args:
        allocate: called in the same order on all ranks.
        barrier: waits for all ranks on the host.
        nccl: the collectives of messages that the kernels do not handle.
        ordered: never use NCCL's order of summation.
        timeout_seconds: time for which a kernel waits for a rank; `check` then raises.
    """

    def __init__(
        self,
        rank: Rank,
        device: torch.device,
        allocate: Allocate,
        barrier: Callable[[], object],
        nccl: Collectives,
        *,
        ordered: bool = False,
        sizes: PushSizes | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.rank = rank
        self.sizes = SIZES[rank.size] if sizes is None else sizes
        self.beside_bytes = self.sizes.copied
        self._nccl, self._ordered = nccl, ordered
        # Kernels start while the previous kernel ends.
        self._early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
        self._device, self._allocate = device, allocate  # which may hold memory of other ranks
        self._limit = torch.empty(1, dtype=torch.int32, device=device)
        self._faults = torch.zeros(rank.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.set_timeout(timeout_seconds)
        words = max(self.sizes.one_shot, self.sizes.gather, -(-self.sizes.two_shot // rank.size))
        self._small = self._channel(words)
        self._bulk = self._channel(self.sizes.bulk // rank.size, bulk=True)
        self._fused: Channel | None = None
        if self.sizes.fused_tokens > 0 and not ordered:  # see PushSizes.fused_tokens
            block, programs = self.sizes.fused_block, self.sizes.fused_programs
            self._fused = self._channel(WORD_BYTES * block * programs, block=block)
        faults = self._faults.data_ptr()
        self._copies = Copies(rank, device, allocate, barrier, self._limit, faults)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        barrier()  # no rank sends before all have poisoned their buffers

    def _channel(self, num_bytes: int, *, bulk: bool = False, block: int | None = None) -> Channel:
        """A channel for messages of up to `num_bytes` from each rank to each other rank."""
        size = self.rank.size
        block = block or (self.sizes.bulk_block if bulk else self.sizes.block)
        programs = -(-num_bytes // (WORD_BYTES * block))
        capacity = programs * block
        dtype = torch.int32 if bulk else torch.int64
        buffer_bytes = 2 * size * capacity * dtype.itemsize
        flag_bytes = programs * size * 4 if bulk else 0
        memories = self._allocate(buffer_bytes + flag_bytes)
        memory, addresses = memories[self.rank.index], [m.data_ptr() for m in memories]
        memory[:buffer_bytes].fill_(POISON)
        memory[buffer_bytes:].zero_()
        pointers = [*addresses, *(address + buffer_bytes for address in addresses)]
        flags = memory[buffer_bytes:].view(torch.int32) if bulk else None
        return Channel(
            self.rank.index,
            size,
            memory[:buffer_bytes].view(dtype),
            flags,
            torch.tensor(pointers, dtype=torch.int64, device=self._device),
            torch.zeros(programs, dtype=torch.int32, device=self._device),
            self._limit,
            self._faults.data_ptr(),
            block,
            capacity,
            self.sizes.bulk_warps if bulk else self.sizes.warps,
        )

    def set_timeout(self, seconds: float) -> None:
        """Change how long a kernel waits for a rank, also in captured graphs."""
        self._limit.fill_(max(1, min(int(seconds * POLLS_PER_SECOND), 2**31 - 1)))

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"all_reduce takes float32 or bfloat16, got {x.dtype}")
        num_bytes = x.numel() * x.element_size()
        if not _has_words(x) or (num_bytes >= self.sizes.nccl and not self._ordered):
            return self._nccl.all_reduce(x, overwrite=overwrite)
        out = torch.empty_like(x)
        words, sums = _words(x), _words(out)
        bfloat16 = x.dtype == torch.bfloat16
        shot = self.sizes.shot(num_bytes)
        if shot == "one":
            push_triton.one_shot(words, sums, self._small, bfloat16, self._early)
        elif shot == "two":
            push_triton.two_shot(words, sums, self._small, bfloat16, self._early)
        else:
            piece = self.sizes.bulk // WORD_BYTES
            for part, total in zip(words.split(piece), sums.split(piece), strict=True):
                push_triton.two_shot(part, total, self._bulk, bfloat16, self._early)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        dim %= x.dim()
        shape = (*x.shape[:dim], self.rank.size * x.shape[dim], *x.shape[dim + 1 :])
        width = math.prod(x.shape[dim:]) * x.element_size()
        fits = x.numel() * x.element_size() <= self.sizes.gather
        if not _has_words(x) or width % WORD_BYTES or not fits:
            if dim == 0:
                return self.all_gather_rows(x, self.rank.size * len(x))
            return self._nccl.all_gather(x, dim)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        push_triton.all_gather(
            _words(x), _words(out), width // WORD_BYTES, self._small, self._early
        )
        return out

    def all_gather_each(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if not all(map(_has_words, xs)):
            return super().all_gather_each(xs)
        words = list(map(_words, xs))
        if not push_triton.can_gather_each(words, self._small):
            return super().all_gather_each(xs)
        outs = [x.new_empty(self.rank.size * len(x), *x.shape[1:]) for x in xs]
        push_triton.gather_each(words, list(map(_words, outs)), self._small, self._early)
        return outs

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"reduce_scatter_rows takes float32 or bfloat16, got {x.dtype}")
        if not (width := _row_words(x, len(x))):
            return self._nccl.reduce_scatter_rows(x)
        own = self.rank.rows(len(x))
        out = x.new_empty((own.stop - own.start, *x.shape[1:]))
        words, sums, bfloat16 = _words(x), _words(out), x.dtype == torch.bfloat16
        part = self.rank.rows_per_rank(len(x)) * width
        for start in range(0, part, self._bulk.capacity):
            push_triton.reduce_scatter(words, sums, part, start, self._bulk, bfloat16, self._early)
        return out

    def all_gather_rows(self, x: Tensor, num_rows: int) -> Tensor:
        if not (width := _row_words(x, num_rows)):
            return self._nccl.all_gather_rows(x, num_rows)
        out = x.new_empty((num_rows, *x.shape[1:]))
        part = self.rank.rows_per_rank(num_rows) * width
        for start in range(0, part, self._bulk.capacity):
            push_triton.gather_parts(_words(x), _words(out), part, start, self._bulk, self._early)
        return out

    def start_all_gather_rows(
        self, x: Tensor, num_rows: int, reader: Reader
    ) -> Callable[[], Tensor]:
        if not self._can_copy(reader, num_rows, WORD_BYTES * _row_words(x, num_rows)):
            return super().start_all_gather_rows(x, num_rows, reader)
        return self._copies.start_all_gather_rows(x, num_rows, reader)

    def reduce_scatter_parts(
        self, part: Callable[[int, slice], Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        num_rows, width = shape[0], shape[1] * dtype.itemsize
        known = dtype in (torch.float32, torch.bfloat16) and width % WORD_BYTES == 0
        if not known or not self._can_copy("sum", num_rows, width):
            return super().reduce_scatter_parts(part, shape, dtype)
        return self._copies.reduce_scatter_parts(part, num_rows, width, self._early)

    def _can_copy(self, reader: str, num_rows: int, width: int) -> bool:
        """Reserve memory for rows of `width` bytes; whether the copy engines exchange them."""
        num_bytes = self.rank.rows_per_rank(num_rows) * width
        enough = num_bytes >= self.beside_bytes
        return enough and self._copies.reserve(reader, self.rank.size * num_bytes)

    def close(self) -> None:
        """Close NCCL. The buffers are freed with this object."""
        self._nccl.close()

    def channel(self, num_tokens: int, num_programs: int) -> Channel | None:
        fits = num_tokens <= self.sizes.fused_tokens and num_programs <= self.sizes.fused_programs
        return self._fused if fits else None  # also None if sums are ordered

    def check(self) -> None:
        lost = [rank for rank, fault in enumerate(self._faults.tolist()) if fault]
        if lost:
            names = ", ".join(map(str, lost))
            raise EngineDeadError(f"rank {self.rank.index} timed out waiting for rank {names}")


def symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> Allocate:
    """A function that allocates memory which all ranks of `group` map.

    Args:
        group: created by `nccl.new_group`.

    Raises:
        RuntimeError: the GPUs have no peer access, or are not in one host.
    """

    def allocate(num_bytes: int) -> list[Tensor]:
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        # torch keeps the handle as long as the memory.
        handle = _SymmetricMemory.rendezvous(memory, group.group_name)
        peers = range(handle.world_size)
        memories = [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in peers]
        memories[handle.rank] = memory
        return memories

    return allocate


def _has_words(x: Tensor) -> bool:
    """Whether x can be sent as words: it is not empty, has whole words, and is aligned."""
    num_bytes = x.numel() * x.element_size()
    return num_bytes > 0 and num_bytes % WORD_BYTES == 0 and x.data_ptr() % WORD_BYTES == 0


def _row_words(x: Tensor, num_rows: int) -> int:
    """Number of words of a row of x; 0: x cannot be sent. All ranks together have `num_rows`."""
    num_bytes = math.prod(x.shape[1:]) * x.element_size()
    can_send = num_rows > 0 and num_bytes % WORD_BYTES == 0 and x.data_ptr() % WORD_BYTES == 0
    return num_bytes // WORD_BYTES if can_send else 0


def _words(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int32)
