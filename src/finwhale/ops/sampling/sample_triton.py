"""Sampling as Triton kernels: everything except log-probabilities.

Penalties, bias and allowed tokens are one kernel each, on a copy of the logits. Two steps follow:

1. A program finds the candidate of one part of the vocabulary in one row, as one integer. In a
   greedy batch, `_best_kernel` finds the largest logit with its lowest id. Otherwise draw_triton.py
   finds the candidates; for filters, `_best_kernel` runs first and also finds the smallest logit.
2. `_pick_kernel` takes the best candidate of each row.

A greedy step reads the logits once. The floors at 4.39 TB/s, in microseconds for 1, 128 and 256
rows of 129280 float32 logits, are 0.1, 15 and 30.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.sizes import ModelSizes, last_of_classes
from finwhale.ops.sampling import AllowedTokens, Bias, Penalties, SampledTokens, SamplingBatch, ref
from finwhale.ops.sampling.draw_triton import MAX_PARTS, Parts, draw, find_kept, finite, order
from finwhale.ops.sampling.noise import HALF

BLOCK_V = 1024
BLOCK_N = 256
PROGRAMS = 4096  # enough programs to hide the latency of memory
# Do not specialise on integers that differ between batches or on small tensors' alignment.
_changes_kernel = triton.jit(
    do_not_specialize=["N", "stride_w"],
    do_not_specialize_on_alignment=[
        *("rows_ptr", "ids_ptr", "values_ptr", "words_ptr"),
        *("counts_ptr", "repetition_ptr", "frequency_ptr", "presence_ptr"),
    ],
)


@triton.jit(do_not_specialize=["steps"])
def _best_kernel(
    logits_ptr, best_ptr, low_ptr, V, stride_s, steps, BLOCK_V: tl.constexpr, LOW: tl.constexpr
):
    """Find the largest logit of a part of a row. LOW: also the smallest finite one."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    offsets = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], -0x80000000, tl.int32)
    ids = tl.full([BLOCK_V], 0x7FFFFFFF, tl.int32)
    low = tl.full([BLOCK_V], 0x7FFFFFFF, tl.int32)
    for step in tl.range(steps):
        v = (part * steps + step) * BLOCK_V + offsets
        x = tl.load(logits_ptr + row * stride_s + v, mask=v < V, other=float("-inf"))
        place = order(x.to(tl.float32))
        better = (place > best) & (v < V)
        best = tl.where(better, place, best)
        ids = tl.where(better, v, ids)
        if LOW:
            low = tl.where(finite(place), tl.minimum(low, place), low)
    top = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == top, ids, 0x7FFFFFFF), axis=0)
    key = (top.to(tl.int64) << 32) | (0x7FFFFFFF - lowest).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(1) + part, key)
    if LOW:
        tl.store(low_ptr + row * tl.num_programs(1) + part, tl.min(low, axis=0))


@triton.jit(do_not_specialize=["parts"])
def _pick_kernel(best_ptr, ids_ptr, valid_ptr, parts, BLOCK_P: tl.constexpr):
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


# --- Launch ---------------------------------------------------------------------------------------


def greedy(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest logit of each row; the lowest id wins ties.

    Args:
        logits_SV: [S,V] float32 or bfloat16, V below 2^31 - 2^17; rows may be strided.

    Returns:
        ids [S] int64; valid [S] bool, False if the row has a NaN, +inf or nothing but -inf.
    """
    num_rows = _check(logits_SV)
    if num_rows == 0:
        return _pick(torch.empty((0, 1), dtype=torch.int64, device=logits_SV.device))
    return _pick(_best(logits_SV, _parts(num_rows, logits_SV.shape[1]), low=False)[0])


def _pick(candidates_SC: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of each row's best candidates, and whether they are valid."""
    (num_rows, count), device = candidates_SC.shape, candidates_SC.device
    ids_S = torch.empty(num_rows, dtype=torch.int64, device=device)
    valid_S = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        _pick_kernel[(num_rows,)](
            candidates_SC, ids_S, valid_S, count, BLOCK_P=triton.next_power_of_2(count), num_warps=1
        )
    return ids_S, valid_S


def _check(logits_SV: Tensor) -> int:
    """The number of rows."""
    num_rows, vocab_size = logits_SV.shape
    if logits_SV.stride(1) != 1:
        raise ValueError(f"a row's logits must be contiguous, got strides {logits_SV.stride()}")
    if not 0 < vocab_size < 2**31 - MAX_PARTS * BLOCK_V:
        raise ValueError(f"sampling takes 1 to 2^31 - 2^17 logits a row, got {vocab_size}")
    return num_rows


def _parts(num_rows: int, vocab_size: int) -> Parts:
    blocks = triton.cdiv(vocab_size, BLOCK_V)
    steps = triton.cdiv(blocks, min(MAX_PARTS, triton.cdiv(PROGRAMS, num_rows)))
    return Parts(count=triton.cdiv(blocks, steps), block=BLOCK_V, steps=steps)


def launch_rows(model: ModelSizes, most: int) -> set[int]:
    """See ops/launch/sizes.py."""
    return last_of_classes(lambda rows: _parts(rows, model.vocab_size), most)


def _best(logits_SV: Tensor, parts: Parts, *, low: bool) -> tuple[Tensor, Tensor]:
    """Each part's candidate in a greedy batch [S,P]; low: also its smallest finite logit."""
    shape, device = (logits_SV.shape[0], parts.count), logits_SV.device
    best_SP = torch.empty(shape, dtype=torch.int64, device=device)
    low_SP = torch.empty(shape, dtype=torch.int32, device=device) if low else best_SP
    _best_kernel[shape](
        *(logits_SV, best_SP, low_SP, logits_SV.shape[1], logits_SV.stride(0), parts.steps),
        BLOCK_V=BLOCK_V,
        LOW=low,
        num_warps=4,
    )
    return best_SP, low_SP


def _penalise(x_SV: Tensor, p: Penalties) -> None:
    N = len(p.rows_N)
    _penalise_kernel[(triton.cdiv(N, BLOCK_N),)](
        *(x_SV, p.rows_N, p.ids_N, p.counts_N, p.repetition_N, p.frequency_N, p.presence_N),
        *(N, x_SV.stride(0)),
        BLOCK_N=BLOCK_N,
        num_warps=4,
        enable_fp_fusion=False,  # round a product before its subtraction
    )


def _add(x_SV: Tensor, b: Bias) -> None:
    N = len(b.rows_N)
    _add_kernel[(triton.cdiv(N, BLOCK_N),)](
        x_SV, b.rows_N, b.ids_N, b.values_N, N, x_SV.stride(0), BLOCK_N=BLOCK_N, num_warps=4
    )


def _restrict(x_SV: Tensor, a: AllowedTokens) -> None:
    V = x_SV.shape[1]
    _restrict_kernel[len(a.rows_G), triton.cdiv(V, BLOCK_V)](
        *(x_SV, a.rows_G, a.words_GW, V, x_SV.stride(0), a.words_GW.stride(0)),
        BLOCK_V=BLOCK_V,
        num_warps=4,
    )


def _change(logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply penalties, bias and allowed tokens to the logits."""
    if batch.penalties is None and batch.bias is None and batch.allowed is None:
        return logits_SV
    x_SV = logits_SV.clone(memory_format=torch.contiguous_format)
    if batch.penalties is not None and len(batch.penalties.rows_N):
        _penalise(x_SV, batch.penalties)
    if batch.bias is not None and len(batch.bias.rows_N):
        _add(x_SV, batch.bias)
    if batch.allowed is not None and len(batch.allowed.rows_G):
        _restrict(x_SV, batch.allowed)
    return x_SV


def _drawn(x_SV: Tensor, batch: SamplingBatch) -> Tensor:
    """The candidates [S,P] of a batch in which rows draw."""
    filters, kept = batch.filters, None
    parts = _parts(*x_SV.shape)
    if filters is not None and filters.active:
        kept = find_kept(x_SV, *_best(x_SV, parts, low=True), parts, filters)
    return draw(x_SV, parts, batch, kept)


def sample(logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
    if not batch.plain:
        if logits_SV.dtype != torch.float32:
            raise ValueError(f"sampling takes float32 logits, got {logits_SV.dtype}")
        _check(logits_SV)
    x_SV = _change(logits_SV, batch)
    if batch.filters is not None and len(batch.filters.temperature_R):
        ids_S, valid_S = _pick(_drawn(x_SV, batch))
    else:
        ids_S, valid_S = greedy(x_SV)
    logprobs = ref.measure(logits_SV, ids_S, batch.logprobs) if batch.logprobs else None
    return SampledTokens(ids_S=ids_S, valid_S=valid_S, logprobs=logprobs)


def best_candidates(logits_SV: Tensor, batch: SamplingBatch, first: int) -> Tensor:
    if batch.needs_whole_rows:
        raise ValueError("candidates of a part of the vocabulary need a batch without filters")
    num_rows, count = logits_SV.shape
    _check(logits_SV)
    if num_rows == 0:
        return torch.empty((0, 1), dtype=torch.int64, device=logits_SV.device)
    if batch.filters is None:
        best_SP, _ = _best(logits_SV, _parts(num_rows, count), low=False)
        return best_SP.amax(dim=1, keepdim=True) - first
    parts = _parts(num_rows, count + first % (2 * HALF))
    return draw(logits_SV, parts, batch, first=first).amax(dim=1, keepdim=True)


def merge_candidates(candidates_SC: Tensor) -> SampledTokens:
    ids_S, valid_S = _pick(candidates_SC.contiguous())
    return SampledTokens(ids_S=ids_S, valid_S=valid_S)
