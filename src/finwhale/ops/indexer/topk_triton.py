"""The largest scores of each token, in order of position, as one Triton kernel.

The result is exact for every batch, chunk and split: a token gets its topk largest scores; the
lowest index wins ties. The kernel compares floats as integers of the same order ("keys"). It
searches for a threshold that topk keys reach. Each pass counts the keys that reach three probes;
one probe halves the range.

A program holds a token's keys in registers: at most BLOCK. topk_long_triton.py selects from longer
rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.paging import MAX_DECODE_QUERY, PageTable, Tokens

# Keys of a row at most; the counts of a pass are packed in 16 bits.
BLOCK = 4096
MIN_BLOCK = 512
BLOCKS = tuple(MIN_BLOCK << i for i in range((BLOCK // MIN_BLOCK).bit_length()))
# Keys that one thread of a program holds: a prefill of short rows fills the GPU, a decode does not.
DECODE_VALUES_PER_THREAD, PREFILL_VALUES_PER_THREAD = 8, 16


@triton.jit
def to_keys(scores):
    """Integers in the order of the scores."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_keys(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _find_threshold(keys, low, high, reached, wanted):
    """Find a threshold that `wanted` keys reach, not counting ties.

    low .. high contains the threshold: at least `wanted` keys reach low, and no key is above high.
    `reached` is the number of keys that reach low. Returns the threshold and the number of its ties
    to take.
    """
    above = 0
    while (low < high) & (reached > wanted):
        # The middle halves the range. The other two probes lie around a guess, which assumes that
        # the logarithm of the count is linear in the score. Any probe in low + 1 .. high is valid.
        # The difference wraps modulo 2^32 and is non-negative as uint32.
        span = (high - low).to(tl.uint32, bitcast=True)
        middle = low + (span // 2 + span % 2).to(tl.int32, bitcast=True)
        log_low, log_high = tl.log2(reached * 1.0), tl.log2(tl.maximum(above, 0.5))
        part = (log_low - tl.log2(wanted * 1.0)) / (log_low - log_high)
        low_score, high_score = from_keys(low), from_keys(high)
        width = high_score - low_score
        left = to_keys(low_score + width * (part * 0.875))
        right = to_keys(low_score + width * (part * 0.875 + 0.125))
        left = tl.minimum(tl.maximum(left, low + 1), high)
        right = tl.minimum(tl.maximum(right, low + 1), high)
        # Sum int32 values one at a time: the GPU has an instruction for the sum over a warp.
        reach = (keys >= left).to(tl.int32) + ((keys >= right).to(tl.int32) << 16)
        packed = tl.sum(reach, axis=0)
        count = tl.sum((keys >= middle).to(tl.int32), axis=0)
        low, high, reached, above = _narrowed(middle, count, low, high, reached, above, wanted)
        count = packed & 0xFFFF
        low, high, reached, above = _narrowed(left, count, low, high, reached, above, wanted)
        count = packed >> 16
        low, high, reached, above = _narrowed(right, count, low, high, reached, above, wanted)
    return low, tl.where(reached <= wanted, wanted, wanted - above)


@triton.jit
def _narrowed(probe, count, low, high, reached, above, wanted):
    """The narrower range and its counts, given that `count` keys reach the probe."""
    up = (count >= wanted) & (probe > low)
    down = (count < wanted) & (probe <= high)
    return (
        tl.where(up, probe, low),
        tl.where(down, probe - 1, high),
        tl.where(up, count, reached),
        tl.where(down, count, above),
    )


@triton.jit
def sums_of_earlier(sums):
    """Returns, for each of few rows, the sum of the sums of all rows before it.

    A warp reads all sums at once and adds those that it needs. A scan would exchange values between
    the warps once more.
    """
    row = tl.arange(0, sums.shape[0])
    return tl.sum(tl.where(row[None, :] < row[:, None], sums[None, :], 0), axis=1)


@triton.jit
def sums_before(counts):
    """Returns, for each count, the sum of all counts before it."""
    SIZE: tl.constexpr = counts.shape[0]
    # Rows of a warp, so that few sums cross warps.
    rows = tl.reshape(counts, [SIZE // 32, 32])
    totals = tl.sum(rows, axis=1)
    before = sums_of_earlier(totals)[:, None] + tl.cumsum(rows, axis=1) - rows
    return tl.reshape(before, [SIZE])


@triton.jit
def choose(keys, threshold, ties_wanted):
    """Which keys are above the threshold or among its first ties, and their output positions."""
    above, tie = keys > threshold, keys == threshold
    before = sums_before(above.to(tl.int32) + (tie.to(tl.int32) << 16))
    ties = before >> 16
    chosen = above | (tie & (ties < ties_wanted))
    return chosen, (before & 0xFFFF) + tl.minimum(ties, ties_wanted)


@triton.jit
def store_slots(
    out_row_ptr, table_row_ptr, entries, chosen, out_index, ROWS_PER_PAGE: tl.constexpr
):
    page = tl.load(table_row_ptr + entries // ROWS_PER_PAGE, mask=chosen, other=0)
    slots = page * ROWS_PER_PAGE + entries % ROWS_PER_PAGE
    tl.store(out_row_ptr + out_index, slots, mask=chosen)


@triton.jit
def token_row(pointers, token, stride_pages, stride_out, RATIO: tl.constexpr):
    """The entries that a token sees, and pointers to its page table's row and its output."""
    positions_ptr, sequence_ptr, pages_ptr, first_ptr, out_ptr = pointers
    visible = ((tl.load(positions_ptr + token) + 1) // RATIO).to(tl.int32)
    b = tl.load(sequence_ptr + token).to(tl.int64)
    table_row_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b)
    return visible, table_row_ptr, out_ptr + token * stride_out


@triton.jit
def all_pages(
    table_row_ptr, visible, is_wanted, ROWS_PER_PAGE: tl.constexpr, BLOCK_K: tl.constexpr
):
    """For a token that gets all entries it sees: which of BLOCK_K it sees, and their pages."""
    columns = tl.arange(0, BLOCK_K)
    seen = (columns < visible) & is_wanted
    return seen, tl.load(table_row_ptr + columns // ROWS_PER_PAGE, mask=seen, other=0)


@triton.jit
def store_all(out_row_ptr, seen, page, K, ROWS_PER_PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Write the slots of all entries that a token sees, then -1."""
    columns = tl.arange(0, BLOCK_K)
    slots = tl.where(seen, page * ROWS_PER_PAGE + columns % ROWS_PER_PAGE, -1)
    tl.store(out_row_ptr + columns, slots, mask=columns < K)


@triton.jit(do_not_specialize=["first_token"])
def _select_kernel(
    scores_ptr,
    out_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    first_token,
    topk,
    K,
    stride_scores,
    stride_out,
    stride_pages,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the slots of a token's topk entries."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    start_next(PDL)
    row_at = positions_ptr, sequence_ptr, pages_ptr, first_ptr, out_ptr
    visible, table_row_ptr, out_row_ptr = token_row(row_at, token, stride_pages, stride_out, RATIO)
    seen, page = all_pages(table_row_ptr, visible, visible <= topk, ROWS_PER_PAGE, BLOCK_K)
    wait_for_last(PDL)
    if visible <= topk:
        store_all(out_row_ptr, seen, page, K, ROWS_PER_PAGE, BLOCK_K)
        return

    entries = tl.arange(0, BLOCK)
    valid = entries < visible
    scores_row_ptr = scores_ptr + row * stride_scores
    keys = to_keys(tl.load(scores_row_ptr + entries, mask=valid, other=0.0))
    low = tl.min(tl.where(valid, keys, 0x7FFFFFFF))
    keys = tl.where(valid, keys, -0x7FFFFFFF - 1)
    threshold, ties = _find_threshold(keys, low, tl.max(keys), visible, topk)
    chosen, out_index = choose(keys, threshold, ties)
    store_slots(out_row_ptr, table_row_ptr, entries, chosen, out_index, ROWS_PER_PAGE)


def select_topk(
    scores_NE: Tensor,
    out_NK: Tensor,
    tokens: Tokens,
    table: PageTable,
    first_token: int,
    topk: int,
    max_entries: int,
    ratio: int,
    early_launch: bool = False,
) -> None:
    """Write the rows of `out` for tokens first_token .. first_token + len(scores) - 1.

    scores [n,E] float32; the kernel reads a token's scores only if the token sees more than topk
    entries. out [N,K] int32. No token sees more than max_entries, at most BLOCK.
    """
    block: int = max(MIN_BLOCK, triton.next_power_of_2(max_entries))
    assert block <= BLOCK
    prefill = tokens.max_query > MAX_DECODE_QUERY
    values = PREFILL_VALUES_PER_THREAD if prefill else DECODE_VALUES_PER_THREAD
    _select_kernel[(scores_NE.shape[0],)](
        *(scores_NE, out_NK, tokens.positions, tokens.sequence, table.pages, table.first),
        *(first_token, topk, out_NK.shape[1]),
        *(scores_NE.stride(0), out_NK.stride(0), table.pages.stride(0)),
        RATIO=ratio,
        ROWS_PER_PAGE=table.rows_per_page,
        BLOCK=block,
        BLOCK_K=triton.next_power_of_2(out_NK.shape[1]),
        num_warps=max(4, block // (32 * values)),
        **launch_options(early_launch),
    )
