"""The largest scores of each token, in order of position, as one Triton kernel.

The result is exact for every batch, chunk and split: a token gets its topk largest scores; the
lowest index wins ties. The kernel compares floats as integers of the same order. To find the
threshold, each pass counts the keys that reach three probes, and reduces the range to a quarter. If
a row is longer than BLOCK, each of its chunks has a program. Of adjacent chunks, the program that
ends last selects again from their results, until one program has the result of the row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.paging import PageTable, Tokens

# Entries that one program selects from; the counts of a pass are packed in 16 bits.
BLOCK = 4096
MIN_BLOCK = 512
BLOCKS = tuple(MIN_BLOCK << i for i in range((BLOCK // MIN_BLOCK).bit_length()))
# Values that one thread of a program holds.
VALUES_PER_THREAD = 16


@triton.jit
def _add_pair(a, b, c, d):
    return a + c, b + d


@triton.jit
def _outer_pair(a, b, c, d):
    return tl.minimum(a, c), tl.maximum(b, d)


@triton.jit
def _threshold(keys, valid, count):
    """The largest t that at least `count` of the valid keys reach; the others are -2^31.

    Differences of int32 are taken modulo 2^32 and are non-negative as uint32.
    """
    low, high = tl.reduce((tl.where(valid, keys, 0x7FFFFFFF), keys), 0, _outer_pair)
    while low < high:
        span = (high - low).to(tl.uint32, bitcast=True)
        quarter = span // 4
        rest = span - 4 * quarter
        first = low + (quarter + (rest + 3) // 4).to(tl.int32, bitcast=True)
        second = low + (2 * quarter + (rest + 1) // 2).to(tl.int32, bitcast=True)
        third = low + (3 * quarter + (3 * rest + 3) // 4).to(tl.int32, bitcast=True)
        reach_12 = (keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16)
        reach_3 = (keys >= third).to(tl.int32)
        packed, count_3 = tl.reduce((reach_12, reach_3), 0, _add_pair)
        count_1, count_2 = packed & 0xFFFF, packed >> 16
        in_3, in_2, in_1 = count_3 >= count, count_2 >= count, count_1 >= count
        high = tl.where(in_3, high, tl.where(in_2, third, tl.where(in_1, second, first)) - 1)
        low = tl.where(in_3, third, tl.where(in_2, second, tl.where(in_1, first, low)))
        reached = tl.where(in_3, count_3, tl.where(in_2, count_2, count_1))
        # Exactly `count` keys reach it, so the search can end.
        high = tl.where(reached == count, low, high)
    return low


@triton.jit
def _chosen(keys, threshold, count):
    """Which keys are the `count` largest, ties by the lowest index, and each one's place."""
    above = (keys > threshold).to(tl.int32)
    packed = above + ((keys == threshold).to(tl.int32) << 16)
    before = tl.cumsum(packed, axis=0) - packed
    ties_wanted = count - tl.sum(above, axis=0)
    ties = before >> 16
    chosen = (keys > threshold) | ((keys == threshold) & (ties < ties_wanted))
    return chosen, (before & 0xFFFF) + tl.minimum(ties, ties_wanted)


@triton.jit(do_not_specialize=["first_token", "fan", "stride_counters"])
def _select_kernel(
    scores_ptr,
    out_ptr,
    candidates_ptr,
    counters_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    first_token,
    topk,
    K,
    fan,
    stride_scores,
    stride_out,
    stride_candidates,
    stride_counters,
    stride_pages,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = first_token + row
    visible = ((tl.load(positions_ptr + token) + 1) // RATIO).to(tl.int32)
    if (chunk > 0) & (chunk * BLOCK >= visible):
        return
    b = tl.load(sequence_ptr + token).to(tl.int64)
    table_row_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b)
    out_row_ptr = out_ptr + token * stride_out
    if visible <= topk:
        if chunk == 0:
            columns = tl.arange(0, BLOCK_K)
            seen = columns < visible
            page = tl.load(table_row_ptr + columns // ROWS_PER_PAGE, mask=seen, other=0)
            slots = tl.where(seen, page * ROWS_PER_PAGE + columns % ROWS_PER_PAGE, -1)
            tl.store(out_row_ptr + columns, slots, mask=columns < K)
        return

    scores_row_ptr = scores_ptr + row * stride_scores
    counter_ptr = counters_ptr + row * stride_counters
    lists_ptr = candidates_ptr + row * stride_candidates  # selected by this level's programs
    source_ptr = lists_ptr  # input of this program after the first level
    columns = tl.arange(0, BLOCK)
    level = 0
    mine = chunk
    num_programs = tl.cdiv(visible, BLOCK)
    last_length = visible - (num_programs - 1) * BLOCK
    full_length = BLOCK
    active = 1
    while active > 0:
        length = tl.where(mine == num_programs - 1, last_length, full_length)
        valid = columns < length
        entries = chunk * BLOCK + columns
        if level > 0:
            # Other programs wrote them, so bypass this multiprocessor's L1 cache.
            entries = tl.load(source_ptr + columns, mask=valid, other=0, cache_modifier=".cg")
        scores = tl.load(scores_row_ptr + entries, mask=valid, other=0.0)
        bits = (scores + 0.0).to(tl.int32, bitcast=True)
        keys = tl.where(valid, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFF - 1)
        count = tl.minimum(topk, length)
        chosen, place = _chosen(keys, _threshold(keys, valid, count), count)
        active = 0
        if num_programs == 1:
            page = tl.load(table_row_ptr + entries // ROWS_PER_PAGE, mask=chosen, other=0)
            slots = page * ROWS_PER_PAGE + entries % ROWS_PER_PAGE
            tl.store(out_row_ptr + place, slots, mask=chosen)
        else:
            tl.store(lists_ptr + mine * topk + place, entries, mask=chosen)
            # All threads must store their entries before the count announces them to others.
            tl.debug_barrier()
            group = mine // fan
            children = tl.minimum(fan, num_programs - group * fan)
            if tl.atomic_add(counter_ptr + group, 1, sem="acq_rel") == children - 1:
                tl.debug_barrier()
                tl.store(counter_ptr + group, 0)
                active = 1
                level += 1
                mine = group
                source_ptr = lists_ptr + group * fan * topk
                lists_ptr += num_programs * topk
                num_groups = tl.cdiv(num_programs, fan)
                counter_ptr += num_groups
                last_children = num_programs - (num_groups - 1) * fan
                last_length = (last_children - 1) * topk + tl.minimum(topk, last_length)
                full_length = fan * topk
                num_programs = num_groups


def select_topk(
    scores_NE: Tensor,
    out_NK: Tensor,
    tokens: Tokens,
    table: PageTable,
    first_token: int,
    topk: int,
    max_entries: int,
    ratio: int,
) -> None:
    """Write the rows of `out` for tokens first_token .. first_token + len(scores) - 1.

    scores [n,E] float32; the kernel reads a token's visible entries only if they are more than
    topk. out [N,K] int32. No token sees more than max_entries. Raises ValueError if topk is more
    than half of BLOCK and a row does not fit one program.
    """
    num_rows = scores_NE.shape[0]
    block: int = min(BLOCK, max(MIN_BLOCK, triton.next_power_of_2(max_entries)))
    fan = max(1, block // topk)
    lists = [max(1, triton.cdiv(max_entries, block))]
    if lists[0] > 1 and fan < 2:
        raise ValueError(f"cannot select {topk} of {max_entries} entries in blocks of {block}")
    while lists[-1] > 1:
        lists.append(triton.cdiv(lists[-1], fan))
    candidates, counters = out_NK, out_NK
    if len(lists) > 1:
        shape = (num_rows, sum(lists[:-1]) * topk)
        candidates = torch.empty(shape, dtype=torch.int32, device=out_NK.device)
        counters = _counters(tokens, num_rows, sum(lists[1:]))
    _select_kernel[(num_rows, lists[0])](
        scores_NE,
        out_NK,
        candidates,
        counters,
        tokens.positions,
        tokens.sequence,
        table.pages,
        table.first,
        first_token,
        topk,
        out_NK.shape[1],
        fan,
        scores_NE.stride(0),
        out_NK.stride(0),
        candidates.stride(0),
        counters.stride(0),
        table.pages.stride(0),
        RATIO=ratio,
        ROWS_PER_PAGE=table.rows_per_page,
        BLOCK=block,
        BLOCK_K=triton.next_power_of_2(out_NK.shape[1]),
        num_warps=max(4, block // (32 * VALUES_PER_THREAD)),
    )


def _counters(tokens: Tokens, num_rows: int, width: int) -> Tensor:
    """Counts of programs that have ended; 0 before and after each launch, so layers share them."""
    counters: Tensor | None = tokens.memo.get("topk counters")
    if counters is None or counters.shape[0] < num_rows or counters.shape[1] < width:
        counters = torch.zeros(num_rows, width, dtype=torch.int32, device=tokens.positions.device)
        tokens.memo["topk counters"] = counters
    return counters
