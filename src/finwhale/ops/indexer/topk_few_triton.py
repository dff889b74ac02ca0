"""The largest scores of a few tokens, in order of position, with several programs for each token.

The result is that of topk_triton.py, whose program for a long row takes long: it reads 16,384
scores, and finds two thresholds among thousands of keys, one pass after the other. Here the kernel
of the scores also stores the largest key of every GROUP adjacent entries. The topk-th largest of
these is a floor that at least topk entries reach, and seldom many more. A program finds the floor,
which is the same for all programs of a row, and keeps the entries of its chunk that reach it: the
candidates. The program that ends last selects among the candidates of all chunks.

The last program holds the candidates in registers: twice as many as topk, or eight times as many if
the best entries are neighbours. If there are still more, for example because their scores are
equal, it reads them again for each pass.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.indexer.topk_triton import (
    all_pages,
    choose,
    counters_of,
    find_threshold,
    store_all,
    store_slots,
    sums_before,
    to_keys,
    token_row,
)
from finwhale.ops.launch import launch_options
from finwhale.ops.paging import PageTable, Tokens

# Tokens that take this kernel. With more, a row's programs would repeat too much.
FEW_ROWS = 16
GROUP = 8  # entries of which the kernel of the scores stores the largest key
CHUNK = 4096  # entries of a program
MAXIMA = 4096  # that a program compares; in a longer row, each is the largest of several
# With 16 warps this kernel is 2 us faster, but attention, which follows, is often 5 us slower.
NUM_WARPS = 32


@triton.jit
def _floor(maxima_row_ptr, num_groups, topk, MAXIMA: tl.constexpr):
    """A key that at least topk of the num_groups maxima reach, and the largest key."""
    LOWEST: tl.constexpr = -0x7FFFFFFF - 1
    fold = tl.cdiv(num_groups, MAXIMA)
    first = tl.arange(0, MAXIMA) * fold
    keys = tl.full([MAXIMA], LOWEST, tl.int32)
    for i in range(fold):
        at = first + i
        keys = tl.maximum(
            keys, tl.load(maxima_row_ptr + at, mask=at < num_groups, other=-0x7FFFFFFF - 1)
        )
    low = tl.min(tl.where(first < num_groups, keys, 0x7FFFFFFF))
    high = tl.max(keys)
    count = tl.cdiv(num_groups, fold)
    # Few passes find a key that some more reach than must.
    floor, _ = find_threshold(keys, low, high, count, topk, topk + topk // 8)
    return floor, high


@triton.jit
def _candidates(lists, ranks, total, CHUNK: tl.constexpr):
    """The candidates with these ranks among all of a row, and which of them there are."""
    entries_ptr, keys_ptr, reached_ptr, num_chunks = lists
    at = ranks * 0
    end = 0
    for chunk in range(num_chunks):
        start = end
        end += tl.load(reached_ptr + chunk)
        at = tl.where((ranks >= start) & (ranks < end), chunk * CHUNK + ranks - start, at)
    there = ranks < total
    # Other programs wrote these, so bypass this multiprocessor's L1 cache.
    entries = tl.load(entries_ptr + at, mask=there, other=0, cache_modifier=".cg")
    keys = tl.load(keys_ptr + at, mask=there, other=0, cache_modifier=".cg")
    return entries, tl.where(there, keys, -0x7FFFFFFF - 1), there


@triton.jit
def _select(keys, entries, there, count, topk, slots, ROWS_PER_PAGE: tl.constexpr):
    """Select among `count` entries in registers. Keys that are not `there` are the lowest."""
    low = tl.min(tl.where(there, keys, 0x7FFFFFFF))
    threshold, ties = find_threshold(keys, low, tl.max(keys), count, topk, topk)
    chosen, place = choose(keys, threshold, ties)
    store_slots(slots[0], slots[1], entries, chosen & there, place, ROWS_PER_PAGE)


@triton.jit
def _select_held(
    lists,
    total,
    topk,
    slots,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
):
    """Select among at most SIZE candidates."""
    entries, keys, there = _candidates(lists, tl.arange(0, SIZE), total, CHUNK)
    _select(keys, entries, there, total, topk, slots, ROWS_PER_PAGE)


@triton.jit
def _select_streamed(
    lists,
    total,
    topk,
    low,
    high,
    slots,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
):
    """Select among any number of candidates, whose keys are low to high, SIZE at a time."""
    ranks = tl.arange(0, SIZE)
    reached = total
    above = 0
    while (low < high) & (reached > topk):
        # The difference wraps modulo 2^32 and is non-negative as uint32.
        span = (high - low).to(tl.uint32, bitcast=True)
        middle = low + (span // 2 + span % 2).to(tl.int32, bitcast=True)
        count = 0
        for start in range(0, total, SIZE):
            _, keys, there = _candidates(lists, start + ranks, total, CHUNK)
            count += tl.sum(((keys >= middle) & there).to(tl.int32))
        is_up = count >= topk
        low = tl.where(is_up, middle, low)
        reached = tl.where(is_up, count, reached)
        high = tl.where(is_up, high, middle - 1)
        above = tl.where(is_up, above, count)
    ties = tl.where(reached <= topk, topk, topk - above)
    placed = 0
    for start in range(0, total, SIZE):
        entries, keys, there = _candidates(lists, start + ranks, total, CHUNK)
        chosen, place = choose(keys, low, ties)
        chosen = chosen & there
        store_slots(slots[0], slots[1], entries, chosen, placed + place, ROWS_PER_PAGE)
        placed += tl.sum(chosen.to(tl.int32))
        ties -= tl.sum((chosen & (keys == low)).to(tl.int32))


@triton.jit(do_not_specialize=["first_token", "stride_counters"])
def _select_few_kernel(
    scores_ptr,
    maxima_ptr,
    out_ptr,
    entries_ptr,
    keys_ptr,
    reached_ptr,
    counters_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    first_token,
    topk,
    K,
    stride_scores,
    stride_maxima,
    stride_out,
    stride_counters,
    stride_pages,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    MAXIMA: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the slots of a token's topk entries. A program has one chunk of one token's scores."""
    LOWEST: tl.constexpr = -0x7FFFFFFF - 1
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = first_token + row
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_at = positions_ptr, sequence_ptr, pages_ptr, first_ptr, out_ptr
    visible, table_row_ptr, out_row_ptr = token_row(row_at, token, stride_pages, stride_out, RATIO)
    all_wanted = (visible <= topk) & (chunk == 0)
    seen, page = all_pages(table_row_ptr, visible, all_wanted, ROWS_PER_PAGE, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (chunk > 0) & (chunk * CHUNK >= visible):
        return
    if visible <= topk:
        if chunk == 0:
            store_all(out_row_ptr, seen, page, K, ROWS_PER_PAGE, BLOCK_K)
        return

    entries = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = entries < visible
    scores = tl.load(scores_ptr + row * stride_scores + entries, mask=valid, other=0.0)
    keys = tl.where(valid, to_keys(scores), LOWEST)
    slots = out_row_ptr, table_row_ptr
    num_programs = tl.cdiv(visible, CHUNK)
    if num_programs == 1:
        _select(keys, entries, valid, visible, topk, slots, ROWS_PER_PAGE)
        return

    # Fewer groups than topk say nothing about the topk best entries.
    floor, high = tl.zeros([], tl.int32) + LOWEST, tl.zeros([], tl.int32) + 0x7FFFFFFF
    num_groups = tl.cdiv(visible, GROUP)
    if num_groups > topk:
        floor, high = _floor(maxima_ptr + row * stride_maxima, num_groups, topk, MAXIMA)
    reach = ((keys >= floor) & valid).to(tl.int32)
    first = row * tl.num_programs(1)
    entries_ptr += first * CHUNK
    keys_ptr += first * CHUNK
    reached_ptr += first
    at = chunk * CHUNK + sums_before(reach)
    tl.store(entries_ptr + at, entries, mask=reach > 0)
    tl.store(keys_ptr + at, keys, mask=reach > 0)
    tl.store(reached_ptr + chunk, tl.sum(reach))
    # All threads must store before the count announces their candidates to others.
    tl.debug_barrier()
    counter_ptr = counters_ptr + row * stride_counters
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") < num_programs - 1:
        return
    tl.debug_barrier()
    tl.store(counter_ptr, 0)

    total = 0
    for i in range(num_programs):
        total += tl.load(reached_ptr + i, cache_modifier=".cg")
    lists = entries_ptr, keys_ptr, reached_ptr, num_programs
    if total <= CANDIDATES:
        _select_held(lists, total, topk, slots, CHUNK, CANDIDATES, ROWS_PER_PAGE)
        return
    if total <= 4 * CANDIDATES:
        _select_held(lists, total, topk, slots, CHUNK, 4 * CANDIDATES, ROWS_PER_PAGE)
        return
    _select_streamed(lists, total, topk, floor, high, slots, CHUNK, CANDIDATES, ROWS_PER_PAGE)


# --- Launch ---------------------------------------------------------------------------------------


def takes(num_rows: int, topk: int, max_entries: int) -> bool:
    """Whether `select_topk_few` selects for this number of tokens of a decode."""
    return num_rows <= FEW_ROWS and max_entries > CHUNK and topk <= MAXIMA // 2


def select_topk_few(
    scores_NE: Tensor,
    maxima_NG: Tensor,
    out_NK: Tensor,
    tokens: Tokens,
    table: PageTable,
    first_token: int,
    topk: int,
    max_entries: int,
    ratio: int,
    early_launch: bool = False,
) -> None:
    """Like topk_triton.select_topk, where `takes` allows it.

    maxima [n,G] int32: the largest key of every GROUP adjacent entries that a token sees.
    """
    num_rows, num_chunks = scores_NE.shape[0], triton.cdiv(max_entries, CHUNK)
    lists = torch.empty(
        (num_rows * num_chunks * (2 * CHUNK + 1),), dtype=torch.int32, device=out_NK.device
    )
    entries, keys, counts = lists.split([num_rows * num_chunks * n for n in (CHUNK, CHUNK, 1)])
    counters = counters_of(tokens, num_rows, 1)
    _select_few_kernel[(num_rows, num_chunks)](
        scores_NE,
        maxima_NG,
        out_NK,
        entries,
        keys,
        counts,
        counters,
        tokens.positions,
        tokens.sequence,
        table.pages,
        table.first,
        first_token,
        topk,
        out_NK.shape[1],
        scores_NE.stride(0),
        maxima_NG.stride(0),
        out_NK.stride(0),
        counters.stride(0),
        table.pages.stride(0),
        RATIO=ratio,
        ROWS_PER_PAGE=table.rows_per_page,
        GROUP=GROUP,
        CHUNK=CHUNK,
        MAXIMA=MAXIMA,
        CANDIDATES=max(32, 2 * triton.next_power_of_2(topk)),
        BLOCK_K=triton.next_power_of_2(out_NK.shape[1]),
        num_warps=NUM_WARPS,
        **launch_options(early_launch),
    )
