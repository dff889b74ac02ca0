"""The largest scores of each token, in order of position, as Triton kernels.

Exact whatever the batch, the chunk or the split: a token's set is the topk largest scores, equal
ones by the lowest index. Floats are compared as integers of the same order; the threshold is found
by counting how many reach three probes at a time, each pass a quarter of the range. A row that is
longer than CHUNK is selected from in chunks, each by its own program, then once more from what the
chunks chose.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.paging import PageTable, Tokens

# Counts of a pass are packed in 16 bits.
MAX_BLOCK = 16384
MAX_CANDIDATES = 16384
# Keys that are written at once: a larger block would leave its registers.
MAX_PART = 4096
MIN_BLOCK = 1024


@triton.jit
def _add_pair(a, b, c, d):
    return a + c, b + d


@triton.jit
def _ordered(score):
    """Integers in the order of the floats; -0 as 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(keys, valid, count):
    """The largest t that at least `count` of the valid keys reach; the others are -2^31."""
    low = tl.min(tl.where(valid, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    if tl.sum(valid.to(tl.int32), axis=0) == count:
        high = low
    while low < high:
        span = high - low
        first = low + (span + 3) // 4
        second = low + (span + 1) // 2
        third = low + (3 * span + 3) // 4
        reach_1 = (keys >= first.to(tl.int32)).to(tl.int32)
        reach_2 = (keys >= second.to(tl.int32)).to(tl.int32)
        reach_3 = (keys >= third.to(tl.int32)).to(tl.int32)
        packed, count_3 = tl.reduce((reach_1 + (reach_2 << 16), reach_3), 0, _add_pair)
        count_1 = packed & 0xFFFF
        count_2 = packed >> 16
        if count_3 >= count:
            low = third
            reached = count_3
        elif count_2 >= count:
            low = second
            high = third - 1
            reached = count_2
        elif count_1 >= count:
            low = first
            high = second - 1
            reached = count_1
        else:
            high = first - 1
            reached = count + 1
        if reached == count:
            high = low
    return low.to(tl.int32)


@triton.jit
def _places(keys, threshold, ties_wanted, above_before, ties_before):
    """Which keys are chosen, ties by the lowest index, and each one's place in the result.

    The arguments count what stands before these keys; also returns the counts of these.
    """
    above = (keys > threshold).to(tl.int32)
    tie = (keys == threshold).to(tl.int32)
    packed = above + (tie << 16)
    before = tl.cumsum(packed, axis=0) - packed
    total = tl.sum(packed, axis=0)
    ties = (before >> 16) + ties_before
    chosen = (keys > threshold) | ((keys == threshold) & (ties < ties_wanted))
    place = (before & 0xFFFF) + above_before + tl.minimum(ties, ties_wanted)
    return chosen, place, total & 0xFFFF, total >> 16


@triton.jit
def _load_keys(scores_ptr, entries, valid):
    scores = tl.load(scores_ptr + entries, mask=valid, other=0.0)
    return tl.where(valid, _ordered(scores), -0x7FFFFFFF - 1)


@triton.jit
def _slots(entries, mask, table_row_ptr, first_page, ROWS_PER_PAGE: tl.constexpr):
    page = tl.load(table_row_ptr + entries // ROWS_PER_PAGE - first_page, mask=mask, other=0)
    return page * ROWS_PER_PAGE + entries % ROWS_PER_PAGE


@triton.jit
def _select_chunk(
    scores_row_ptr,
    out_row_ptr,
    candidates_ptr,
    table_row_ptr,
    first_page,
    start,
    length,
    topk,
    is_whole,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """The best of one chunk: to the result where it is the whole row, else to the candidates."""
    columns = tl.arange(0, BLOCK)
    valid = columns < length
    count = tl.minimum(topk, length)
    keys = _load_keys(scores_row_ptr, start + columns, valid)
    threshold = _threshold(keys, valid, count)
    above_before = 0
    ties_before = 0
    ties_wanted = count - tl.sum((keys > threshold).to(tl.int32), axis=0)
    for part in range(0, length if BLOCK > PART else 1, PART):
        part_columns = part + tl.arange(0, PART if BLOCK > PART else BLOCK)
        entries = start + part_columns
        if BLOCK > PART:
            part_keys = _load_keys(scores_row_ptr, entries, part_columns < length)
            chosen, place, above, ties = _places(
                part_keys, threshold, ties_wanted, above_before, ties_before
            )
        else:
            chosen, place, above, ties = _places(keys, threshold, ties_wanted, 0, 0)
        if is_whole:
            slots = _slots(entries, chosen, table_row_ptr, first_page, ROWS_PER_PAGE)
            tl.store(out_row_ptr + place, slots, mask=chosen)
        else:
            tl.store(candidates_ptr + place, entries, mask=chosen)
        above_before += above
        ties_before += ties


@triton.jit
def _select_kernel(
    scores_ptr,
    out_ptr,
    candidates_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    first_token,
    topk,
    K,
    stride_scores,
    stride_out,
    stride_candidates,
    stride_pages,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    SMALL: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = first_token + row
    visible = ((tl.load(positions_ptr + token) + 1) // RATIO).to(tl.int32)
    start = chunk * CHUNK
    if (chunk > 0) & (start >= visible):
        return
    b = tl.load(sequence_ptr + token).to(tl.int64)
    first_page = tl.load(first_ptr + b)
    table_row_ptr = pages_ptr + b * stride_pages
    out_row_ptr = out_ptr + token * stride_out
    if visible <= topk:
        if chunk == 0:
            columns = tl.arange(0, BLOCK_K)
            seen = columns < visible
            slots = _slots(columns, seen, table_row_ptr, first_page, ROWS_PER_PAGE)
            tl.store(out_row_ptr + columns, tl.where(seen, slots, -1), mask=columns < K)
        return
    length = tl.minimum(visible - start, CHUNK)
    scores_row_ptr = scores_ptr + row * stride_scores
    if length <= SMALL:
        _select_chunk(
            scores_row_ptr,
            out_row_ptr,
            candidates_ptr + row * stride_candidates + chunk * topk,
            table_row_ptr,
            first_page,
            start,
            length,
            topk,
            visible <= CHUNK,
            ROWS_PER_PAGE,
            SMALL,
            PART,
        )
    else:
        _select_chunk(
            scores_row_ptr,
            out_row_ptr,
            candidates_ptr + row * stride_candidates + chunk * topk,
            table_row_ptr,
            first_page,
            start,
            length,
            topk,
            visible <= CHUNK,
            ROWS_PER_PAGE,
            CHUNK,
            PART,
        )


@triton.jit
def _select_candidates(
    scores_row_ptr,
    out_row_ptr,
    candidates_ptr,
    table_row_ptr,
    first_page,
    length,
    topk,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    valid = columns < length
    entries = tl.load(candidates_ptr + columns, mask=valid, other=0)
    keys = _load_keys(scores_row_ptr, entries, valid)
    threshold = _threshold(keys, valid, topk)
    above_before = 0
    ties_before = 0
    ties_wanted = topk - tl.sum((keys > threshold).to(tl.int32), axis=0)
    for part in range(0, length if BLOCK > PART else 1, PART):
        part_columns = part + tl.arange(0, PART if BLOCK > PART else BLOCK)
        part_valid = part_columns < length
        part_entries = tl.load(candidates_ptr + part_columns, mask=part_valid, other=0)
        if BLOCK > PART:
            part_keys = _load_keys(scores_row_ptr, part_entries, part_valid)
            chosen, place, above, ties = _places(
                part_keys, threshold, ties_wanted, above_before, ties_before
            )
        else:
            chosen, place, above, ties = _places(keys, threshold, ties_wanted, 0, 0)
        slots = _slots(part_entries, chosen, table_row_ptr, first_page, ROWS_PER_PAGE)
        tl.store(out_row_ptr + place, slots, mask=chosen)
        above_before += above
        ties_before += ties


@triton.jit
def _merge_kernel(
    scores_ptr,
    out_ptr,
    candidates_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    first_token,
    topk,
    stride_scores,
    stride_out,
    stride_candidates,
    stride_pages,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    SMALL: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of what the chunks of a row chose: topk of each but the last, in order."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    visible = ((tl.load(positions_ptr + token) + 1) // RATIO).to(tl.int32)
    if visible <= CHUNK:
        return
    b = tl.load(sequence_ptr + token).to(tl.int64)
    first_page = tl.load(first_ptr + b)
    table_row_ptr = pages_ptr + b * stride_pages
    full = (visible - 1) // CHUNK
    length = full * topk + tl.minimum(visible - full * CHUNK, topk)
    scores_row_ptr = scores_ptr + row * stride_scores
    out_row_ptr = out_ptr + token * stride_out
    candidates_row_ptr = candidates_ptr + row * stride_candidates
    if length <= SMALL:
        _select_candidates(
            scores_row_ptr,
            out_row_ptr,
            candidates_row_ptr,
            table_row_ptr,
            first_page,
            length,
            topk,
            ROWS_PER_PAGE,
            SMALL,
            PART,
        )
    else:
        _select_candidates(
            scores_row_ptr,
            out_row_ptr,
            candidates_row_ptr,
            table_row_ptr,
            first_page,
            length,
            topk,
            ROWS_PER_PAGE,
            BLOCK,
            PART,
        )


def chunk_entries(max_entries: int, topk: int) -> int:
    """Entries that one program selects from, so that the chunks' choices fit one program too."""
    chunk: int = min(MAX_BLOCK, max(MIN_BLOCK, triton.next_power_of_2(max_entries)))
    if topk > chunk or (max_entries > chunk and -(-max_entries // chunk) * topk > MAX_CANDIDATES):
        raise ValueError(
            f"cannot select {topk} of {max_entries} entries: chunks of {chunk} entries would "
            f"choose more than {MAX_CANDIDATES}"
        )
    return chunk


def _warps(block: int) -> int:
    return min(32, max(4, block // 512))


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

    scores [n,E] float32, of which a token's visible entries are read if they are more than topk;
    out [N,K] int32. No token sees more than max_entries.
    """
    num_rows = scores_NE.shape[0]
    chunk = chunk_entries(max_entries, topk)
    num_chunks = max(1, triton.cdiv(max_entries, chunk))
    shape = (num_rows, num_chunks * topk) if num_chunks > 1 else (1, 1)
    candidates = torch.empty(shape, dtype=torch.int32, device=out_NK.device)
    _select_kernel[(num_rows, num_chunks)](
        scores_NE,
        out_NK,
        candidates,
        tokens.positions,
        tokens.sequence,
        table.pages,
        table.first,
        first_token,
        topk,
        out_NK.shape[1],
        scores_NE.stride(0),
        out_NK.stride(0),
        candidates.stride(0),
        table.pages.stride(0),
        RATIO=ratio,
        ROWS_PER_PAGE=table.rows_per_page,
        CHUNK=chunk,
        SMALL=max(MIN_BLOCK, chunk // 8),
        PART=MAX_PART,
        BLOCK_K=triton.next_power_of_2(out_NK.shape[1]),
        num_warps=_warps(chunk),
    )
    if num_chunks == 1:
        return
    block = triton.next_power_of_2(num_chunks * topk)
    _merge_kernel[(num_rows,)](
        scores_NE,
        out_NK,
        candidates,
        tokens.positions,
        tokens.sequence,
        table.pages,
        table.first,
        first_token,
        topk,
        scores_NE.stride(0),
        out_NK.stride(0),
        candidates.stride(0),
        table.pages.stride(0),
        RATIO=ratio,
        ROWS_PER_PAGE=table.rows_per_page,
        CHUNK=chunk,
        SMALL=max(MIN_BLOCK, block // 8),
        PART=MAX_PART,
        BLOCK=block,
        num_warps=_warps(block),
    )
