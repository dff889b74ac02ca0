"""Order (token, expert) pairs by expert, as Triton kernels. Legend: P pairs, E experts.

The order is a counting sort on the device, so the host need not know the number of tokens of each
expert. With few pairs, there is one launch, in which each expert's program reads all pairs. With
more pairs, there are three launches: count the experts' pairs in each chunk, add up the counts of
the previous chunks, and find the row of every pair.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import ModelSizes, last_of_classes
from finwhale.ops.moe import Dispatched

# Up to this number of pairs, every expert's program reads all pairs.
FEW_PAIRS = 2048
CHUNK = 128  # pairs of a chunk, which are compared with each other in one tile
# Numbers of experts and chunks that a program of `_scan_kernel` adds up at a time.
SCAN_EXPERTS, SCAN_CHUNKS = 16, 128
ALIGN = 8  # alignment of an expert's first row, which TMA needs for the scales


@dataclass(frozen=True, slots=True)
class OrderedPairs(Dispatched):
    """Rows for the pairs. The rows of an expert are adjacent and start at a multiple of 8.

    Attributes:
        order: int32 [P]: the pair of each row; undefined for rows without a pair.
        pair_rows: int32 [N K]: the row of each pair, -1: none.
        blocks: int32 [B,3]: (expert, first row, end) of up to block_rows rows; expert -1: no block.
        block_rows: the most rows of a block.
    """

    order: Tensor
    pair_rows: Tensor
    blocks: Tensor
    block_rows: int


@triton.jit
def _aligned(count):
    return (count + 7) // 8 * 8


@triton.jit
def _write_blocks(
    blocks_ptr, expert, first, count, base, room, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Write `room` blocks from base on: (expert, first, end) of up to BLOCK_N pairs, then -1."""
    for start in tl.range(0, room, BLOCK_S):
        block = start + tl.arange(0, BLOCK_S)
        entry = blocks_ptr + (base + block) * 3
        is_used = block * BLOCK_N < count
        tl.store(entry, tl.where(is_used, expert, -1), mask=block < room)
        tl.store(entry + 1, first + block * BLOCK_N, mask=block < room)
        tl.store(entry + 2, first + count + 0 * block, mask=block < room)


@triton.jit(do_not_specialize=["P", "slots"])
def _order_few_kernel(
    ids_ptr,
    order_ptr,
    pair_rows_ptr,
    blocks_ptr,
    P,
    E,
    slots,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Order one expert's pairs and write its blocks, with consecutive numbers."""
    expert = tl.program_id(0)
    start_next(PDL)
    wait_for_last(PDL)
    pair = tl.arange(0, BLOCK_P)
    ids = tl.load(ids_ptr + pair, mask=pair < P, other=-1).to(tl.int32)
    counts = tl.histogram(tl.where(ids < 0, BLOCK_E - 1, ids), BLOCK_E)
    each = tl.arange(0, BLOCK_E)
    before = tl.where(each < expert, counts, 0)
    first = tl.sum(_aligned(before))
    count = tl.sum(tl.where(each == expert, counts, 0))
    is_expert = ids == expert
    rank = first + tl.cumsum(is_expert.to(tl.int32), 0) - 1
    tl.store(order_ptr + rank, pair, mask=is_expert)
    tl.store(pair_rows_ptr + pair, rank, mask=is_expert)
    if expert == 0:
        tl.store(pair_rows_ptr + pair, -1, mask=(ids < 0) & (pair < P))
    base = tl.sum((before + BLOCK_N - 1) // BLOCK_N)
    room = tl.where(expert == E - 1, slots - base, (count + BLOCK_N - 1) // BLOCK_N)
    _write_blocks(blocks_ptr, expert, first, count, base, room, BLOCK_N, BLOCK_S)


@triton.jit(do_not_specialize=["P"])
def _count_kernel(
    ids_ptr, counts_ptr, P, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    """Count each expert's pairs in a chunk: counts [chunks,BLOCK_E]; the last bin is for id -1."""
    start_next(PDL)
    wait_for_last(PDL)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pair, mask=pair < P, other=-1).to(tl.int32)
    counts = tl.histogram(tl.where(ids < 0, BLOCK_E - 1, ids), BLOCK_E)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counts_ptr,
    totals_ptr,
    chunks,
    BLOCK_E: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replace each count by the sum over the previous chunks; write the totals [BLOCK_E]."""
    start_next(PDL)
    wait_for_last(PDL)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in tl.range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        count_ptrs = counts_ptr + chunk[:, None] * BLOCK_E + expert[None, :]
        counts = tl.load(count_ptrs, mask=(chunk < chunks)[:, None], other=0)
        before = total[None, :] + tl.cumsum(counts, 0) - counts
        tl.store(count_ptrs, before, mask=(chunk < chunks)[:, None])
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["P", "chunks", "slots"])
def _order_many_kernel(
    ids_ptr,
    before_ptr,
    totals_ptr,
    order_ptr,
    pair_rows_ptr,
    blocks_ptr,
    P,
    E,
    chunks,
    slots,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs order one chunk each; the others write the blocks of one expert each.

    The blocks of expert e start at index first // BLOCK_N + e, which leaves room for all blocks.
    """
    start_next(PDL)
    wait_for_last(PDL)
    program = tl.program_id(0)
    each = tl.arange(0, BLOCK_E)
    total = tl.load(totals_ptr + each)
    aligned = tl.where(each < E, _aligned(total), 0)
    first = tl.cumsum(aligned, 0) - aligned
    if program < chunks:
        pair = program * CHUNK + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + pair, mask=pair < P, other=-1).to(tl.int32)
        is_used = ids >= 0
        known = tl.where(is_used, ids, 0)
        rank = tl.gather(first, known, 0)
        rank += tl.load(before_ptr + program * BLOCK_E + known)
        other = program * CHUNK + tl.arange(0, CHUNK)
        other_ids = tl.load(ids_ptr + other, mask=other < P, other=-1).to(tl.int32)
        same = (ids[:, None] == other_ids[None, :]) & (other[None, :] < pair[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
        tl.store(order_ptr + rank, pair, mask=is_used)
        tl.store(pair_rows_ptr + pair, tl.where(is_used, rank, -1), mask=pair < P)
    else:
        expert = program - chunks
        is_expert = each == expert
        start = tl.sum(tl.where(is_expert, first, 0))
        count = tl.sum(tl.where(is_expert, total, 0))
        base = start // BLOCK_N + expert
        end = (start + _aligned(count)) // BLOCK_N + expert + 1
        room = tl.where(expert == E - 1, slots, end) - base
        _write_blocks(blocks_ptr, expert, start, count, base, room, BLOCK_N, BLOCK_S)


def order_sizes(pairs: int, num_experts: int, block_rows: int) -> tuple[int, int]:
    """The most (rows P, blocks B) for a number of pairs, for any distribution over experts."""
    rows = triton.cdiv(pairs + (ALIGN - 1) * min(pairs, num_experts), ALIGN) * ALIGN
    slots = num_experts + rows // block_rows
    return rows, min(pairs, slots) if pairs <= FEW_PAIRS else slots


def _few_pairs_tile(pairs: int) -> int:
    return max(16, triton.next_power_of_2(pairs))


def _few_blocks_tile(slots: int) -> int:
    return min(1024, triton.next_power_of_2(slots))


def launch_class(pairs: int, num_experts: int, block_rows: int) -> tuple[int, ...]:
    """The arguments common to all launches for a number of pairs."""
    _, slots = order_sizes(pairs, num_experts, block_rows)
    if pairs > FEW_PAIRS:
        return (block_rows,)
    return block_rows, _few_pairs_tile(pairs), _few_blocks_tile(slots)


def launch_tokens_of_plan(
    plan: Callable[[int, int], Any],
    model: ModelSizes,
    most: int,
    others: Callable[[int, int], object] = lambda num_tokens, rows: None,
) -> set[int]:
    """`LaunchClasses.tokens` for a plan function of pairs and experts.

    Args:
        others: the class of the other launches, by the number of tokens and of their rows.
    """

    def class_of(num_tokens: int) -> object:
        pairs, experts = num_tokens * model.experts_per_token, model.num_experts
        chosen = plan(pairs, experts)
        rows, _ = order_sizes(pairs, experts, chosen.block_rows)
        order = launch_class(pairs, experts, chosen.block_rows)
        return chosen, order, others(num_tokens, rows)

    return last_of_classes(class_of, most)


def order_pairs(
    ids_NK: Tensor, num_experts: int, block_rows: int, early_launch: bool
) -> OrderedPairs:
    """Order the pairs of any number of tokens. ids int32 or int64; -1: no pair."""
    if not ids_NK.is_contiguous():
        raise ValueError("ids must be contiguous")
    pairs = ids_NK.numel()
    rows, slots = order_sizes(pairs, num_experts, block_rows)
    order, pair_rows = _empty(ids_NK, rows), _empty(ids_NK, pairs)
    result = OrderedPairs(ids_NK, order, pair_rows, _empty(ids_NK, slots, 3), block_rows)
    if pairs > FEW_PAIRS:
        _order_many(result, num_experts, launch_options(early_launch))
    elif pairs:
        _order_few_kernel[(num_experts,)](
            *(ids_NK, order, pair_rows, result.blocks, pairs, num_experts, slots),
            BLOCK_N=block_rows,
            BLOCK_P=_few_pairs_tile(pairs),
            BLOCK_E=_experts_tile(num_experts),
            BLOCK_S=_few_blocks_tile(slots),
            num_warps=4,
            **launch_options(early_launch),
        )
    return result


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def _experts_tile(num_experts: int) -> int:
    """The experts, and a place for pairs without one."""
    return triton.next_power_of_2(num_experts + 1)


def _order_many(result: OrderedPairs, num_experts: int, options: dict[str, Any]) -> None:
    ids, pairs, block_e = result.ids, result.ids.numel(), _experts_tile(num_experts)
    chunks = triton.cdiv(pairs, CHUNK)
    counts, totals = _empty(ids, chunks, block_e), _empty(ids, block_e)
    _count_kernel[(chunks,)](
        ids, counts, pairs, CHUNK=CHUNK, BLOCK_E=block_e, num_warps=4, **options
    )
    _scan_kernel[(triton.cdiv(block_e, SCAN_EXPERTS),)](
        *(counts, totals, chunks),
        BLOCK_E=block_e,
        EXPERTS=min(SCAN_EXPERTS, block_e),
        CHUNKS=SCAN_CHUNKS,
        num_warps=4,
        **options,
    )
    _order_many_kernel[(chunks + num_experts,)](
        # The counts are now the sums over the previous chunks.
        *(ids, counts, totals, result.order, result.pair_rows, result.blocks),
        *(pairs, num_experts, chunks, len(result.blocks)),
        BLOCK_N=result.block_rows,
        CHUNK=CHUNK,
        BLOCK_E=block_e,
        BLOCK_S=64,
        num_warps=4,
        **options,
    )
