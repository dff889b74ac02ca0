"""The draw as Triton kernels: temperature, min_p, top_k and top_p, then one of the kept tokens.

The tokens of a row are ordered by (logit, lower id), as one integer. top_k and top_p keep the
tokens from a place `least` on. The kernels find `least` without a sort of all tokens:

1. `_scan_kernel` counts the tokens, and sums the weight, in each of BINS equal ranges of logits. It
   runs over parts of the vocabulary, and only if a row of the batch has a top_k or a top_p.
2. A second `_scan_kernel` sums the weight of the tokens above the ranges in which top_k and top_p
   end, and lists the tokens within those ranges.
3. `_draw_kernel`, with a program for each row, finds `least`, the part in which the draw falls, and
   the token.

Weights are integers, so their sums do not depend on the order or on the parts of a row.

The kernels read the logits twice, or three times with a top_k or a top_p, including the pass for
the largest logit. The floors at 4.39 TB/s, in microseconds for 1, 128 and 256 rows of 129280
float32 logits, are 0.4, 45 and 90. In addition, the first scan does one atomic addition for each
token that has weight, and a single row waits for a few dozen passes over its list.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.sampling import Filters

MAX_PARTS = 128
BINS = 1024  # 16 KiB a row, which each of its programs reads
TILE = 512  # of a list
WAYS = 16  # factor by which a pass over a list narrows a search
ROWS = 128  # number of rows compared at a time in the search for a row
# Integers that differ between batches, and small tensors of any alignment: Triton must not
# specialise on them.
INTEGERS = ["steps", "id_bits", "parts", "R", "M", "K", "P"]
POINTERS = ["rows_ptr", "temperature_ptr", "min_p_ptr", "uniform_ptr"]
POINTERS += ["top_k_rows_ptr", "top_k_ptr", "top_p_rows_ptr", "top_p_ptr"]
# Functions that several kernels share read no constants of this module. With one, Triton's cache
# key would depend on the kernel that it compiles first.
_kernel = triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)


@triton.jit
def order(x):
    """Map float32 x to int32 in the same order, with 0.0 equal to -0.0 and NaN above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def logit(place):
    """The float32 whose `order` this is."""
    return tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)


@triton.jit
def finite(place):
    """Whether an `order` is of a number that is neither infinite nor NaN."""
    return (place < 0x7F800000) & (place > -0x7F800001)


@triton.jit
def _place(x, v, id_bits):
    """A token's place in the order of its row, as one int64."""
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
    exp(-32) * 2^44 < 1.
    """
    span = tl.div_rn(top - logit(low), temperature)
    span = tl.minimum(tl.maximum(span, 1e-30), 32.0)
    return tl.minimum(-z * tl.div_rn(BINS - 2.0, span), BINS - 1.0).to(tl.int32)


@triton.jit
def _edges(bins_ptr, has_k, top_k, has_p, top_p, BINS: tl.constexpr):
    """Bins first..last, in which the last tokens that top_k and top_p keep are; that of top_k's,
    BINS where it leaves all that have weight; tokens and weight in the bins before `first`; the
    weight up to the end of top_k's.
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
        # The total weight after top_k is known except for the tokens of one bin.
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


@_kernel
def _scan_kernel(
    logits_ptr,
    best_ptr,
    low_ptr,
    bins_ptr,
    list_ptr,
    sums_ptr,
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
    """Sum a part of a row in bins. With GATHER, sum the weight above the chosen bins and list the
    tokens in them.
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
    if not finite(largest):
        return
    bins_ptr += r * (2 * BINS + 2)
    first = tl.full([], BINS, tl.int32)
    last = first
    if GATHER:
        if has_k | has_p:
            first, last, _, _, _, _ = _edges(bins_ptr, has_k, top_k, has_p, top_p, BINS)
    elif not (has_k | has_p):
        return
    top = logit(largest)
    temperature = tl.load(temperature_ptr + r)
    min_p = tl.load(min_p_ptr + r, mask=M > 0, other=0.0)
    total = tl.zeros([BLOCK_V], tl.int64)
    for step in tl.range(steps):
        v = (tl.program_id(1) * steps + step) * BLOCK_V + tl.arange(0, BLOCK_V)
        x = tl.load(logits_ptr + row * stride_s + v, mask=v < V, other=float("-inf"))
        z, weight = _weigh(x, top, temperature, min_p)
        b = _bin(z, low, top, temperature, BINS)
        if GATHER:
            total += tl.where(b < first, weight, 0)
            listed = ((b >= first) & (b <= last)).to(tl.int64)
            num = tl.sum(listed, axis=0)
            if num > 0:
                start = tl.atomic_add(bins_ptr + 2 * BINS, num, sem="relaxed")
                i = start + tl.cumsum(listed, 0) - 1
                tl.store(list_ptr + r * V + i, _place(x, v, id_bits), mask=listed > 0)
        else:
            tl.atomic_add(bins_ptr + b, weight, mask=(weight > 0) & has_p, sem="relaxed")
            one = tl.full([BLOCK_V], 1, tl.int64)
            counted = (b < BINS - 1) & has_k
            tl.atomic_add(bins_ptr + BINS + b, one, mask=counted, sem="relaxed")
    if GATHER:
        at = r * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums_ptr + at, tl.sum(total, axis=0))


@triton.jit
def _list_weight(list_ptr, num, least, end, id_bits, top, temperature, min_p, TILE: tl.constexpr):
    """Of a list's tokens from the place `least` on with ids below `end`."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, num, TILE):
        i = start + tl.arange(0, TILE)
        place = tl.load(list_ptr + i, mask=i < num, other=-0x8000000000000000)
        _, weight = _weigh(logit((place >> id_bits).to(tl.int32)), top, temperature, min_p)
        mask = (1 << id_bits) - 1
        inside = (i < num) & (place >= least) & (mask - (place & mask) < end)
        total += tl.where(inside, weight, 0)
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
    """The lowest place with less than `limit` above it: `before` and what the list has there.

    COUNT: of tokens, where equal logits share a place; else of weight.
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
            place = tl.load(list_ptr + i, mask=i < num, other=-0x8000000000000000)
            if COUNT:
                weight = tl.full([TILE], 1, tl.int64)
            else:
                x = logit((place >> id_bits).to(tl.int32))
                _, weight = _weigh(x, top, temperature, min_p)
            is_above = (place >> shift)[:, None] > pivots[None, :]
            above += tl.sum(tl.where(is_above, weight[:, None], 0), axis=0)
        too_low = tl.sum((above.to(tl.float64) >= limit).to(tl.int64), axis=0)
        high = tl.minimum(high, low + width * too_low)
        low += tl.maximum(width * (too_low - 1) + 1, 0)
    return high << shift


@_kernel
def _draw_kernel(
    logits_ptr,
    best_ptr,
    low_ptr,
    bins_ptr,
    list_ptr,
    sums_ptr,
    rows_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_rows_ptr,
    top_k_ptr,
    top_p_rows_ptr,
    top_p_ptr,
    uniform_ptr,
    ids_ptr,
    valid_ptr,
    V,
    stride_s,
    steps,
    id_bits,
    parts,
    R,
    M,
    K,
    P,
    BLOCK_V: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best, _low = _extremes(best_ptr, low_ptr, row, parts, MAX_PARTS)
    largest = (best >> 32).to(tl.int32)
    tl.store(valid_ptr + row, finite(largest))
    r = row
    if R > 0:
        r = _find(rows_ptr, R, row, ROWS).to(tl.int64)
    if (r < 0) | (not finite(largest)):
        tl.store(ids_ptr + row, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        return
    top = logit(largest)
    temperature = tl.load(temperature_ptr + r)
    min_p = tl.load(min_p_ptr + r, mask=M > 0, other=0.0)
    has_k, top_k, has_p, top_p = _find_filters(
        r, top_k_rows_ptr, top_k_ptr, K, top_p_rows_ptr, top_p_ptr, P, ROWS
    )
    bins_ptr += r * (2 * BINS + 2)
    list_ptr += r * V
    num = tl.full([], 0, tl.int32)
    least = tl.full([], -0x8000000000000000, tl.int64)
    if has_k | has_p:
        _, _, last_k, count, weight, total_k = _edges(bins_ptr, has_k, top_k, has_p, top_p, BINS)
        num = tl.load(bins_ptr + 2 * BINS).to(tl.int32)
        if last_k < BINS:
            least = _least(
                list_ptr, num, count, top_k, id_bits, top, temperature, min_p, True, TILE, WAYS
            )
        if has_p:
            if last_k < BINS:
                total_k = weight + _list_weight(
                    list_ptr, num, least, V, id_bits, top, temperature, min_p, TILE
                )
            limit = top_p * total_k.to(tl.float64)
            least_p = _least(
                list_ptr, num, weight, limit, id_bits, top, temperature, min_p, False, TILE, WAYS
            )
            least = tl.maximum(least, least_p)

    part = tl.arange(0, MAX_PARTS)
    sums = tl.load(sums_ptr + r * parts + part, mask=part < parts, other=0)
    total = tl.sum(sums, axis=0)
    total += _list_weight(list_ptr, num, least, V, id_bits, top, temperature, min_p, TILE)
    target = (tl.load(uniform_ptr + r) * total.to(tl.float64)).to(tl.int64)
    # Find the first part at whose end the sum exceeds the target; `before` is the sum before it.
    before = tl.full([], 0, tl.int64)
    here = tl.full([], 0, tl.int32)
    behind = parts - 1
    while here < behind:
        middle = (here + behind) // 2
        end = (middle + 1) * steps * BLOCK_V
        until = tl.sum(tl.where(part <= middle, sums, 0), axis=0)
        until += _list_weight(list_ptr, num, least, end, id_bits, top, temperature, min_p, TILE)
        before = tl.where(until > target, before, until)
        here = tl.where(until > target, here, middle + 1)
        behind = tl.where(until > target, middle, behind)
    token = V - 1
    for step in tl.range(steps):
        v = (here * steps + step) * BLOCK_V + tl.arange(0, BLOCK_V)
        x = tl.load(logits_ptr + row * stride_s + v, mask=v < V, other=float("-inf"))
        _, weight = _weigh(x, top, temperature, min_p)
        weight = tl.where(_place(x, v, id_bits) >= least, weight, 0)
        until = before + tl.cumsum(weight, 0)
        token = tl.minimum(token, tl.min(tl.where(until > target, v, V - 1), axis=0))
        before += tl.sum(weight, axis=0)
    tl.store(ids_ptr + row, token)


# --- Launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of rows, with the largest and smallest logit of each part.

    Attributes:
        block, steps: tokens of a step, and steps of a part.
        best_SP: int64, the largest logit's `order` and 2^31 - 1 - its lowest id.
        low_SP: int32, the smallest finite logit's `order`.
    """

    block: int
    steps: int
    best_SP: Tensor
    low_SP: Tensor


def draw(
    logits_SV: Tensor, parts: Parts, filters: Filters, uniform_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row from its filtered distribution, or take the best without filters.

    Args:
        logits_SV: [S,V] float32, S above 0; rows may be strided.

    Returns:
        ids [S] int64; valid [S] bool, False if the row has a NaN, +inf or nothing but -inf.
    """
    f, device = filters, logits_SV.device
    num_rows, vocab_size = logits_SV.shape
    num_parts, num_drawn = parts.best_SP.shape[1], uniform_R.shape[0]
    some_int64, id_bits = parts.best_SP, (vocab_size - 1).bit_length()
    filtered = f.top_k_K is not None or f.top_p_P is not None
    bins = entries = some_int64
    if filtered:
        bins = torch.zeros((num_drawn, 2 * BINS + 2), dtype=torch.int64, device=device)
        entries = torch.empty((num_drawn, vocab_size), dtype=torch.int64, device=device)
    sums = torch.empty((num_drawn, num_parts), dtype=torch.int64, device=device)
    ids_S = torch.empty(num_rows, dtype=torch.int64, device=device)
    valid_S = torch.empty(num_rows, dtype=torch.bool, device=device)
    tensors = (
        *(logits_SV, parts.best_SP, parts.low_SP, bins, entries, sums),
        # Replace a missing tensor by one of its type, so that the kernel is compiled only once.
        some_int64 if f.rows_R is None else f.rows_R,
        f.temperature_R,
        f.temperature_R if f.min_p_R is None else f.min_p_R,
        some_int64 if f.top_k_rows_K is None else f.top_k_rows_K,
        some_int64 if f.top_k_K is None else f.top_k_K,
        some_int64 if f.top_p_rows_P is None else f.top_p_rows_P,
        uniform_R if f.top_p_P is None else f.top_p_P,
    )
    sizes = (vocab_size, logits_SV.stride(0), parts.steps, id_bits)
    lists = (f.rows_R, f.min_p_R, f.top_k_K, f.top_p_P)
    counts = tuple(0 if x is None else len(x) for x in lists)
    plan = {"BLOCK_V": parts.block, "MAX_PARTS": MAX_PARTS, "BINS": BINS, "ROWS": ROWS}
    for gather in (False, True) if filtered else (True,):
        _scan_kernel[num_drawn, num_parts](
            *tensors, *sizes, *counts, GATHER=gather, **plan, num_warps=4
        )
    _draw_kernel[(num_rows,)](
        *(*tensors, uniform_R, ids_S, valid_S, *sizes, num_parts, *counts),
        **plan,
        TILE=TILE,
        WAYS=WAYS,
        num_warps=8,
    )
    return ids_S, valid_S
