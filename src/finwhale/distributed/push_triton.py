"""Collectives as Triton kernels that push words into the other ranks' memory.

`finwhale/ops/ranks_triton.py` describes how the kernels for small messages exchange words with
flags. The kernel for large messages sends words without flags, which halves the traffic, and then
one flag for each program and peer, released and acquired at system scope.

Program b of a rank exchanges words only with program b of every other rank, and every exchange
writes all words of the program's region. So a stale flag in the buffer is from the exchange before
the last, even after epochs wrap around.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.ranks import Channel, Phases
from finwhale.ops.ranks_triton import peer_memory, receive, report, send, sum_words


@triton.jit
def _begin(epochs_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Start early, and wait for the previous kernel to end before anything is read.

    Returns the program's epoch, and the indices of its words.
    """
    start_next(PDL)
    wait_for_last(PDL)
    program = tl.program_id(0)
    return tl.load(epochs_ptr + program) + 1, program * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _load_part(x_ptr, rank, part, inside, n):
    """Load words of a rank's part of x, of `part` words; returns them, their mask and offsets."""
    offsets = rank * part + inside
    mask = (inside < part) & (offsets < n)
    return tl.load(x_ptr + offsets, mask=mask, other=0), mask, offsets


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
    PDL: tl.constexpr,
):
    """All-reduce: each rank sends x to every rank, and sums what it receives."""
    epoch, offsets = _begin(epochs_ptr, BLOCK, PDL)
    own = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    if FIRST == 0:
        for j in tl.static_range(1, W):
            send(pointers_ptr, own, None, epoch, offsets, rank, rank ^ j, W, capacity)
    if LAST == 1:
        words = receive(buffer_ptr, limit_ptr, faults, own, None, epoch, offsets, rank, capacity, W)
        tl.store(out_ptr + offsets, sum_words(words, BFLOAT16, W, BLOCK), mask=offsets < n)
        tl.store(epochs_ptr + tl.program_id(0), epoch)


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
    PDL: tl.constexpr,
):
    """All-reduce: rank r sums part r of x, of `part` words, and sends the sum to every rank."""
    epoch, inside = _begin(epochs_ptr, BLOCK, PDL)
    if FIRST == 0:
        for j in tl.static_range(1, W):
            words, _, _ = _load_part(x_ptr, rank ^ j, part, inside, n)
            send(pointers_ptr, words, None, epoch, inside, rank, rank ^ j, W, capacity)
    if (FIRST <= 1) & (LAST >= 1):
        own, is_own, offsets = _load_part(x_ptr, rank, part, inside, n)
        words = receive(buffer_ptr, limit_ptr, faults, own, None, epoch, inside, rank, capacity, W)
        total = sum_words(words, BFLOAT16, W, BLOCK)
        tl.store(out_ptr + offsets, total, mask=is_own)
        for j in tl.static_range(1, W):
            send(pointers_ptr, total, None, epoch + 1, inside, rank, rank ^ j, W, capacity)
    if LAST == 2:
        own = tl.zeros([BLOCK], tl.int32)
        words = receive(
            buffer_ptr, limit_ptr, faults, own, None, epoch + 1, inside, rank, capacity, W
        )
        j = tl.arange(0, W)[:, None]
        peer_offsets = (rank ^ j) * part + inside[None, :]
        tl.store(
            out_ptr + peer_offsets,
            words,
            mask=(j > 0) & (inside < part)[None, :] & (peer_offsets < n),
        )
        tl.store(epochs_ptr + tl.program_id(0), epoch + 1)


@triton.jit
def _gather(
    channel,
    x_ptr,
    out_ptr,
    n,
    width,
    inside,
    offsets,
    epoch,
    W: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Send a program's words of x to the other ranks, and store those of all ranks in out.

    n, width: words of x, and of a row of x. inside: the indices of the words in x. offsets: where
    the same words lie in the channel.
    """
    buffer_ptr, pointers_ptr, epochs_ptr, limit_ptr, faults, rank, capacity = channel
    own = tl.load(x_ptr + inside, mask=inside < n, other=0)
    if FIRST == 0:
        for j in tl.static_range(1, W):
            send(pointers_ptr, own, None, epoch, offsets, rank, rank ^ j, W, capacity)
    if LAST == 1:
        words = receive(buffer_ptr, limit_ptr, faults, own, None, epoch, offsets, rank, capacity, W)
        peer = rank ^ tl.arange(0, W)[:, None]
        row = inside // width
        out_offsets = (row * (W * width) + inside % width)[None, :] + peer * width
        tl.store(out_ptr + out_offsets, words, mask=(inside < n)[None, :] & (peer >= 0))
        tl.store(epochs_ptr + tl.program_id(0), epoch)


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
    PDL: tl.constexpr,
):
    """x [n / width, width] of every rank -> out [n / width, W, width]."""
    epoch, offsets = _begin(epochs_ptr, BLOCK, PDL)
    channel = buffer_ptr, pointers_ptr, epochs_ptr, limit_ptr, faults, rank, capacity
    _gather(channel, x_ptr, out_ptr, n, width, offsets, offsets, epoch, W, FIRST, LAST)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "rank"])
def _gather_each_kernel(
    x0_ptr,
    out0_ptr,
    x1_ptr,
    out1_ptr,
    x2_ptr,
    out2_ptr,
    buffer_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    n0,
    n1,
    n2,
    rank,
    capacity,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [n] of every rank -> out [W, n], for three x. A program has words of one of them."""
    epoch, offsets = _begin(epochs_ptr, BLOCK, PDL)
    x_ptr, out_ptr, n, inside = x0_ptr, out0_ptr, n0, offsets
    first = tl.cdiv(n0, BLOCK)
    if tl.program_id(0) >= first:
        x_ptr, out_ptr, n, inside = x1_ptr, out1_ptr, n1, offsets - first * BLOCK
    first += tl.cdiv(n1, BLOCK)
    if tl.program_id(0) >= first:
        x_ptr, out_ptr, n, inside = x2_ptr, out2_ptr, n2, offsets - first * BLOCK
    channel = buffer_ptr, pointers_ptr, epochs_ptr, limit_ptr, faults, rank, capacity
    _gather(channel, x_ptr, out_ptr, n, n, inside, offsets, epoch, W, FIRST, LAST)


@triton.jit
def _send_bare(pointers_ptr, words, epoch, rank, peer, W, capacity, mask, BLOCK: tl.constexpr):
    """Push words without flags to a peer."""
    offsets = ((epoch & 1) * W + rank) * capacity + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(peer_memory(pointers_ptr, peer, offsets, tl.int32), words, mask=mask)


@triton.jit
def _raise_flags(pointers_ptr, epoch, rank, W: tl.constexpr):
    """After all stores of the program, set its flag on each rank, with one thread for each rank."""
    tl.debug_barrier()
    peer = tl.arange(0, W)
    flags = tl.load(pointers_ptr + W + peer).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + tl.program_id(0) * W + rank, epoch, sem="release", scope="sys")


@triton.jit
def _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W: tl.constexpr):
    """Wait for the flags of all ranks; returns whether each arrived, in the order rank ^ j."""
    flags = flags_ptr + tl.program_id(0) * W + (rank ^ tl.arange(0, W))
    limit = tl.load(limit_ptr)
    ahead = tl.atomic_add(flags, 0, sem="acquire", scope="sys") - epoch
    polls = 0
    while (tl.min(ahead) < 0) & (polls < limit):
        ahead = tl.atomic_add(flags, 0, sem="acquire", scope="sys") - epoch
        polls += 1
    if (tl.min(ahead) < 0) & (limit > 0):
        report(limit_ptr, faults, ahead < 0, rank, W)
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
    PDL: tl.constexpr,
):
    """All-reduce like `_two_shot_kernel`, with one flag for each program and peer."""
    epoch, inside = _begin(epochs_ptr, BLOCK, PDL)
    offsets = rank * part + inside
    is_own = (inside < part) & (offsets < n)
    j = tl.arange(0, W)[:, None]
    slot = (rank ^ j) * capacity + inside[None, :]
    is_peer = (j > 0) & (inside < part)[None, :]
    if FIRST == 0:
        for k in tl.static_range(1, W):
            peer = rank ^ k
            words, _, _ = _load_part(x_ptr, peer, part, inside, n)
            _send_bare(pointers_ptr, words, epoch, rank, peer, W, capacity, inside < part, BLOCK)
        _raise_flags(pointers_ptr, epoch, rank, W)
    if (FIRST <= 1) & (LAST >= 1):
        own = tl.load(x_ptr + offsets, mask=is_own, other=0)
        came = _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W)
        source = buffer_ptr + (epoch & 1) * W * capacity + slot
        words = tl.load(source, mask=is_peer, other=own[None, :], volatile=True)
        total = sum_words(tl.where(came[:, None], words, -1), BFLOAT16, W, BLOCK)
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
        peer_offsets = (rank ^ j) * part + inside[None, :]
        words = tl.where(came[:, None], words, -1)
        tl.store(out_ptr + peer_offsets, words, mask=is_peer & (peer_offsets < n))
        tl.store(epochs_ptr + tl.program_id(0), epoch + 1)


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
    PDL: tl.constexpr,
):
    """Sum part `rank` of the ranks' x into out: only `capacity` words from `start` on."""
    epoch, slot = _begin(epochs_ptr, BLOCK, PDL)
    inside = start + slot
    if FIRST == 0:
        for k in tl.static_range(1, W):
            words, mask, _ = _load_part(x_ptr, rank ^ k, part, inside, n)
            _send_bare(pointers_ptr, words, epoch, rank, rank ^ k, W, capacity, mask, BLOCK)
        _raise_flags(pointers_ptr, epoch, rank, W)
    if LAST == 1:
        own, mask, _ = _load_part(x_ptr, rank, part, inside, n)
        came = _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W)
        j = tl.arange(0, W)[:, None]
        source = buffer_ptr + ((epoch & 1) * W + (rank ^ j)) * capacity + slot[None, :]
        words = tl.load(source, mask=(j > 0) & mask[None, :], other=own[None, :], volatile=True)
        total = sum_words(tl.where(came[:, None], words, -1), BFLOAT16, W, BLOCK)
        tl.store(out_ptr + inside, total, mask=mask)
        tl.store(epochs_ptr + tl.program_id(0), epoch)


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
    PDL: tl.constexpr,
):
    """Copy the ranks' x to their parts of out: only `capacity` words of each from `start` on."""
    epoch, slot = _begin(epochs_ptr, BLOCK, PDL)
    inside = start + slot
    if FIRST == 0:
        own_offsets = rank * part + inside
        mask = (inside < part) & (own_offsets < n)
        own = tl.load(x_ptr + inside, mask=mask, other=0)
        for k in tl.static_range(1, W):
            _send_bare(pointers_ptr, own, epoch, rank, rank ^ k, W, capacity, mask, BLOCK)
        _raise_flags(pointers_ptr, epoch, rank, W)
        tl.store(out_ptr + own_offsets, own, mask=mask)
    if LAST == 1:
        came = _await_flags(flags_ptr, limit_ptr, faults, epoch, rank, W)
        j = tl.arange(0, W)[:, None]
        peer_offsets = (rank ^ j) * part + inside[None, :]
        mask = (j > 0) & (inside < part)[None, :] & (peer_offsets < n)
        source = buffer_ptr + ((epoch & 1) * W + (rank ^ j)) * capacity + slot[None, :]
        words = tl.load(source, mask=mask, other=0, volatile=True)
        tl.store(out_ptr + peer_offsets, tl.where(came[:, None], words, -1), mask=mask)
        tl.store(epochs_ptr + tl.program_id(0), epoch)


@triton.jit(do_not_specialize=["rank"])
def _await_copies_kernel(flags_ptr, limit_ptr, faults, rank, W: tl.constexpr):
    """Wait until all ranks' flags are 1, and clear those of the others (`push_copies.py`)."""
    _await_flags(flags_ptr, limit_ptr, faults, 1, rank, W)
    peer = tl.arange(0, W)
    tl.store(flags_ptr + peer, 0, mask=peer != rank)


@triton.jit(do_not_specialize=["rank"])
def _sum_landed_kernel(
    x_ptr,
    out_ptr,
    landed_ptr,
    n,
    part,
    rank,
    BFLOAT16: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add to x [n] the other ranks' words: those of rank r begin at word r * part of `landed`."""
    start_next(PDL)
    wait_for_last(PDL)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x_ptr + inside, mask=inside < n, other=0)
    j = tl.arange(0, W)[:, None]
    is_peer = (j > 0) & (inside < n)[None, :]
    source = landed_ptr + (rank ^ j) * part + inside[None, :]
    words = tl.load(source, mask=is_peer, other=own[None, :])
    tl.store(out_ptr + inside, sum_words(words, BFLOAT16, W, BLOCK), mask=inside < n)


def _launch(
    kernel: Any,
    num_words: int,
    tensors: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    channel: Channel,
    early: bool,
    phases: Phases,
    **constants: bool,
) -> None:
    """Launch programs for `num_words` words. tensors: each x and out; sizes: numbers of words."""
    kernel[(triton.cdiv(num_words, channel.block),)](
        *tensors,
        *channel.arguments(),
        *sizes,
        channel.index,
        channel.capacity,
        **constants,
        W=channel.size,
        BLOCK=channel.block,
        FIRST=phases[0],
        LAST=phases[1],
        num_warps=channel.warps,
        **launch_options(early),
    )


def one_shot(
    x: Tensor, out: Tensor, channel: Channel, bfloat16: bool, early: bool, phases: Phases = (0, 1)
) -> None:
    """All-reduce x into out; [n] int32 words, n at most the channel's capacity."""
    sizes = (len(x),)
    _launch(_one_shot_kernel, len(x), (x, out), sizes, channel, early, phases, BFLOAT16=bfloat16)


def two_shot(
    x: Tensor, out: Tensor, channel: Channel, bfloat16: bool, early: bool, phases: Phases = (0, 2)
) -> None:
    """All-reduce x into out; [n] int32 words, n at most `size` times the channel's capacity."""
    kernel = _two_shot_kernel if channel.flags is None else _bulk_kernel
    part = part_words(len(x), channel.size)
    sizes = len(x), part
    _launch(kernel, part, (x, out), sizes, channel, early, phases, BFLOAT16=bfloat16)


def all_gather(
    x: Tensor, out: Tensor, width: int, channel: Channel, early: bool, phases: Phases = (0, 1)
) -> None:
    """x [n] words, rows of `width` -> out [n / width, size, width]; n at most the capacity."""
    _launch(_all_gather_kernel, len(x), (x, out), (len(x), width), channel, early, phases)


def gather_each(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    channel: Channel,
    early: bool,
    phases: Phases = (0, 1),
) -> None:
    """Three x [n] words -> their out [size, n]; `can_gather_each` must be true of them."""
    programs = sum(_programs(x, channel) for x in xs)
    tensors = tuple(each for pair in zip(xs, outs, strict=True) for each in pair)
    sizes = tuple(map(len, xs))
    words = programs * channel.block
    _launch(_gather_each_kernel, words, tensors, sizes, channel, early, phases)


def can_gather_each(xs: Sequence[Tensor], channel: Channel) -> bool:
    """Whether the channel has room for three x, each with programs of its own."""
    return len(xs) == 3 and sum(_programs(x, channel) for x in xs) <= len(channel.epochs)


def _programs(x: Tensor, channel: Channel) -> int:
    return -(-len(x) // channel.block)


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

    The call sums only as many words from `start` on as the channel's capacity. The last ranks may
    have fewer than `part` words.
    """
    count, sizes = min(part - start, channel.capacity), (len(x), part, start)
    _launch(
        _reduce_scatter_kernel, count, (x, out), sizes, channel, early, phases, BFLOAT16=bfloat16
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
    count, sizes = min(part - start, channel.capacity), (len(out), part, start)
    _launch(_gather_parts_kernel, count, (x, out), sizes, channel, early, phases)


def await_copies(flags: Tensor, limit: Tensor, faults: int, rank: int) -> None:
    """Wait for all ranks' flags [size] int32, and clear those of the others. See Channel."""
    _await_copies_kernel[(1,)](flags, limit, faults, rank, W=len(flags), num_warps=1)


def sum_landed(
    x: Tensor, out: Tensor, landed: Tensor, part: int, rank: int, size: int, early: bool
) -> None:
    """Add the other ranks' x to this rank's, in the order of `Collectives.all_reduce`.

    Args:
        x, out: float32 or bfloat16 of whole words.
        landed: the other ranks' x, as int32 words; those of rank r begin at word r * part.
    """
    words, block = x.view(-1).view(torch.int32), 2048
    _sum_landed_kernel[(triton.cdiv(len(words), block),)](
        *(words, out.view(-1).view(torch.int32), landed, len(words), part, rank),
        BFLOAT16=x.dtype == torch.bfloat16,
        W=size,
        BLOCK=block,
        num_warps=8,
        **launch_options(early),
    )


def part_words(num_words: int, size: int) -> int:
    """Number of words that a rank sums in two shots, a multiple of 16. The last may have fewer."""
    return -(-num_words // (16 * size)) * 16
