"""The largest scores of each token, in order of position, as one Triton kernel.

The result is exact for every batch, chunk and split: a token gets its topk largest scores; the
lowest index wins ties. The kernel compares floats as integers of the same order ("keys"). It
searches for a threshold that topk keys reach. Each pass counts the keys that reach three probes;
one probe halves the range.

A program selects from at most BLOCK keys in registers. If its chunk has more, it first selects the
best groups of GROUP adjacent keys by their largest keys. The topk best keys lie in the topk best
groups, so the program may select more groups than that, but not fewer: few passes find such a
threshold.

If a row is longer than GROUP * BLOCK, each of its chunks has a program. Of adjacent chunks, the
program that ends last selects again from their results, until one program has the result of the
row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.paging import MAX_DECODE_QUERY, PageTable, Tokens

# Keys that one program selects from; the counts of a pass are packed in 16 bits.
BLOCK = 4096
MIN_BLOCK = 512
BLOCKS = tuple(MIN_BLOCK << i for i in range((BLOCK // MIN_BLOCK).bit_length()))
# Keys of a group; a thread loads them together.
GROUP = 4
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
def find_threshold(keys, low, high, reached, least, most):
    """Find a threshold that between `least` and `most` keys reach, not counting ties.

    low .. high contains the threshold: at least `least` keys reach low, and no key is above high.
    `reached` is the number of keys that reach low, or an estimate of it that is above `most`.
    Returns the threshold and the number of its ties to take.
    """
    above = 0
    while (low < high) & (reached > most):
        # The middle halves the range. The other two probes lie around a guess, which assumes that
        # the logarithm of the count is linear in the score. Any probe in low + 1 .. high is valid.
        # The difference wraps modulo 2^32 and is non-negative as uint32.
        span = (high - low).to(tl.uint32, bitcast=True)
        middle = low + (span // 2 + span % 2).to(tl.int32, bitcast=True)
        log_low, log_high = tl.log2(reached * 1.0), tl.log2(tl.maximum(above, 0.5))
        part = (log_low - tl.log2((least + most) * 0.5)) / (log_low - log_high)
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
        low, high, reached, above = _narrowed(middle, count, low, high, reached, above, least)
        count = packed & 0xFFFF
        low, high, reached, above = _narrowed(left, count, low, high, reached, above, least)
        count = packed >> 16
        low, high, reached, above = _narrowed(right, count, low, high, reached, above, least)
    return low, tl.where(reached <= most, most, most - above)


@triton.jit
def _narrowed(probe, count, low, high, reached, above, least):
    """The narrower range and its counts, given that `count` keys reach the probe."""
    up = (count >= least) & (probe > low)
    down = (count < least) & (probe <= high)
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
def _best(scores_row_ptr, entries, valid, floor, length, topk):
    """Which valid entries have the topk highest scores, and their output positions.

    `length` is about the number of entries that reach the floor: at least topk, or all entries if
    there are fewer.
    """
    keys = to_keys(tl.load(scores_row_ptr + entries, mask=valid, other=0.0))
    low = tl.maximum(tl.min(tl.where(valid, keys, 0x7FFFFFFF)), floor)
    keys = tl.where(valid, keys, -0x7FFFFFFF - 1)
    count = tl.minimum(topk, length)
    threshold, ties = find_threshold(keys, low, tl.max(keys), length, count, count)
    return choose(keys, threshold, ties)


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
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the slots of a token's topk entries. A program has one chunk of one token's scores.

    GROUP is 1 if no row has more than BLOCK keys.
    """
    LOWEST: tl.constexpr = -0x7FFFFFFF - 1
    CHUNK: tl.constexpr = GROUP * BLOCK
    MOST: tl.constexpr = BLOCK // GROUP  # groups that a program selects
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = first_token + row
    start_next(PDL)
    row_at = positions_ptr, sequence_ptr, pages_ptr, first_ptr, out_ptr
    visible, table_row_ptr, out_row_ptr = token_row(row_at, token, stride_pages, stride_out, RATIO)
    all_wanted = (visible <= topk) & (chunk == 0)
    seen, page = all_pages(table_row_ptr, visible, all_wanted, ROWS_PER_PAGE, BLOCK_K)
    wait_for_last(PDL)
    if (chunk > 0) & (chunk * CHUNK >= visible):
        return
    if visible <= topk:
        if chunk == 0:
            store_all(out_row_ptr, seen, page, K, ROWS_PER_PAGE, BLOCK_K)
        return

    scores_row_ptr = scores_ptr + row * stride_scores
    columns = tl.arange(0, BLOCK)
    if GROUP == 1:
        chosen, out_index = _best(scores_row_ptr, columns, columns < visible, LOWEST, visible, topk)
        store_slots(out_row_ptr, table_row_ptr, columns, chosen, out_index, ROWS_PER_PAGE)
        return

    lists_ptr = candidates_ptr + row * stride_candidates
    start = chunk * CHUNK
    length = tl.minimum(visible - start, CHUNK)
    entries = start + columns
    valid = columns < length
    floor = LOWEST
    reached = length
    if length > BLOCK:
        members = tl.arange(0, GROUP)
        group_entries = start + columns[:, None] * GROUP + members[None, :]
        # A row is allocated in whole groups.
        there = columns * GROUP < length
        whole = tl.broadcast_to(there[:, None], [BLOCK, GROUP])
        scores = tl.load(scores_row_ptr + group_entries, mask=whole, other=0.0)
        inside = group_entries < start + length
        keys = tl.max(tl.where(inside, to_keys(scores), LOWEST), axis=1)
        low, high = tl.min(tl.where(there, keys, 0x7FFFFFFF)), tl.max(keys)
        floor, ties = find_threshold(keys, low, high, tl.cdiv(length, GROUP), topk, MOST)
        chosen, out_index = choose(keys, floor, ties)
        groups_ptr = lists_ptr + chunk * MOST
        tl.store(groups_ptr + out_index, columns, mask=chosen)
        num_groups = tl.sum(chosen.to(tl.int32))
        tl.debug_barrier()
        ranks = tl.arange(0, MOST)
        there = ranks < num_groups
        groups = tl.load(groups_ptr + ranks, mask=there, other=0)
        group_entries = start + groups[:, None] * GROUP + members[None, :]
        entries = tl.reshape(group_entries, [BLOCK])
        valid = tl.reshape(there[:, None] & (group_entries < start + length), [BLOCK])
        # An estimate: few groups have several keys that reach the floor.
        reached = tl.maximum(num_groups + num_groups // 8, topk + 1)

    counter_ptr = counters_ptr + row * stride_counters
    mine = chunk
    num_programs = tl.cdiv(visible, CHUNK)
    last_length = visible - (num_programs - 1) * CHUNK
    lists_ptr += num_programs * MOST  # selected by this level's programs
    active = 1
    while active > 0:
        chosen, out_index = _best(scores_row_ptr, entries, valid, floor, reached, topk)
        active = 0
        if num_programs == 1:
            store_slots(out_row_ptr, table_row_ptr, entries, chosen, out_index, ROWS_PER_PAGE)
        else:
            tl.store(lists_ptr + mine * topk + out_index, entries, mask=chosen)
            # All threads must store their entries before the count announces them to others.
            tl.debug_barrier()
            parent = mine // fan
            children = tl.minimum(fan, num_programs - parent * fan)
            if tl.atomic_add(counter_ptr + parent, 1, sem="acq_rel") == children - 1:
                tl.debug_barrier()
                tl.store(counter_ptr + parent, 0)
                active = 1
                source_ptr = lists_ptr + parent * fan * topk
                lists_ptr += num_programs * topk
                num_parents = tl.cdiv(num_programs, fan)
                counter_ptr += num_parents
                last_children = num_programs - (num_parents - 1) * fan
                last_length = (last_children - 1) * topk + tl.minimum(topk, last_length)
                length = tl.where(parent == num_parents - 1, last_length, fan * topk)
                floor = LOWEST
                reached = length
                mine = parent
                num_programs = num_parents
                valid = columns < length
                # Other programs wrote these entries, so bypass this multiprocessor's L1 cache.
                entries = tl.load(source_ptr + columns, mask=valid, other=0, cache_modifier=".cg")


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

    scores [n,E] float32, E a multiple of GROUP or max_entries; the kernel reads a token's scores
    only if the token sees more than topk entries. out [N,K] int32. No token sees more than
    max_entries. Raises ValueError if max_entries exceeds BLOCK and topk exceeds half of BLOCK.
    """
    num_rows = scores_NE.shape[0]
    block: int = min(BLOCK, max(MIN_BLOCK, triton.next_power_of_2(max_entries)))
    group, fan = 1, max(1, block // topk)
    if max_entries > block:
        if fan < 2:
            raise ValueError(f"cannot select {topk} of {max_entries} entries in blocks of {block}")
        group = min(GROUP, block // triton.next_power_of_2(topk))
    lists = [max(1, triton.cdiv(max_entries, group * block))]
    while lists[-1] > 1:
        lists.append(triton.cdiv(lists[-1], fan))
    candidates, counters = out_NK, out_NK
    if group > 1:
        shape = (num_rows, lists[0] * (block // group) + sum(lists[:-1]) * topk)
        candidates = torch.empty(shape, dtype=torch.int32, device=out_NK.device)
    if len(lists) > 1:
        # Counts of ended programs. They are 0 before and after each launch, so layers share them.
        width, kept = sum(lists[1:]), tokens.cache.topk_counters
        if kept is None or kept.shape[0] < num_rows or kept.shape[1] < width:
            kept = tokens.cache.topk_counters = out_NK.new_zeros(num_rows, width)
        counters = kept
    prefill = tokens.max_query > MAX_DECODE_QUERY and group == 1
    values = PREFILL_VALUES_PER_THREAD if prefill else DECODE_VALUES_PER_THREAD
    _select_kernel[(num_rows, lists[0])](
        *(scores_NE, out_NK, candidates, counters),
        *(tokens.positions, tokens.sequence, table.pages, table.first),
        *(first_token, topk, out_NK.shape[1], fan),
        *(scores_NE.stride(0), out_NK.stride(0), candidates.stride(0), counters.stride(0)),
        table.pages.stride(0),
        RATIO=ratio,
        ROWS_PER_PAGE=table.rows_per_page,
        GROUP=group,
        BLOCK=block,
        BLOCK_K=triton.next_power_of_2(out_NK.shape[1]),
        num_warps=max(4, block // (32 * values)),
        **launch_options(early_launch),
    )
