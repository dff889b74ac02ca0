"""Sampling as Triton kernels: everything except log-probabilities.

Penalties, bias and allowed tokens are one kernel each, on a copy of the logits. Two steps follow:

1. A program finds the candidate of one part of the vocabulary in one row, as one integer. In a
   greedy batch, `_best_kernel` finds the largest logit with its lowest id. Otherwise draw_triton.py
   finds the candidates; for filters, `_best_kernel` runs first and also finds the smallest logit.
2. `_pick_kernel` takes the best candidate of each row: those of all parts, and of all ranks.

With `early_launch`, these three kernels start before the previous kernel ends, and read nothing
until it has ended.

A greedy step reads the logits once. The floors at 4.39 TB/s, in microseconds for 1, 128 and 256
rows of 129280 float32 logits, are 0.1, 15 and 30.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import LaunchClasses, ModelSizes, last_of_classes
from finwhale.ops.sampling import SampledTokens, SamplingBatch, ref
from finwhale.ops.sampling.draw_triton import MAX_PARTS, Parts, draw, find_kept, finite, order
from finwhale.ops.sampling.noise import HALF

BLOCK_V = 1024
BLOCK_N = 256
PROGRAMS = 4096  # enough programs to hide the latency of memory
PICKED_BY_A_WARP = 256  # candidates of a row that a warp compares
# Do not specialise on integers that differ between batches or on small tensors' alignment.
_changes_kernel = triton.jit(
    do_not_specialize=["N", "stride_w"],
    do_not_specialize_on_alignment=[
        *("rows_ptr", "ids_ptr", "values_ptr", "words_ptr"),
        *("counts_ptr", "repetition_ptr", "frequency_ptr", "presence_ptr"),
    ],
)


@triton.jit(do_not_specialize=["first", "steps"])
def _best_kernel(
    logits_ptr,
    best_ptr,
    low_ptr,
    V,
    first,
    stride_s,
    steps,
    BLOCK_V: tl.constexpr,
    LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the largest logit of a part of a row. LOW: also the smallest finite one.

    The row's first logit belongs to token `first`.
    """
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    offsets = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], -0x80000000, tl.int32)
    ids = tl.full([BLOCK_V], 0x7FFFFFFF, tl.int32)
    low = tl.full([BLOCK_V], 0x7FFFFFFF, tl.int32)
    for step in tl.range(steps):
        v = (part * steps + step) * BLOCK_V + offsets
        x = tl.load(logits_ptr + row * stride_s + v, mask=v < V, other=float("-inf"))
        ordered = order(x.to(tl.float32))
        better = (ordered > best) & (v < V)
        best = tl.where(better, ordered, best)
        ids = tl.where(better, v, ids)
        if LOW:
            low = tl.where(finite(ordered), tl.minimum(low, ordered), low)
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == top, ids, 0x7FFFFFFF), axis=0)
    # A part without a token has the least key.
    key = (top.to(tl.int64) << 32) | tl.maximum(0x7FFFFFFF - lowest - first, 0).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(1) + part, key)
    if LOW:
        tl.store(low_ptr + row * tl.num_programs(1) + part, tl.min(low, axis=0))


@triton.jit(do_not_specialize=["parts"])
def _pick_kernel(best_ptr, ids_ptr, valid_ptr, parts, BLOCK_P: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    keys = tl.load(best_ptr + row * parts + part, mask=part < parts, other=-0x8000000000000000)
    key = tl.max(keys, axis=0)
    tl.store(ids_ptr + row, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(valid_ptr + row, finite((key >> 32).to(tl.int32)))


@_changes_kernel
def _penalise_kernel(
    logits_ptr,
    rows_ptr,
    ids_ptr,
    counts_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    N,
    stride_s,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < N
    at = logits_ptr + tl.load(rows_ptr + n, mask=mask, other=0) * stride_s
    at += tl.load(ids_ptr + n, mask=mask, other=0)
    x = tl.load(at, mask=mask, other=0.0)
    count = tl.load(counts_ptr + n, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + n, mask=mask, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x -= tl.load(frequency_ptr + n, mask=mask, other=0.0) * count
    presence = tl.load(presence_ptr + n, mask=mask, other=0.0)
    tl.store(at, x - tl.where(count > 0, presence, 0.0), mask=mask)


@_changes_kernel
def _add_kernel(logits_ptr, rows_ptr, ids_ptr, values_ptr, N, stride_s, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < N
    at = logits_ptr + tl.load(rows_ptr + n, mask=mask, other=0) * stride_s
    at += tl.load(ids_ptr + n, mask=mask, other=0)
    x = tl.load(at, mask=mask, other=0.0)
    tl.store(at, x + tl.load(values_ptr + n, mask=mask, other=0.0), mask=mask)


@_changes_kernel
def _restrict_kernel(logits_ptr, rows_ptr, words_ptr, V, stride_s, stride_w, BLOCK_V: tl.constexpr):
    g = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    words = tl.load(words_ptr + g * stride_w + v // 32, mask=v < V, other=0)
    barred = (v < V) & ((words >> (v % 32)) & 1 == 0)
    tl.store(
        logits_ptr + tl.load(rows_ptr + g) * stride_s + v,
        tl.full([BLOCK_V], float("-inf"), tl.float32),
        mask=barred,
    )


def _pick(candidates_SC: Tensor, early_launch: bool) -> tuple[Tensor, Tensor]:
    """The ids of each row's best candidates, and whether they are valid."""
    (num_rows, count), device = candidates_SC.shape, candidates_SC.device
    ids_S = torch.empty(num_rows, dtype=torch.int64, device=device)
    valid_S = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        block = triton.next_power_of_2(count)
        _pick_kernel[(num_rows,)](
            *(candidates_SC, ids_S, valid_S, count),
            BLOCK_P=block,
            num_warps=max(1, block // PICKED_BY_A_WARP),
            **launch_options(early_launch),
        )
    return ids_S, valid_S


def _check(logits_SV: Tensor) -> None:
    vocab_size = logits_SV.shape[1]
    if logits_SV.dtype != torch.float32:
        raise ValueError(f"sampling takes float32 logits, got {logits_SV.dtype}")
    if logits_SV.stride(1) != 1:
        raise ValueError(f"a row's logits must be contiguous, got strides {logits_SV.stride()}")
    if not 0 < vocab_size < 2**31 - MAX_PARTS * BLOCK_V:
        raise ValueError(f"sampling takes 1 to 2^31 - 2^17 logits a row, got {vocab_size}")


def _parts(num_rows: int, vocab_size: int) -> Parts:
    blocks = triton.cdiv(vocab_size, BLOCK_V)
    steps = triton.cdiv(blocks, min(MAX_PARTS, triton.cdiv(PROGRAMS, max(1, num_rows))))
    return Parts(count=triton.cdiv(blocks, steps), block=BLOCK_V, steps=steps)


def _parts_of_rank(num_rows: int, num_tokens: int) -> Parts:
    """Return the parts of a rank's tokens.

    All ranks have the same number of parts, and a batch that draws has as many as a greedy batch.

    `draw` also counts the tokens before the first one that share a pair of tiles with it. A rank's
    first token is a multiple of `num_tokens`, so this is the largest number that any rank has.
    """
    before = 2 * HALF - math.gcd(num_tokens, 2 * HALF)
    return _parts(num_rows, num_tokens + before)


def launch_rows(model: ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""
    num_tokens = model.vocab_size // model.num_ranks
    found = last_of_classes(lambda rows: _parts(rows, model.vocab_size), most)
    return found | last_of_classes(lambda rows: _parts_of_rank(rows, num_tokens), most)


LAUNCH_CLASSES = LaunchClasses(rows=launch_rows)


def _best(
    logits_SV: Tensor,
    parts: Parts,
    *,
    first: int = 0,
    low: bool = False,
    early_launch: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each part's candidate in a greedy batch [S,P]; low: also its smallest finite logit."""
    shape, device = (logits_SV.shape[0], parts.count), logits_SV.device
    best_SP = torch.empty(shape, dtype=torch.int64, device=device)
    low_SP = torch.empty(shape, dtype=torch.int32, device=device) if low else best_SP
    if shape[0]:
        _best_kernel[shape](
            *(logits_SV, best_SP, low_SP),
            *(logits_SV.shape[1], first, logits_SV.stride(0), parts.steps),
            BLOCK_V=BLOCK_V,
            LOW=low,
            num_warps=4,
            **launch_options(early_launch),
        )
    return best_SP, low_SP


def _change(logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply penalties, bias and allowed tokens to the logits."""
    p, b, a = batch.penalties, batch.bias, batch.allowed
    if p is None and b is None and a is None:
        return logits_SV
    x_SV = logits_SV.clone(memory_format=torch.contiguous_format)
    V, stride = x_SV.shape[1], x_SV.stride(0)
    if p is not None and (N := len(p.rows_N)):
        _penalise_kernel[(triton.cdiv(N, BLOCK_N),)](
            *(x_SV, p.rows_N, p.ids_N, p.counts_N, p.repetition_N, p.frequency_N, p.presence_N),
            *(N, stride),
            BLOCK_N=BLOCK_N,
            num_warps=4,
            enable_fp_fusion=False,  # round a product before its subtraction
        )
    if b is not None and (N := len(b.rows_N)):
        _add_kernel[(triton.cdiv(N, BLOCK_N),)](
            x_SV, b.rows_N, b.ids_N, b.values_N, N, stride, BLOCK_N=BLOCK_N, num_warps=4
        )
    if a is not None and len(a.rows_G):
        _restrict_kernel[len(a.rows_G), triton.cdiv(V, BLOCK_V)](
            *(x_SV, a.rows_G, a.words_GW, V, stride, a.words_GW.stride(0)),
            BLOCK_V=BLOCK_V,
            num_warps=4,
        )
    return x_SV


def sample(logits_SV: Tensor, batch: SamplingBatch, *, early_launch: bool = False) -> SampledTokens:
    _check(logits_SV)
    x_SV = _change(logits_SV, batch)
    filters, kept, parts = batch.filters, None, _parts(*x_SV.shape)
    if filters is not None and len(filters.temperature_R):
        if filters.active:
            best = _best(x_SV, parts, low=True, early_launch=early_launch)
            kept = find_kept(x_SV, *best, parts, filters)
        best_SP = draw(x_SV, parts, batch, kept, early_launch=early_launch)
    else:
        best_SP, _ = _best(x_SV, parts, early_launch=early_launch)
    ids_S, valid_S = _pick(best_SP, early_launch)
    logprobs = ref.measure(logits_SV, ids_S, batch.logprobs) if batch.logprobs else None
    return SampledTokens(ids_S=ids_S, valid_S=valid_S, logprobs=logprobs)


def best_candidates(
    logits_SV: Tensor, batch: SamplingBatch, first: int, *, early_launch: bool = False
) -> Tensor:
    if batch.needs_whole_rows:
        raise ValueError("candidates of a part of the vocabulary need a batch without filters")
    num_rows, count = logits_SV.shape
    _check(logits_SV)
    if first % count:
        raise ValueError(f"a rank's first token is a multiple of its {count} tokens, got {first}")
    if num_rows == 0:
        return torch.empty((0, 1), dtype=torch.int64, device=logits_SV.device)
    parts = _parts_of_rank(num_rows, count)
    if batch.filters is None:
        return _best(logits_SV, parts, first=first, early_launch=early_launch)[0]
    return draw(logits_SV, parts, batch, first=first, early_launch=early_launch)


def merge_candidates(candidates_SC: Tensor, *, early_launch: bool = False) -> SampledTokens:
    ids_S, valid_S = _pick(candidates_SC.contiguous(), early_launch)
    return SampledTokens(ids_S=ids_S, valid_S=valid_S)
