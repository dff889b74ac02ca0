"""Collectives as Triton kernels that push words into the other ranks' memory.

A word is 4 bytes: a float32 or two bfloat16. The kernels for small messages send each word with a
flag in one 8-byte store (NCCL's "LL" protocol): the receiver polls the words themselves, so that
neither a barrier nor a fence stands between the data and its flag. The memory model needs no more:
8-byte accesses are single-copy atomic at system scope, also as parts of 16-byte vector accesses;
the stores are write-through and the loads volatile, so that both are strong operations at system
scope. The kernel for large messages sends words without flags, which halves the traffic, and then
one flag for each program and peer, released and acquired at system scope.

Program b of a rank exchanges words with program b of every other rank and with no other program.
It counts its exchanges; this count, the epoch, is the flag. An exchange uses the half of the buffer
that the parity of its epoch selects. A rank cannot be two exchanges ahead of another, because it
needs the words of every rank to finish one. So it never overwrites words that a slower rank still
reads. Every exchange writes all words of the program's region, so that a flag in the buffer is
that of the exchange before the last, even after epochs wrap around.

The sums are a tree of pairs: rank r computes ((x[r] + x[r^1]) + (x[r^2] + x[r^3])) + ... Additions
commute, so that all ranks get the bits of ((x[0] + x[1]) + (x[2] + x[3])) + ...

Each wait is bounded. When it gives up, the kernel names the missing ranks in `faults`, sets `limit`
to 0, so that later kernels do not wait at all, and returns NaN for what is missing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from finwhale.distributed.rank import Rank

# Bytes of a fresh buffer: no flag of an early epoch, and NaN as float32 and as bfloat16.
POISON = 0xFF

Phases = tuple[int, int]  # the first and the last that a launch runs


@dataclass(frozen=True, slots=True)
class Channel:
    """Memory through which the programs of all ranks exchange words.

    Attributes:
        buffer: of this rank, [2, size, capacity]: int64 for words with flags, int32 without.
        flags: [programs, size] int32; None if words carry flags.
        pointers: [2, size] int64: the addresses of all ranks' buffers, and of all ranks' flags.
        epochs: [programs] int32: the number of exchanges of each program.
        limit: [1] int32: how often a wait polls before it gives up.
        faults: address of [size] int32 that the host can read: 1 for a rank that was missing.
        block: words of a program.
        capacity: words that a rank sends to another in one exchange, a multiple of `block`.
    """

    rank: Rank
    buffer: Tensor
    flags: Tensor | None
    pointers: Tensor
    epochs: Tensor
    limit: Tensor
    faults: int
    block: int
    capacity: int
    warps: int

    def arguments(self) -> tuple[Tensor | int, ...]:
        """Arguments of every kernel."""
        flags = () if self.flags is None else (self.flags,)
        return (self.buffer, *flags, self.pointers, self.epochs, self.limit, self.faults)


@triton.jit
def _begin(DEPENDENT: tl.constexpr):
    """Start early, and wait for the kernel before; nothing is read before that has ended."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _peer_memory(pointers_ptr, place, offsets, element: tl.constexpr):
    """Pointers into a rank's memory, whose address is loaded."""
    base = tl.load(pointers_ptr + place).to(tl.pointer_type(element))
    return tl.multiple_of(base + offsets, 16)


@triton.jit
def _with_flag(words, epoch):
    return (epoch.to(tl.int64) << 32) | words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _send(pointers_ptr, words, epoch, rank, peer, W, capacity, BLOCK: tl.constexpr):
    """Push words with flags to a peer."""
    place = ((epoch & 1) * W + rank) * capacity + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = _peer_memory(pointers_ptr, peer, place, tl.int64)
    tl.store(target, _with_flag(words, epoch), cache_modifier=".wt")


@triton.jit
def _receive(
    buffer_ptr,
    limit_ptr,
    faults,
    own,
    epoch,
    rank,
    capacity,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait for the words of all ranks: [W, BLOCK], row j from rank ^ j, row 0 this rank's own."""
    j = tl.arange(0, W)[:, None]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    source = buffer_ptr + ((epoch & 1) * W + (rank ^ j)) * capacity + place
    other = _with_flag(own, epoch)[None, :]
    is_peer = (j > 0) & (place >= 0)
    limit = tl.load(limit_ptr)
    packed = tl.load(source, mask=is_peer, other=other, volatile=True)
    missing = tl.sum(((packed >> 32).to(tl.int32) != epoch).to(tl.int32))
    polls = 0
    while (missing > 0) & (polls < limit):
        packed = tl.load(source, mask=is_peer, other=other, volatile=True)
        missing = tl.sum(((packed >> 32).to(tl.int32) != epoch).to(tl.int32))
        polls += 1
    arrived = (packed >> 32).to(tl.int32) == epoch
    if missing > 0:
        _report(limit_ptr, faults, tl.min(arrived.to(tl.int32), axis=1) == 0, rank, W)
    return tl.where(arrived, packed.to(tl.int32), -1)


@triton.jit
def _report(limit_ptr, faults, is_missing, rank, W: tl.constexpr):
    """Name the missing ranks to the host, and let no later kernel wait."""
    peer = rank ^ tl.arange(0, W)
    tl.store(faults.to(tl.pointer_type(tl.int32)) + peer, 1, mask=is_missing)
    tl.store(limit_ptr, 0)


@triton.jit
def _by_pairs(x, W: tl.constexpr, BLOCK: tl.constexpr):
    """Sum [W, BLOCK] over W as a tree of pairs."""
    x = tl.trans(x)
    if W == 8:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 4, 2]))
        x = even + odd
    if W >= 4:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2]))
        x = even + odd
    even, odd = tl.split(tl.reshape(x, [BLOCK, 1, 2]))
    return tl.reshape(even + odd, [BLOCK])


@triton.jit
def _sum(words, BFLOAT16: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the values of [W, BLOCK] words over W in float32, and round once."""
    if BFLOAT16:
        low = _by_pairs((words << 16).to(tl.float32, bitcast=True), W, BLOCK)
        high = _by_pairs((words & -65536).to(tl.float32, bitcast=True), W, BLOCK)
        low = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        high = high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (high << 16)
    else:
        total = _by_pairs(words.to(tl.float32, bitcast=True), W, BLOCK)
        return total.to(tl.int32, bitcast=True)


# In the kernels below, phases FIRST to LAST run. A launch runs all of them; a test without several
# GPUs runs each phase on every rank in turn. The rank is not specialised, so that all ranks run the
# same compiled kernels.


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    x_ptr,
    out_ptr,
    buffer_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    n,
    rank,
    capacity,
    BFLOAT16: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All-reduce: each rank sends x to every rank, and sums what it receives."""
    _begin(DEPENDENT)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    if FIRST == 0:
        for j in tl.static_range(1, W):
            _send(pointers_ptr, own, epoch, rank, rank ^ j, W, capacity, BLOCK)
    if LAST == 1:
        words = _receive(buffer_ptr, limit_ptr, faults, own, epoch, rank, capacity, W, BLOCK)
        tl.store(out_ptr + offsets, _sum(words, BFLOAT16, W, BLOCK), mask=offsets < n)
        tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["rank"])
def _two_shot_kernel(
    x_ptr,
    out_ptr,
    buffer_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    n,
    part,
    rank,
    capacity,
    BFLOAT16: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All-reduce: rank r sums part r of x, of `part` words, and sends the sum to every rank."""
    _begin(DEPENDENT)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    inside = program * BLOCK + tl.arange(0, BLOCK)
    offsets = rank * part + inside
    is_own = (inside < part) & (offsets < n)
    if FIRST == 0:
        for j in tl.static_range(1, W):
            peer = rank ^ j
            place = peer * part + inside
            words = tl.load(x_ptr + place, mask=(inside < part) & (place < n), other=0)
            _send(pointers_ptr, words, epoch, rank, peer, W, capacity, BLOCK)
    if (FIRST <= 1) & (LAST >= 1):
        own = tl.load(x_ptr + offsets, mask=is_own, other=0)
        words = _receive(buffer_ptr, limit_ptr, faults, own, epoch, rank, capacity, W, BLOCK)
        total = _sum(words, BFLOAT16, W, BLOCK)
        tl.store(out_ptr + offsets, total, mask=is_own)
        for j in tl.static_range(1, W):
            _send(pointers_ptr, total, epoch + 1, rank, rank ^ j, W, capacity, BLOCK)
    if LAST == 2:
        own = tl.zeros([BLOCK], tl.int32)
        words = _receive(buffer_ptr, limit_ptr, faults, own, epoch + 1, rank, capacity, W, BLOCK)
        j = tl.arange(0, W)[:, None]
        place = (rank ^ j) * part + inside[None, :]
        tl.store(out_ptr + place, words, mask=(j > 0) & (inside < part)[None, :] & (place < n))
        tl.store(epochs_ptr + program, epoch + 1)


@triton.jit(do_not_specialize=["rank"])
def _all_gather_kernel(
    x_ptr,
    out_ptr,
    buffer_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    n,
    width,
    rank,
    capacity,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [n / width, width] of every rank -> out [n / width, W, width]."""
    _begin(DEPENDENT)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    if FIRST == 0:
        for j in tl.static_range(1, W):
            _send(pointers_ptr, own, epoch, rank, rank ^ j, W, capacity, BLOCK)
    if LAST == 1:
        words = _receive(buffer_ptr, limit_ptr, faults, own, epoch, rank, capacity, W, BLOCK)
        peer = rank ^ tl.arange(0, W)[:, None]
        row = offsets // width
        place = (row * (W * width) + offsets % width)[None, :] + peer * width
        tl.store(out_ptr + place, words, mask=(offsets < n)[None, :] & (peer >= 0))
        tl.store(epochs_ptr + program, epoch)


@triton.jit
def _send_bare(pointers_ptr, words, epoch, rank, peer, W, capacity, mask, BLOCK: tl.constexpr):
    """Push words without flags to a peer."""
    place = ((epoch & 1) * W + rank) * capacity + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(_peer_memory(pointers_ptr, peer, place, tl.int32), words, mask=mask)


@triton.jit
def _raise_flags(pointers_ptr, epoch, rank, W: tl.constexpr):
    """After all stores of the program: tell each rank, one thread a rank."""
    tl.debug_barrier()
    peer = tl.arange(0, W)
    flags = tl.load(pointers_ptr + W + peer).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + tl.program_id(0) * W + rank, epoch, sem="release", scope="sys")


@triton.jit
def _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W: tl.constexpr):
    """Wait for the flags of all ranks; whether each came, in the order rank ^ j."""
    flags = flags_ptr + tl.program_id(0) * W + (rank ^ tl.arange(0, W))
    limit = tl.load(limit_ptr)
    ahead = tl.atomic_add(flags, 0, sem="acquire", scope="sys") - epoch
    polls = 0
    while (tl.min(ahead) < 0) & (polls < limit):
        ahead = tl.atomic_add(flags, 0, sem="acquire", scope="sys") - epoch
        polls += 1
    if tl.min(ahead) < 0:
        _report(limit_ptr, faults, ahead < 0, rank, W)
    tl.debug_barrier()
    return ahead >= 0


@triton.jit(do_not_specialize=["rank"])
def _bulk_kernel(
    x_ptr,
    out_ptr,
    buffer_ptr,
    flags_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    n,
    part,
    rank,
    capacity,
    BFLOAT16: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All-reduce as `_two_shot_kernel`, one flag for each program and peer."""
    _begin(DEPENDENT)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    inside = program * BLOCK + tl.arange(0, BLOCK)
    offsets = rank * part + inside
    is_own = (inside < part) & (offsets < n)
    j = tl.arange(0, W)[:, None]
    slot = (rank ^ j) * capacity + inside[None, :]
    is_peer = (j > 0) & (inside < part)[None, :]
    if FIRST == 0:
        for k in tl.static_range(1, W):
            peer = rank ^ k
            place = peer * part + inside
            words = tl.load(x_ptr + place, mask=(inside < part) & (place < n), other=0)
            _send_bare(pointers_ptr, words, epoch, rank, peer, W, capacity, inside < part, BLOCK)
        _raise_flags(pointers_ptr, epoch, rank, W)
    if (FIRST <= 1) & (LAST >= 1):
        own = tl.load(x_ptr + offsets, mask=is_own, other=0)
        came = _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W)
        source = buffer_ptr + (epoch & 1) * W * capacity + slot
        words = tl.load(source, mask=is_peer, other=own[None, :], volatile=True)
        total = _sum(tl.where(came[:, None], words, -1), BFLOAT16, W, BLOCK)
        tl.store(out_ptr + offsets, total, mask=is_own)
        for k in tl.static_range(1, W):
            peer = rank ^ k
            _send_bare(
                pointers_ptr, total, epoch + 1, rank, peer, W, capacity, inside < part, BLOCK
            )
        _raise_flags(pointers_ptr, epoch + 1, rank, W)
    if LAST == 2:
        came = _await_flags(flags_ptr, limit_ptr, faults, epoch + 1, rank, W)
        source = buffer_ptr + ((epoch + 1) & 1) * W * capacity + slot
        words = tl.load(source, mask=is_peer, other=0, volatile=True)
        place = (rank ^ j) * part + inside[None, :]
        words = tl.where(came[:, None], words, -1)
        tl.store(out_ptr + place, words, mask=is_peer & (place < n))
        tl.store(epochs_ptr + program, epoch + 1)


@triton.jit(do_not_specialize=["rank"])
def _reduce_scatter_kernel(
    x_ptr,
    out_ptr,
    buffer_ptr,
    flags_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    n,
    part,
    start,
    rank,
    capacity,
    BFLOAT16: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum part `rank` of the ranks' x into out; only the `capacity` words of it from `start`."""
    _begin(DEPENDENT)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    slot = program * BLOCK + tl.arange(0, BLOCK)
    inside = start + slot
    if FIRST == 0:
        for k in tl.static_range(1, W):
            peer = rank ^ k
            place = peer * part + inside
            mask = (inside < part) & (place < n)
            words = tl.load(x_ptr + place, mask=mask, other=0)
            _send_bare(pointers_ptr, words, epoch, rank, peer, W, capacity, mask, BLOCK)
        _raise_flags(pointers_ptr, epoch, rank, W)
    if LAST == 1:
        place = rank * part + inside
        mask = (inside < part) & (place < n)
        own = tl.load(x_ptr + place, mask=mask, other=0)
        came = _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W)
        j = tl.arange(0, W)[:, None]
        source = buffer_ptr + ((epoch & 1) * W + (rank ^ j)) * capacity + slot[None, :]
        words = tl.load(source, mask=(j > 0) & mask[None, :], other=own[None, :], volatile=True)
        total = _sum(tl.where(came[:, None], words, -1), BFLOAT16, W, BLOCK)
        tl.store(out_ptr + inside, total, mask=mask)
        tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["rank"])
def _gather_parts_kernel(
    x_ptr,
    out_ptr,
    buffer_ptr,
    flags_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    n,
    part,
    start,
    rank,
    capacity,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Copy the ranks' x to their parts of out; only the `capacity` words of each from `start`."""
    _begin(DEPENDENT)
    program = tl.program_id(0)
    epoch = tl.load(epochs_ptr + program) + 1
    slot = program * BLOCK + tl.arange(0, BLOCK)
    inside = start + slot
    if FIRST == 0:
        place = rank * part + inside
        mask = (inside < part) & (place < n)
        own = tl.load(x_ptr + inside, mask=mask, other=0)
        for k in tl.static_range(1, W):
            _send_bare(pointers_ptr, own, epoch, rank, rank ^ k, W, capacity, mask, BLOCK)
        _raise_flags(pointers_ptr, epoch, rank, W)
        tl.store(out_ptr + place, own, mask=mask)
    if LAST == 1:
        came = _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W)
        j = tl.arange(0, W)[:, None]
        place = (rank ^ j) * part + inside[None, :]
        mask = (j > 0) & (inside < part)[None, :] & (place < n)
        source = buffer_ptr + ((epoch & 1) * W + (rank ^ j)) * capacity + slot[None, :]
        words = tl.load(source, mask=mask, other=0, volatile=True)
        tl.store(out_ptr + place, tl.where(came[:, None], words, -1), mask=mask)
        tl.store(epochs_ptr + program, epoch)


def _options(early: bool) -> dict[str, bool]:
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False}


def one_shot(
    x: Tensor, out: Tensor, channel: Channel, bfloat16: bool, early: bool, phases: Phases = (0, 1)
) -> None:
    """All-reduce x into out; [n] int32 words, n at most the channel's capacity."""
    _one_shot_kernel[(triton.cdiv(len(x), channel.block),)](
        x,
        out,
        *channel.arguments(),
        len(x),
        channel.rank.index,
        channel.capacity,
        BFLOAT16=bfloat16,
        W=channel.rank.size,
        BLOCK=channel.block,
        FIRST=phases[0],
        LAST=phases[1],
        num_warps=channel.warps,
        **_options(early),
    )


def two_shot(
    x: Tensor, out: Tensor, channel: Channel, bfloat16: bool, early: bool, phases: Phases = (0, 2)
) -> None:
    """All-reduce x into out; [n] int32 words, n at most `size` times the channel's capacity."""
    kernel = _two_shot_kernel if channel.flags is None else _bulk_kernel
    part = part_words(len(x), channel.rank.size)
    kernel[(triton.cdiv(part, channel.block),)](
        x,
        out,
        *channel.arguments(),
        len(x),
        part,
        channel.rank.index,
        channel.capacity,
        BFLOAT16=bfloat16,
        W=channel.rank.size,
        BLOCK=channel.block,
        FIRST=phases[0],
        LAST=phases[1],
        num_warps=channel.warps,
        **_options(early),
    )


def all_gather(
    x: Tensor, out: Tensor, width: int, channel: Channel, early: bool, phases: Phases = (0, 1)
) -> None:
    """x [n] words, rows of `width` -> out [n / width, size, width]; n at most the capacity."""
    _all_gather_kernel[(triton.cdiv(len(x), channel.block),)](
        x,
        out,
        *channel.arguments(),
        len(x),
        width,
        channel.rank.index,
        channel.capacity,
        W=channel.rank.size,
        BLOCK=channel.block,
        FIRST=phases[0],
        LAST=phases[1],
        num_warps=channel.warps,
        **_options(early),
    )


def reduce_scatter(
    x: Tensor,
    out: Tensor,
    part: int,
    start: int,
    channel: Channel,
    bfloat16: bool,
    early: bool,
    phases: Phases = (0, 1),
) -> None:
    """Sum this rank's part, of `part` words, of the ranks' x [n] into out.

    Sums as many of its words from `start` on as the channel carries. The last ranks may have fewer
    than `part` words.
    """
    _reduce_scatter_kernel[_parts_grid(part, start, channel)](
        x,
        out,
        *channel.arguments(),
        len(x),
        part,
        start,
        channel.rank.index,
        channel.capacity,
        BFLOAT16=bfloat16,
        W=channel.rank.size,
        BLOCK=channel.block,
        FIRST=phases[0],
        LAST=phases[1],
        num_warps=channel.warps,
        **_options(early),
    )


def gather_parts(
    x: Tensor,
    out: Tensor,
    part: int,
    start: int,
    channel: Channel,
    early: bool,
    phases: Phases = (0, 1),
) -> None:
    """Concatenate the ranks' x, of `part` words each, to out [n]; words as in `reduce_scatter`."""
    _gather_parts_kernel[_parts_grid(part, start, channel)](
        x,
        out,
        *channel.arguments(),
        len(out),
        part,
        start,
        channel.rank.index,
        channel.capacity,
        W=channel.rank.size,
        BLOCK=channel.block,
        FIRST=phases[0],
        LAST=phases[1],
        num_warps=channel.warps,
        **_options(early),
    )


def _parts_grid(part: int, start: int, channel: Channel) -> tuple[int]:
    return (triton.cdiv(min(part - start, channel.capacity), channel.block),)


def part_words(num_words: int, size: int) -> int:
    """Words that a rank sums in two shots: a multiple of 16; the last rank may have fewer."""
    return -(-num_words // (16 * size)) * 16
