"""The random draw as Triton kernels: temperature, min_p, top_k, top_p, and the choice of a token.

The tokens of a row are ordered by (logit, lower id), as one integer, the token's sort key. top_k
and top_p keep the tokens whose sort key is at least `least`. The kernels find `least` without a
full sort:

1. `_scan_kernel`, with a program for each part of the vocabulary, counts the tokens and sums the
   weight in each of BINS equal ranges of logits.
2. A second launch of `_scan_kernel` lists the tokens in the ranges in which top_k and top_p end.
3. `_least_kernel`, with a program for each row that draws, finds `least` in that list.
4. `_draw_kernel` finds the best token of each part: the largest logit of a greedy row; the largest
   logit + temperature * noise of a row that draws, among the tokens that the filters keep.

A batch without top_k and top_p skips the scans, and a batch without filters also `_least_kernel`.
Weights are integers, so their sums do not depend on the order or on the parts of a row. The noise
rounds every operation separately, as noise.py defines it.

A batch without filters reads the logits once. A min_p adds a pass for the largest logit, and a
top_k or a top_p adds the two scans. The floors of one pass at 4.39 TB/s, in microseconds for 1, 128
and 256 rows of 129280 float32 logits, are 0.1, 15 and 30. In addition, the first scan does one
atomic addition for each token that has weight, the search does a few dozen passes over a row's
list, and the noise takes about 40 integer and 50 float32 operations per token.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.sampling import Filters, SamplingBatch
from finwhale.ops.sampling.noise import HALF

MAX_PARTS = 128
BINS = 1024  # 16 KiB per row, which each of the row's programs reads
TILE = 512  # entries of a list that a program reads at a time
WAYS = 16  # factor by which each pass over a list narrows the search
ROWS = 128  # entries that `_find` compares at a time
# Integers that differ between batches, and small tensors of any alignment: Triton must not
# specialise on them.
INTEGERS = ["first", "steps", "id_bits", "parts", "R", "M", "K", "P"]
POINTERS = ["rows_ptr", "temperature_ptr", "min_p_ptr", "least_ptr", "floor_ptr", "top_ptr"]
POINTERS += ["seeds_ptr", "indices_ptr", "positions_ptr"]
POINTERS += ["top_k_rows_ptr", "top_k_ptr", "top_p_rows_ptr", "top_p_ptr"]
# Functions that several kernels share read no constants of this module: with one, Triton's cache
# key would depend on which kernel it compiles first.


@triton.jit
def order(x):
    """Map float32 x to int32 in the same order, with 0.0 equal to -0.0 and NaN above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def logit(ordered):
    """The float32 whose `order` this is."""
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def finite(ordered):
    """Whether an `order` belongs to a number that is neither infinite nor NaN."""
    return (ordered < 0x7F800000) & (ordered > -0x7F800001)


@triton.jit
def _sort_key(x, v, id_bits):
    """The int64 by which a row's tokens are ordered, from logit x and token id v."""
    return (order(x).to(tl.int64) << id_bits) | ((1 << id_bits) - 1 - v)


@triton.jit
def _extremes(best_ptr, low_ptr, row, parts, MAX_PARTS: tl.constexpr):
    """A row's largest logit with its lowest id, and the `order` of its smallest finite logit."""
    part = tl.arange(0, MAX_PARTS)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=-0x8000000000000000)
    low = tl.load(low_ptr + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    return tl.max(best, axis=0), tl.min(low, axis=0)


@triton.jit
def _find(rows_ptr, count, row, ROWS: tl.constexpr):
    """Index of `row` among `count` rows; -1: not found."""
    found = -1
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        rows = tl.load(rows_ptr + i, mask=i < count, other=-1)
        found = tl.maximum(found, tl.max(tl.where(rows == row, i, -1), axis=0))
    return found


@triton.jit
def _find_filters(
    r, top_k_rows_ptr, top_k_ptr, K, top_p_rows_ptr, top_p_ptr, P, ROWS: tl.constexpr
):
    """Whether a row that draws has a top_k, its top_k, and the same for top_p."""
    k = _find(top_k_rows_ptr, K, r, ROWS)
    p = _find(top_p_rows_ptr, P, r, ROWS)
    top_k = tl.load(top_k_ptr + k, mask=k >= 0, other=0)
    top_p = tl.load(top_p_ptr + p, mask=p >= 0, other=0.0)
    return k >= 0, top_k, p >= 0, top_p


@triton.jit
def _weigh(x, top, temperature, min_p):
    """(logit - largest) / temperature, and the weight e * 2^44 after min_p."""
    z = tl.div_rn(x - top, temperature)
    e = tl.exp(z)
    return z, tl.where(e >= min_p, e * 17592186044416.0, 0.0).to(tl.int64)


@triton.jit
def _bin(z, low, top, temperature, BINS: tl.constexpr):
    """The bin of z, counted from the largest logit. The last bin has the tokens without weight:
    z < -32 has none, because exp(-32) * 2^44 < 1.
    """
    span = tl.div_rn(top - logit(low), temperature)
    span = tl.minimum(tl.maximum(span, 1e-30), 32.0)
    return tl.minimum(-z * tl.div_rn(BINS - 2.0, span), BINS - 1.0).to(tl.int32)


@triton.jit
def _edges(bins_ptr, has_k, top_k, has_p, top_p, BINS: tl.constexpr):
    """Find the bins in which top_k and top_p end.

    Returns the bins first..last with the last tokens that top_k and top_p keep; top_k's own last
    bin, or BINS if top_k keeps all tokens that have weight; the number and the weight of the tokens
    before bin `first`; and the weight up to the end of top_k's last bin.
    """
    b = tl.arange(0, BINS)
    weights = tl.load(bins_ptr + b)
    counts = tl.load(bins_ptr + BINS + b)
    fewer = tl.cumsum(counts, 0) < top_k
    last_k = tl.where(has_k, tl.sum(fewer.to(tl.int32), axis=0), BINS)
    first = last_k
    last = last_k
    most = tl.sum(tl.where(b <= last_k, weights, 0), axis=0)
    if has_p:
        # The weight that top_k keeps is between `least` and `most`: its last bin is undecided.
        before = (tl.cumsum(weights, 0) - weights).to(tl.float64)
        least = tl.sum(tl.where(b < last_k, weights, 0), axis=0)
        inside = before < top_p * least.to(tl.float64)
        first = tl.maximum(tl.sum(inside.to(tl.int32), axis=0) - 1, 0)
        inside = before < top_p * most.to(tl.float64)
        last = tl.sum(inside.to(tl.int32), axis=0) - 1
        last = tl.where(last_k < BINS, last_k, tl.minimum(tl.maximum(last, 0), BINS - 2))
        first = tl.minimum(first, last)
    count = tl.sum(tl.where(b < first, counts, 0), axis=0)
    weight = tl.sum(tl.where(b < first, weights, 0), axis=0)
    return first, last, last_k, count, weight, most


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def _scan_kernel(
    logits_ptr,
    best_ptr,
    low_ptr,
    bins_ptr,
    list_ptr,
    rows_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_rows_ptr,
    top_k_ptr,
    top_p_rows_ptr,
    top_p_ptr,
    V,
    stride_s,
    steps,
    id_bits,
    R,
    M,
    K,
    P,
    GATHER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum the weights and counts of a part of a row in bins.

    GATHER: instead, list the tokens in the bins in which top_k and top_p end.
    """
    r = tl.program_id(0).to(tl.int64)
    row = r
    if R > 0:
        row = tl.load(rows_ptr + r)
    best, low = _extremes(best_ptr, low_ptr, row, tl.num_programs(1), MAX_PARTS)
    largest = (best >> 32).to(tl.int32)
    has_k, top_k, has_p, top_p = _find_filters(
        r, top_k_rows_ptr, top_k_ptr, K, top_p_rows_ptr, top_p_ptr, P, ROWS
    )
    if not (finite(largest) & (has_k | has_p)):
        return
    bins_ptr += r * (2 * BINS + 2)
    first = tl.full([], BINS, tl.int32)
    last = first
    if GATHER:
        first, last, _, _, _, _ = _edges(bins_ptr, has_k, top_k, has_p, top_p, BINS)
    top = logit(largest)
    temperature = tl.load(temperature_ptr + r)
    min_p = tl.load(min_p_ptr + r, mask=M > 0, other=0.0)
    for step in tl.range(steps):
        v = (tl.program_id(1) * steps + step) * BLOCK_V + tl.arange(0, BLOCK_V)
        x = tl.load(logits_ptr + row * stride_s + v, mask=v < V, other=float("-inf"))
        z, weight = _weigh(x, top, temperature, min_p)
        b = _bin(z, low, top, temperature, BINS)
        if GATHER:
            listed = ((b >= first) & (b <= last)).to(tl.int64)
            num = tl.sum(listed, axis=0)
            if num > 0:
                start = tl.atomic_add(bins_ptr + 2 * BINS, num, sem="relaxed")
                i = start + tl.cumsum(listed, 0) - 1
                tl.store(list_ptr + r * V + i, _sort_key(x, v, id_bits), mask=listed > 0)
        else:
            tl.atomic_add(bins_ptr + b, weight, mask=(weight > 0) & has_p, sem="relaxed")
            one = tl.full([BLOCK_V], 1, tl.int64)
            counted = (b < BINS - 1) & has_k
            tl.atomic_add(bins_ptr + BINS + b, one, mask=counted, sem="relaxed")


@triton.jit
def _list_weight(list_ptr, num, least, id_bits, top, temperature, min_p, TILE: tl.constexpr):
    """The weight of a list's tokens whose sort key is at least `least`."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        sort_key = tl.load(list_ptr + i, mask=i < num, other=-0x8000000000000000)
        _, weight = _weigh(logit((sort_key >> id_bits).to(tl.int32)), top, temperature, min_p)
        total += tl.where((i < num) & (sort_key >= least), weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _least(
    list_ptr,
    num,
    before,
    limit,
    id_bits,
    top,
    temperature,
    min_p,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The lowest sort key such that `before` plus the list's total above it is less than `limit`.

    COUNT: the total is a number of tokens, and equal logits share a sort key; otherwise, a weight.
    """
    shift = id_bits if COUNT else 0
    low = tl.full([TILE], 0x7FFFFFFFFFFFFFFF, tl.int64)
    high = tl.full([TILE], -0x8000000000000000, tl.int64)
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        low = tl.minimum(low, tl.load(list_ptr + i, mask=i < num, other=0x7FFFFFFFFFFFFFFF))
        high = tl.maximum(high, tl.load(list_ptr + i, mask=i < num, other=-0x8000000000000000))
    low = tl.min(low, axis=0) >> shift
    high = tl.max(high, axis=0) >> shift
    while low < high:
        width = (high - low) // WAYS + 1
        pivots = low + width * tl.arange(0, WAYS)
        above = tl.zeros([WAYS], tl.int64) + before
        for start in range(0, num, TILE):
            i = start + tl.arange(0, TILE)
            sort_key = tl.load(list_ptr + i, mask=i < num, other=-0x8000000000000000)
            if COUNT:
                weight = tl.full([TILE], 1, tl.int64)
            else:
                x = logit((sort_key >> id_bits).to(tl.int32))
                _, weight = _weigh(x, top, temperature, min_p)
            is_above = (sort_key >> shift)[:, None] > pivots[None, :]
            above += tl.sum(tl.where(is_above, weight[:, None], 0), axis=0)
        too_low = tl.sum((above.to(tl.float64) >= limit).to(tl.int64), axis=0)
        high = tl.minimum(high, low + width * too_low)
        low += tl.maximum(width * (too_low - 1) + 1, 0)
    return high << shift


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def _least_kernel(
    best_ptr,
    low_ptr,
    bins_ptr,
    list_ptr,
    rows_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_rows_ptr,
    top_k_ptr,
    top_p_rows_ptr,
    top_p_ptr,
    least_ptr,
    floor_ptr,
    top_ptr,
    V,
    id_bits,
    parts,
    R,
    M,
    K,
    P,
    MAX_PARTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Find a row's largest logit, the lowest sort key that its filters keep, and the least e."""
    r = tl.program_id(0).to(tl.int64)
    row = r
    if R > 0:
        row = tl.load(rows_ptr + r)
    best, _low = _extremes(best_ptr, low_ptr, row, parts, MAX_PARTS)
    largest = (best >> 32).to(tl.int32)
    top = logit(largest)
    temperature = tl.load(temperature_ptr + r)
    min_p = tl.load(min_p_ptr + r, mask=M > 0, other=0.0)
    has_k, top_k, has_p, top_p = _find_filters(
        r, top_k_rows_ptr, top_k_ptr, K, top_p_rows_ptr, top_p_ptr, P, ROWS
    )
    bins_ptr += r * (2 * BINS + 2)
    list_ptr += r * V
    ranked = (has_k | has_p) & finite(largest)
    least_weighed = 5.684341886080802e-14  # 2^-44
    tl.store(floor_ptr + r, tl.where(ranked, tl.maximum(min_p, least_weighed), min_p))
    tl.store(top_ptr + r, top)
    least = tl.full([], -0x8000000000000000, tl.int64)
    if ranked:
        _, _, last_k, count, weight, total_k = _edges(bins_ptr, has_k, top_k, has_p, top_p, BINS)
        num = tl.load(bins_ptr + 2 * BINS).to(tl.int32)
        if last_k < BINS:
            least = _least(
                list_ptr, num, count, top_k, id_bits, top, temperature, min_p, True, TILE, WAYS
            )
        if has_p:
            if last_k < BINS:
                total_k = weight + _list_weight(
                    list_ptr, num, least, id_bits, top, temperature, min_p, TILE
                )
            limit = top_p * total_k.to(tl.float64)
            least_p = _least(
                list_ptr, num, weight, limit, id_bits, top, temperature, min_p, False, TILE, WAYS
            )
            least = tl.maximum(least, least_p)
    tl.store(least_ptr + r, least)


@triton.jit
def _fraction(high, low):
    return (high.to(tl.float32) + low.to(tl.float32) * 2.3283064365386963e-10) * (
        2.3283064365386963e-10
    ) + 2.710505431213761e-20


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    return (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0, e.to(tl.float32)


@triton.jit
def _log(f, e):
    square = f * f
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    rest = p * f * square + e * -2.12194440e-4
    return (rest - square * 0.5 + f) + e * 0.693359375


@triton.jit
def _of_bits(high, low):
    """The noise of 64 bits, with the operations of noise.of_bits."""
    w = _fraction(high, low)
    f, e = _split(_fraction(high ^ 0xFFFFFFFF, low ^ 0xFFFFFFFF))
    near_1 = w < 0.25
    f, e = _split(-_log(tl.where(near_1, -w, f), tl.where(near_1, 0.0, e)))
    return -_log(f, e)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def _draw_kernel(
    logits_ptr,
    keys_ptr,
    rows_ptr,
    temperature_ptr,
    seeds_ptr,
    indices_ptr,
    positions_ptr,
    least_ptr,
    floor_ptr,
    top_ptr,
    V,
    first,
    stride_s,
    steps,
    id_bits,
    R,
    FILTERED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the candidate of a part of a row. The row's first logit belongs to token `first`."""
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    r = row
    if R > 0:
        r = _find(rows_ptr, R, row, ROWS).to(tl.int64)
    draws = r >= 0
    temperature = tl.load(temperature_ptr + r, mask=draws, other=1.0)
    draws = draws & (temperature > 0.0)
    seed = tl.load(seeds_ptr + r, mask=draws, other=0)
    index = tl.load(indices_ptr + r, mask=draws, other=0).to(tl.int32)
    position = tl.load(positions_ptr + r, mask=draws, other=0).to(tl.int32)
    if FILTERED:
        # Greedy rows and rows that are not valid keep every token.
        largest = tl.load(top_ptr + r, mask=draws, other=float("inf"))
        least = tl.load(least_ptr + r, mask=draws, other=0)
        floor = tl.load(floor_ptr + r, mask=draws, other=0.0)
        keeps_all = finite(order(largest)) == 0
    begin = first // (2 * HALF) * HALF
    best = tl.full([BLOCK_C], -0x80000000, tl.int32)
    ids = tl.full([BLOCK_C], 0x7FFFFFFF, tl.int32)
    for step in tl.range(steps):
        pair = begin + (tl.program_id(1) * steps + step) * BLOCK_C + tl.arange(0, BLOCK_C)
        # Indices into the row; the first ones may be negative if `first` is within a pair of tiles.
        v = pair // HALF * (2 * HALF) + pair % HALF - first
        lower = tl.zeros([BLOCK_C], tl.float32)
        upper = tl.zeros([BLOCK_C], tl.float32)
        if draws:
            zero = tl.zeros([BLOCK_C], tl.int32)
            a, b, c, d = tl.philox(seed, pair, zero + position, zero + index, zero)
            lower = _of_bits(a, b)
            upper = _of_bits(c, d)
        for half in tl.static_range(2):
            at = v + half * HALF
            inside = (at >= 0) & (at < V)
            x = tl.load(logits_ptr + row * stride_s + at, mask=inside, other=float("-inf"))
            ordered = order(x + temperature * (upper if half else lower))
            if FILTERED:
                e = tl.exp(tl.div_rn(x - largest, temperature))
                kept = (_sort_key(x, at, id_bits) >= least) & (e >= floor)
                inside = inside & (kept | keeps_all)
            better = (ordered > best) & inside
            best = tl.where(better, ordered, best)
            ids = tl.where(better, at, ids)
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == top, ids, 0x7FFFFFFF), axis=0)
    # A part without a token has the least key.
    key = (top.to(tl.int64) << 32) | tl.maximum(0x7FFFFFFF - lowest - first, 0).to(tl.int64)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How rows are divided into parts.

    Attributes:
        count: number of parts.
        block, steps: tokens of a step, and steps of a part.
    """

    count: int
    block: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which tokens the filters of the rows that draw keep.

    Attributes:
        least_R: int64, the lowest sort key that is kept.
        floor_R: float32, the least e that is kept.
        top_R: float32, the largest logit.
    """

    least_R: Tensor
    floor_R: Tensor
    top_R: Tensor


def find_kept(
    logits_SV: Tensor, best_SP: Tensor, low_SP: Tensor, parts: Parts, filters: Filters
) -> Kept:
    """Find where the filters end.

    Args:
        logits_SV: [S,V] float32, S above 0; rows may be strided.
        best_SP: int64, each part's candidate: `order` of its largest logit, 2^31 - 1 - lowest id.
        low_SP: int32, `order` of each part's smallest finite logit.
    """
    f, device = filters, logits_SV.device
    vocab_size, num_drawn = logits_SV.shape[1], f.temperature_R.shape[0]
    some_int64, id_bits = best_SP, (vocab_size - 1).bit_length()
    bins = entries = some_int64
    ranked = f.top_k_K is not None or f.top_p_P is not None
    if ranked:
        bins = torch.zeros((num_drawn, 2 * BINS + 2), dtype=torch.int64, device=device)
        entries = torch.empty((num_drawn, vocab_size), dtype=torch.int64, device=device)
    tensors = (
        *(best_SP, low_SP, bins, entries),
        # Replace a missing tensor by one of the same dtype, so that the kernel is compiled once.
        some_int64 if f.rows_R is None else f.rows_R,
        f.temperature_R,
        f.temperature_R if f.min_p_R is None else f.min_p_R,
        some_int64 if f.top_k_rows_K is None else f.top_k_rows_K,
        some_int64 if f.top_k_K is None else f.top_k_K,
        some_int64 if f.top_p_rows_P is None else f.top_p_rows_P,
        torch.empty(0, dtype=torch.float64, device=device) if f.top_p_P is None else f.top_p_P,
    )
    lists = (f.rows_R, f.min_p_R, f.top_k_K, f.top_p_P)
    counts = tuple(0 if x is None else len(x) for x in lists)
    plan = {"MAX_PARTS": MAX_PARTS, "BINS": BINS, "ROWS": ROWS}
    for gather in (False, True) if ranked else ():
        _scan_kernel[num_drawn, parts.count](
            *(logits_SV, *tensors, vocab_size, logits_SV.stride(0), parts.steps, id_bits, *counts),
            **plan,
            GATHER=gather,
            BLOCK_V=parts.block,
            num_warps=4,
        )
    kept = Kept(
        least_R=torch.empty(num_drawn, dtype=torch.int64, device=device),
        floor_R=torch.empty(num_drawn, dtype=torch.float32, device=device),
        top_R=torch.empty(num_drawn, dtype=torch.float32, device=device),
    )
    _least_kernel[(num_drawn,)](
        *(*tensors, kept.least_R, kept.floor_R, kept.top_R),
        *(vocab_size, id_bits, parts.count, *counts),
        **plan,
        TILE=TILE,
        WAYS=WAYS,
        num_warps=8,
    )
    return kept


def draw(
    logits_SV: Tensor,
    parts: Parts,
    batch: SamplingBatch,
    kept: Kept | None = None,
    first: int = 0,
    *,
    early_launch: bool = False,
) -> Tensor:
    """Find each part's candidate [S,P] (see `BestCandidates`); P is parts.count.

    Args:
        logits_SV: [S,V] float32, S above 0, of the tokens from `first` on; rows may be strided.
        parts: of at least V + first % (2 * HALF) tokens, in blocks that are a multiple of 2 * HALF.
        kept: None: there are no filters.
        early_launch: see `launch_options`.
    """
    f = batch.filters
    assert f is not None and batch.positions_R is not None
    num_rows, vocab_size = logits_SV.shape
    shape = (num_rows, parts.count)
    keys_SP = torch.empty(shape, dtype=torch.int64, device=logits_SV.device)
    filtered = kept is not None
    if kept is None:
        kept = Kept(least_R=keys_SP, floor_R=f.temperature_R, top_R=f.temperature_R)
    _draw_kernel[shape](
        *(logits_SV, keys_SP, keys_SP if f.rows_R is None else f.rows_R, f.temperature_R),
        *(f.seeds_R, f.indices_R, batch.positions_R, kept.least_R, kept.floor_R, kept.top_R),
        *(vocab_size, first, logits_SV.stride(0), parts.steps, (vocab_size - 1).bit_length()),
        0 if f.rows_R is None else len(f.rows_R),
        FILTERED=filtered,
        BLOCK_C=parts.block // 2,
        HALF=HALF,
        ROWS=ROWS,
        num_warps=4,
        enable_fp_fusion=False,  # the noise rounds each operation separately
        **launch_options(early_launch),
    )
    return keys_SP
