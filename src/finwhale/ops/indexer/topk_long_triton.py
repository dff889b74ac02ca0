"""The largest scores of tokens with long rows, in order of position, as one Triton kernel.

The result is that of topk_triton.py. Here the kernel of the scores also stores the largest key of
every GROUP adjacent entries: the maxima. A token has one program, which works in four steps, each
with few passes over its warps:

1. It finds a floor: a key that at least topk maxima reach, and seldom many more.
2. It keeps the entries that reach the floor: the candidates, seldom twice as many as topk.
3. It finds the threshold among the candidates, and resolves ties by position.
4. It writes the slots of the chosen entries.

A search sorts the keys into 32 bins, and then those of one bin again, until few enough keys remain.
With 32 bins, the lanes of every warp hold all counts, so that the warps exchange nothing to choose
a bin.

A row of more than TILE entries has a second tile. A row of more than two tiles keeps groups whose
maxima reach the floor before it keeps entries. If there are too many groups, the floor rises; if
that does not help, the program reads the whole row for each pass. If there are too many candidates
for the registers (many neighbours, equal scores), the program reads them again for each pass.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.indexer.topk_triton import (
    all_pages,
    choose,
    from_keys,
    store_all,
    store_slots,
    sums_before,
    sums_of_earlier,
    to_keys,
    token_row,
)
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.paging import PageTable, Tokens

GROUP = 8  # entries of which the kernel of the scores stores the largest key
TILE = 16384  # entries that a program holds at once
LINES = tl.constexpr(4)  # lines of a tile, counted together: one byte of an int32 each
KEYS, SCORES, CANDIDATES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NO_SCORES = tl.constexpr(-(0x7FFFFF << 32) - 0x800000)  # minus infinity, twice
NOT_LOW = tl.constexpr(-(1 << 32))  # the high half of an int64
MAXIMA = 2048  # maxima per program; in longer rows, each covers several groups
MOST_TOPK = MAXIMA // 2
COUNT_ROOM = tl.constexpr(16)  # after the candidates of a row, for their number
MOST_CANDIDATES = 2  # candidates per program, as a multiple of topk
BLOCK = 1024  # entries of a pass over a whole row
# On an H200 with 16 warps, attention, which follows, is 2 us slower at short contexts.
NUM_WARPS = 32
FEWER_WARPS = 16  # on GPUs whose warps may have 64 threads: a program has at most 1024


@triton.constexpr_function
def _columns(tile):
    """Number of adjacent entries in a line of a tile."""
    return min(128, tile // 4)


@triton.jit
def _bins(keys, low, shift):
    """Return the number of the bin that each key belongs to.

    Bin 0 has the keys below low. Bins 1 to 30 are 2^shift wide; bin 30 also has all larger keys.
    """
    above = (keys - low).to(tl.uint32, bitcast=True) >> shift
    return tl.where(keys < low, 0, tl.minimum(above, 29).to(tl.int32) + 1)


@triton.jit
def _shift(low, high):
    """The binary logarithm of a bin's width, for bins that cover low .. high."""
    # The difference wraps modulo 2^32 and is non-negative as uint32.
    span = (high - low).to(tl.uint32, bitcast=True)
    exponent = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.maximum(exponent - 5, 0).to(tl.uint32)


@triton.jit
def _narrowed(counts, number, low, shift, least, highest):
    """The bin that contains the least-th largest key, and how many keys reach and pass it.

    number: the sum of the counts, at least `least` and less than 2^26.
    """
    # A reverse cumsum would take three times as many shuffles.
    totals = number - tl.cumsum(counts, axis=0) + counts
    enough = totals >= least
    # The last bin that enough keys reach has the least total. One reduction finds both.
    bins = tl.arange(0, 32)
    least_total = tl.min(tl.where(enough, totals * 32 + 31 - bins, 0x7FFFFFFF))
    bin_index = 31 - (least_total & 31)
    reached = least_total >> 5
    above = tl.max(tl.where(enough, 0, totals))
    first = low + ((bin_index - 1).to(tl.uint32) << shift).to(tl.int32, bitcast=True)
    room = (highest - low).to(tl.uint32, bitcast=True)
    end = tl.minimum((bin_index.to(tl.uint32) << shift) - 1, room).to(tl.int32, bitcast=True)
    last = tl.where(bin_index == 0, low - 1, tl.where(bin_index == 30, highest, low + end))
    return bin_index, first, last, reached, above


@triton.jit
def _search(keys, low, high, least, most):
    """Find a threshold that between `least` and `most` keys reach, not counting ties.

    The threshold is probably in low .. high; if not, the search takes more passes. Returns the
    threshold, how many keys reach it, and how many are above its bin. If more than `most` reach it,
    its bin is this one key. The last number is right only if at least `least` keys reach low.
    """
    lowest = tl.zeros([], tl.int32) - 0x7FFFFFFF - 1
    highest = tl.zeros([], tl.int32) + 0x7FFFFFFF
    reached = most + 1
    above = 0
    while (lowest < highest) & (reached > most):
        shift = _shift(low, high)
        counts = tl.histogram(_bins(keys, low, shift), 32)
        bin_index, first, highest, reached, above = _narrowed(
            counts, keys.shape[0], low, shift, least, highest
        )
        lowest = tl.where(bin_index == 0, lowest, first)
        low, high = lowest, highest
    return lowest, reached, above


@triton.jit
def _read_keys(ptr, at, count, length, KIND: tl.constexpr):
    """Read keys, scores or candidates of a row, and return the keys, their entries and which exist.

    KIND: see `_search_row`. A key that does not exist is the lowest.
    """
    LOWEST: tl.constexpr = -0x7FFFFFFF - 1
    there = at < count
    if KIND == CANDIDATES:
        found = tl.load(ptr + at, mask=there, other=0, cache_modifier=".cg")
        entries, keys, there = _opened(found, there, length)
    else:
        values = tl.load(ptr + at, mask=there, other=0)
        entries = at
        keys = tl.where(there, to_keys(values) if KIND == SCORES else values, LOWEST)
    return keys, entries, there


@triton.jit
def _opened(candidates, there, length):
    """The entries and keys of candidates, and which are entries; padding of a row is none."""
    entries = candidates.to(tl.int32)
    there = there & (entries < length)
    scores = (candidates >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    keys = tl.where(there, to_keys(scores), -0x7FFFFFFF - 1)
    return tl.where(there, entries, 0), keys, there


@triton.jit
def _search_row(
    row_ptr, count, length, low, high, least, most, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Like `_search`, among `count` keys, scores or candidates in memory.

    KIND: KEYS, SCORES or CANDIDATES. length: entries of the row that candidates are from.
    """
    LOWEST: tl.constexpr = -0x7FFFFFFF - 1
    lowest = tl.zeros([], tl.int32) + LOWEST
    highest = tl.zeros([], tl.int32) + 0x7FFFFFFF
    reached = most + 1
    above = 0
    while (lowest < highest) & (reached > most):
        shift = _shift(low, high)
        counts = tl.zeros([32], tl.int32)
        for start in range(0, count, BLOCK):
            keys, _, _ = _read_keys(row_ptr, start + tl.arange(0, BLOCK), count, length, KIND)
            counts += tl.histogram(_bins(keys, low, shift), 32)
        bin_index, first, highest, reached, above = _narrowed(
            counts, tl.cdiv(count, BLOCK) * BLOCK, low, shift, least, highest
        )
        lowest = tl.where(bin_index == 0, lowest, first)
        low, high = lowest, highest
    return lowest, reached, above


@triton.jit
def _first_maxima(maxima_row_ptr, num_groups, MAXIMA: tl.constexpr):
    """The first maxima of a row, the next ones, and a sample of 32, which every warp holds."""
    first = tl.arange(0, MAXIMA)
    # A row of maxima is allocated in multiples of 16: a thread loads four at once.
    keys = tl.load(maxima_row_ptr + first, mask=first // 4 * 4 < num_groups, other=0)
    there = first // 4 * 4 + MAXIMA < num_groups
    next_keys = tl.load(maxima_row_ptr + MAXIMA + first, mask=there, other=0)
    return keys, next_keys, tl.load(maxima_row_ptr + tl.arange(0, 32) * (num_groups // 32))


@triton.jit
def _window(sample, is_upper_half):
    """Two keys that the wanted one is probably between."""
    high = tl.max(sample)
    mean = tl.sum(from_keys(sample)) / 32
    low = tl.where(is_upper_half, mean, 2 * mean - from_keys(high))
    return tl.minimum(to_keys(low), high), high


@triton.jit
def _floor_of_few(scores_row_ptr, visible, topk, SMALL: tl.constexpr):
    """Like `_floor`, of the scores themselves: fewer groups than topk say nothing."""
    at = tl.arange(0, SMALL)
    keys = to_keys(tl.load(scores_row_ptr + at, mask=at < visible, other=0.0))
    keys = tl.where(at < visible, keys, -0x7FFFFFFF - 1)
    sample = to_keys(tl.load(scores_row_ptr + tl.arange(0, 32) * (visible // 32)))
    low, high = _window(sample, 2 * topk <= visible)
    floor, _, _ = _search(keys, low, high, topk, topk + topk // 4)
    return floor, high


@triton.jit
def _floor(maxima_row_ptr, maxima, num_groups, topk, MAXIMA: tl.constexpr):
    """A key that at least topk of the num_groups maxima reach, and one that few reach."""
    LOWEST: tl.constexpr = -0x7FFFFFFF - 1
    keys, next_keys, sample = maxima
    fold = tl.cdiv(num_groups, MAXIMA)
    first = tl.arange(0, MAXIMA)
    keys = tl.where(first < num_groups, keys, LOWEST)
    keys = tl.maximum(keys, tl.where(first + MAXIMA < num_groups, next_keys, LOWEST))
    for i in range(2, fold):
        at = first + i * MAXIMA
        keys = tl.maximum(keys, tl.load(maxima_row_ptr + at, mask=at < num_groups, other=LOWEST))
    low, high = _window(sample, 2 * topk * fold <= num_groups)
    floor, _, _ = _search(keys, low, high, topk, topk + topk // 4)
    return floor, high


@triton.jit
def _keep_groups(maxima_row_ptr, groups_ptr, num_groups, floor, BLOCK: tl.constexpr):
    """Store the groups whose maxima reach the floor, in order; returns their number."""
    kept = 0
    for start in range(0, num_groups, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(maxima_row_ptr + at, mask=at < num_groups, other=0)
        reach = ((keys >= floor) & (at < num_groups)).to(tl.int32)
        tl.store(groups_ptr + kept + sums_before(reach), at, mask=reach > 0)
        kept += tl.sum(reach)
    return kept


@triton.jit
def _copy_groups(
    scores_row_ptr, groups_ptr, copy_ptr, count, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the scores of the groups that were kept."""
    for start in range(0, count, BLOCK // GROUP):
        at = start + tl.arange(0, BLOCK // GROUP)
        there = at < count
        groups = tl.load(groups_ptr + at, mask=there, other=0, cache_modifier=".cg")
        whole = tl.broadcast_to(there[:, None], [BLOCK // GROUP, GROUP])
        members = tl.arange(0, GROUP)[None, :]
        scores = tl.load(scores_row_ptr + groups[:, None] * GROUP + members, mask=whole, other=0.0)
        tl.store(copy_ptr + at[:, None] * GROUP + members, scores, mask=whole)


@triton.jit
def _load_pairs(scores_ptr, num_groups, GROUP: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr):
    """Load the scores of the first groups, two adjacent scores as one int64.

    Returns LINES tensors [TILE/COLUMNS/LINES, COLUMNS/2]. Row r of tensor i is line LINES * r + i
    of COLUMNS scores: a warp that holds row r of each tensor has adjacent lines.

    OWN: the program itself has stored the scores.
    """
    COLUMNS: tl.constexpr = _columns(TILE)
    line = tl.arange(0, TILE // COLUMNS // LINES)[:, None] * LINES
    first = line * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    first_ptr = scores_ptr.to(tl.pointer_type(tl.int64)) + first
    pairs = ()
    for i in tl.static_range(LINES):
        there = first // (GROUP // 2) < num_groups - i * (COLUMNS // GROUP)
        pair = tl.load(
            first_ptr + i * (COLUMNS // 2),
            mask=there,
            other=NO_SCORES,
            cache_modifier=".cg" if OWN else "",
        )
        pairs += (pair,)  # type: ignore[assignment]
    return pairs


@triton.jit
def _reaches(pairs, SHIFT: tl.constexpr, least):
    """1 where a score of a pair is not below `least`, otherwise 0."""
    scores = (pairs >> SHIFT).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(scores < least, 0, 1)


@triton.jit
def _keep_entries(
    pairs, floor, candidates_ptr, count_at, first_entry, before_tile, TILE: tl.constexpr
):
    """Store the entries of a tile that reach the floor as candidates.

    Also store the number of candidates so far, at index count_at.

    pairs: from `_load_pairs`. A candidate is an int64, too: its score in the high half, its entry
    in the low half. A NaN and the padding of a row may be among the candidates.
    first_entry: of the tile. before_tile: the number of candidates of earlier tiles.

    Returns the number of this tile's candidates in each row of the tile.
    """
    COLUMNS: tl.constexpr = _columns(TILE)
    ROWS: tl.constexpr = TILE // COLUMNS // LINES
    PAIRS: tl.constexpr = COLUMNS // 2
    least = from_keys(floor)
    # Count all lines of a row at once, each in one byte: at most COLUMNS, which is 128.
    counts = tl.zeros([ROWS, PAIRS], tl.int32)
    for i in tl.static_range(LINES):
        counts += (_reaches(pairs[i], 0, least) + _reaches(pairs[i], 32, least)) << (8 * i)
    sums = tl.sum(counts, axis=1)
    through = tl.cumsum(counts, axis=1)
    total = tl.zeros([ROWS], tl.int32)
    for i in tl.static_range(LINES):
        total += (sums >> (8 * i)) & 255
    before = before_tile + sums_of_earlier(total)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PAIRS)[None, :]
    for i in tl.static_range(LINES):
        low, high = _reaches(pairs[i], 0, least), _reaches(pairs[i], 32, least)
        second = before[:, None] + ((through >> (8 * i)) & 255) - high
        first = second - low
        # The hint keeps entries in their threads. It is not true, but cannot do harm: the mask
        # differs between neighbours, so each entry is a store of its own.
        first = tl.max_contiguous(tl.multiple_of(first, [1, 2]), [1, 2])
        second = tl.max_contiguous(tl.multiple_of(second, [1, 2]), [1, 2])
        entries = (first_entry + (row * LINES + i) * COLUMNS + column * 2).to(tl.int64)
        tl.store(candidates_ptr + first, (pairs[i] << 32) | entries, mask=low > 0)
        tl.store(candidates_ptr + second, (pairs[i] & NOT_LOW) | (entries + 1), mask=high > 0)
        before += (sums >> (8 * i)) & 255
    is_last = (row == ROWS - 1) & (column == PAIRS - 1)
    end = tl.where(is_last, count_at, row)
    end = tl.max_contiguous(tl.multiple_of(end, [1, 2]), [1, 2])
    count = tl.broadcast_to(before[:, None], [ROWS, PAIRS])
    tl.store(candidates_ptr + end, count.to(tl.int64), mask=is_last)
    return total


@triton.jit
def _load_candidates(candidates_ptr, count_at, SIZE: tl.constexpr):
    """How many candidates the program has stored, and the first SIZE."""
    # The stores of all threads precede the loads.
    tl.debug_barrier()
    total = tl.load(candidates_ptr + count_at, cache_modifier=".cg").to(tl.int32)
    return total, tl.load(candidates_ptr + tl.arange(0, SIZE), cache_modifier=".cg")


@triton.jit
def _select_streamed(
    row_ptr,
    count,
    length,
    groups_ptr,
    is_copy,
    low,
    high,
    topk,
    slots,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select among all scores of a row, or all candidates, BLOCK at a time.

    is_copy: the candidates' entries are those of a copy of the groups at groups_ptr.
    """
    out_row_ptr, table_row_ptr = slots
    threshold, reached, above = _search_row(
        row_ptr, count, length, low, high, topk, topk, KIND, BLOCK
    )
    ties = tl.where(reached <= topk, topk, topk - above)
    num_stored = 0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys, entries, there = _read_keys(row_ptr, at, count, length, KIND)
        chosen, out_index = choose(keys, threshold, ties)
        chosen = chosen & there
        if KIND == CANDIDATES:
            of_row = _of_groups(entries, groups_ptr, chosen & is_copy, GROUP)
            entries = tl.where(is_copy, of_row, entries)
        store_slots(
            out_row_ptr, table_row_ptr, entries, chosen, num_stored + out_index, ROWS_PER_PAGE
        )
        num_stored += tl.sum(chosen.to(tl.int32))
        ties -= tl.sum((chosen & (keys == threshold)).to(tl.int32))


@triton.jit
def _of_groups(entries, groups_ptr, there, GROUP: tl.constexpr):
    """Map entries of the copy of kept groups to entries of the row."""
    groups = tl.load(groups_ptr + entries // GROUP, mask=there, other=0, cache_modifier=".cg")
    return groups * GROUP + entries % GROUP


@triton.jit(do_not_specialize=["first_token"])
def _select_long_kernel(
    scores_ptr,
    maxima_ptr,
    out_ptr,
    candidates_ptr,
    groups_ptr,
    copy_ptr,
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
    stride_candidates,
    stride_groups,
    stride_pages,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MAXIMA: tl.constexpr,
    SIZE: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the slots of a token's topk entries.

    SIZE: the candidates that a program holds. SMALL: at least GROUP * topk.
    """
    GROUPS: tl.constexpr = TILE // GROUP
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

    scores_row_ptr = scores_ptr + row * stride_scores
    maxima_row_ptr = maxima_ptr + row * stride_maxima
    candidates_ptr += row * stride_candidates
    count_at = stride_candidates - COUNT_ROOM
    groups_ptr += row * stride_groups
    copy_ptr += row * TILE
    num_groups = tl.cdiv(visible, GROUP)
    is_long = visible > 2 * TILE
    length = visible

    maxima = _first_maxima(maxima_row_ptr, num_groups, MAXIMA)
    # Unless the row is long, its first tile arrives while the program finds the floor. A row is
    # allocated in groups.
    pairs = _load_pairs(scores_row_ptr, tl.where(is_long, 0, num_groups), GROUP, TILE, False)
    if num_groups > topk:
        floor, high = _floor(maxima_row_ptr, maxima, num_groups, topk, MAXIMA)
    else:
        floor, high = _floor_of_few(scores_row_ptr, visible, topk, SMALL)
    if is_long:
        turn = 0
        count = GROUPS + 1
        while (count > GROUPS) & (turn < 2):
            if turn > 0:
                floor, _, _ = _search_row(
                    maxima_row_ptr, num_groups, 0, floor, high, topk, GROUPS, KEYS, BLOCK
                )
            tl.debug_barrier()
            count = _keep_groups(maxima_row_ptr, groups_ptr, num_groups, floor, 4 * BLOCK)
            turn += 1
        tl.debug_barrier()
        length = 2 * TILE + 1
        if count <= GROUPS:
            _copy_groups(scores_row_ptr, groups_ptr, copy_ptr, count, GROUP, 4 * BLOCK)
            tl.debug_barrier()
            last = tl.load(groups_ptr + count - 1, cache_modifier=".cg")
            length = (count - 1) * GROUP + tl.minimum(visible - last * GROUP, GROUP)
            pairs = _load_pairs(copy_ptr, count, GROUP, TILE, True)
    slots = out_row_ptr, table_row_ptr
    if length > 2 * TILE:
        _select_streamed(
            scores_row_ptr, visible, visible, groups_ptr, False, floor, high, topk, slots,
            SCORES, GROUP, ROWS_PER_PAGE, BLOCK,
        )  # fmt: skip
        return
    kept = _keep_entries(pairs, floor, candidates_ptr, count_at, 0, 0, TILE)
    if length > TILE:
        pairs = _load_pairs(scores_row_ptr + TILE, num_groups - GROUPS, GROUP, TILE, False)
        _keep_entries(pairs, floor, candidates_ptr, count_at, TILE, tl.sum(kept), TILE)
    total, candidates = _load_candidates(candidates_ptr, count_at, SIZE)
    if total > SIZE:
        _select_streamed(
            candidates_ptr, total, length, groups_ptr, is_long, floor, high, topk, slots,
            CANDIDATES, GROUP, ROWS_PER_PAGE, BLOCK,
        )  # fmt: skip
        return
    ranks = tl.arange(0, SIZE)
    entries, keys, there = _opened(candidates, ranks < total, length)
    if is_long:
        entries = _of_groups(entries, groups_ptr, there, GROUP)
    page = tl.load(table_row_ptr + entries // ROWS_PER_PAGE, mask=there, other=0)
    threshold, reached, above = _search(keys, floor, high, topk, topk)
    chosen, out_index = choose(keys, threshold, tl.where(reached <= topk, topk, topk - above))
    value = page * ROWS_PER_PAGE + entries % ROWS_PER_PAGE
    tl.store(out_row_ptr + out_index, value, mask=chosen & there)


def _candidate_room(max_entries: int) -> int:
    """How many candidates a row may have. The padding of a tile may be among them."""
    return TILE if max_entries <= TILE else 2 * TILE


def row_bytes(max_entries: int) -> int:
    """Bytes that selecting from a row takes, beside its scores."""
    copies = 4 * TILE + max_entries // 2 if max_entries > 2 * TILE else 0
    return 8 * _candidate_room(max_entries) + max_entries // 2 + copies


def empty_maxima(scores_NE: Tensor) -> Tensor:
    """Allocate the maxima. A row has a multiple of 16, so that every length has one signature."""
    num_rows, length = scores_NE.shape
    return scores_NE.new_empty((num_rows, triton.cdiv(length, 16 * GROUP) * 16), dtype=torch.int32)


def select_topk_long(
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
    *,
    num_warps: int = NUM_WARPS,
) -> None:
    """Like topk_triton.select_topk, for rows of any length. More than MOST_TOPK need more maxima.

    maxima [n,G] int32: the largest key of every GROUP adjacent entries that a token sees. A row of
    them has a multiple of 16 values.
    """
    num_rows, count = scores_NE.shape[0], triton.next_power_of_2(topk)
    room = _candidate_room(max_entries)
    candidates = out_NK.new_empty((num_rows, room + COUNT_ROOM.value), dtype=torch.int64)
    groups, copy = out_NK, scores_NE
    if max_entries > 2 * TILE:
        groups = out_NK.new_empty((num_rows, triton.cdiv(max_entries, 16 * GROUP) * 16))
        copy = torch.empty((num_rows, TILE), dtype=torch.float32, device=out_NK.device)
    _select_long_kernel[(num_rows,)](
        *(scores_NE, maxima_NG, out_NK, candidates, groups, copy),
        *(tokens.positions, tokens.sequence, table.pages, table.first),
        *(first_token, topk, out_NK.shape[1]),
        *(scores_NE.stride(0), maxima_NG.stride(0), out_NK.stride(0), candidates.stride(0)),
        *(groups.stride(0), table.pages.stride(0)),
        RATIO=ratio,
        ROWS_PER_PAGE=table.rows_per_page,
        GROUP=GROUP,
        TILE=TILE,
        MAXIMA=max(MAXIMA, 2 * count),
        SIZE=max(32, MOST_CANDIDATES * count),
        SMALL=GROUP * count,
        BLOCK=min(BLOCK, TILE),
        BLOCK_K=triton.next_power_of_2(out_NK.shape[1]),
        num_warps=num_warps,
        **launch_options(early_launch),
    )
