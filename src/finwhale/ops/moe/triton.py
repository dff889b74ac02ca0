"""The router as Triton kernels.

By score: products with the gate in parts of CHUNK values of D, then a token a program adds them in
order and chooses. By hash: a token a program, which reads its K rows of the gate alone. A token's
bits never depend on the others or on how many there are.

Bytes: the gate once, 4 E D, and 2 D a token: at least, in microseconds at 4.39 TB/s for 1, 128 and
8192 tokens, Flash (E 256, D 4096) 1.0, 1.2, 16; Pro (384, 7168) 2.5, 2.9, 29. Many tokens are bound
by arithmetic instead: the gate in float32 takes two TF32 products, 34 GFLOP for 8192 tokens of
Flash, 90 us at the 0.39 PFLOP/s that half of bf16's measured rate is; a gate in bfloat16 takes one
bf16 product, 22 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_D = 64
CHUNK = 256
# Up to here a chunk's product has a slot of its own, so that few tokens occupy many programs.
FEW_TOKENS = 256
MAX_EXPERTS = 1024
MAX_TOPK = 32


@triton.jit
def _product(x, gate, total, PRECISION: tl.constexpr):
    """total + x gate^T. "bf16": both are; "split": x is exact in tf32, the gate is two of them."""
    if PRECISION == "bf16":
        return tl.dot(x, tl.trans(gate), total)
    elif PRECISION == "split":
        x = x.to(tl.float32)
        gate = gate.to(tl.float32)
        high = (gate.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        total = tl.dot(x, tl.trans(gate - high), total, input_precision="tf32")
        return tl.dot(x, tl.trans(high), total, input_precision="tf32")
    else:
        x = x.to(tl.float32)
        return tl.dot(x, tl.trans(gate.to(tl.float32)), total, input_precision=PRECISION)


@triton.jit
def _gate_kernel(
    x_ptr,
    gate_ptr,
    parts_ptr,
    N,
    D,
    E,
    stride_x,
    steps,
    PRECISION: tl.constexpr,
    STEPS_PER_CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    slot = tl.program_id(2)
    total = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    chunk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for step in tl.range(steps):
        d = (slot * steps + step) * BLOCK_D + tl.arange(0, BLOCK_D)
        x = tl.load(
            x_ptr + token[:, None] * stride_x + d[None, :],
            mask=(token < N)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        gate = tl.load(
            gate_ptr + expert[:, None] * D + d[None, :],
            mask=(expert < E)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        chunk = _product(x, gate, chunk, PRECISION)
        ends = step % STEPS_PER_CHUNK == STEPS_PER_CHUNK - 1
        total += tl.where(ends, chunk, 0.0)
        chunk = tl.where(ends, 0.0, chunk)
    total += chunk
    target = parts_ptr + ((token * tl.num_programs(2) + slot) * E)[:, None] + expert[None, :]
    tl.store(target, total, mask=(token < N)[:, None] & (expert < E)[None, :])


@triton.jit
def _score(z):
    """sqrt(softplus(z)); softplus(z) = max(z, 0) + log(1 + y) with y = e^-|z|.

    log(1 + y) = 2 atanh(y / (2 + y)) by its series, which keeps the precision of a small y.
    """
    y = tl.exp(-tl.abs(z))
    s = y / (2.0 + y)
    t = s * s
    series = 1.0 / 13.0 + t * (1.0 / 15.0)
    series = 1.0 / 9.0 + t * (1.0 / 11.0 + t * series)
    series = 1.0 / 5.0 + t * (1.0 / 7.0 + t * series)
    series = 1.0 + t * (1.0 / 3.0 + t * series)
    return tl.sqrt(tl.maximum(z, 0.0) + 2.0 * s * series)


@triton.jit
def _choose_kernel(
    parts_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    E,
    scaling,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < E
    z = tl.zeros([BLOCK_E], tl.float32)
    for slot in tl.static_range(SLOTS):
        part = parts_ptr + (token * SLOTS + slot) * E + expert
        z += tl.load(part, mask=is_expert, other=0.0)
    score = _score(z)
    # One integer a candidate that orders as its value, then as the inverted index, so that equal
    # values go to the lowest expert and no input, NaN included, chooses what is none.
    value = (score + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    lowest = tl.full([BLOCK_E], -0x8000000000000000, tl.int64)
    key = tl.where(is_expert, (order << 32) | (BLOCK_E - 1 - expert).to(tl.int64), lowest)
    place = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int64)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    total = 0.0
    for k in tl.static_range(K):
        best = BLOCK_E - 1 - (tl.max(key) & (BLOCK_E - 1))
        weight = tl.sum(tl.where(expert == best, score, 0.0))
        key = tl.where(expert == best, lowest, key)
        ids = tl.where(place == k, best, ids)
        chosen = tl.where(place == k, weight, chosen)
        total += weight
    tl.store(ids_ptr + token * K + place, ids, mask=place < K)
    tl.store(weights_ptr + token * K + place, chosen / (total + 1e-20) * scaling, mask=place < K)


@triton.jit
def _hash_kernel(
    x_ptr,
    gate_ptr,
    table_ptr,
    token_ids_ptr,
    ids_ptr,
    weights_ptr,
    D,
    K,
    stride_x,
    scaling,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_K)
    is_place = place < K
    ids = tl.load(table_ptr + tl.load(token_ids_ptr + token) * K + place, mask=is_place, other=0)
    sums = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=3):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + token * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
        rows = gate_ptr + ids[:, None] * D + d[None, :]
        gate = tl.load(rows, mask=is_place[:, None] & (d < D)[None, :], other=0.0)
        sums += x[None, :] * gate.to(tl.float32)
    score = tl.where(is_place, _score(tl.sum(sums, axis=1)), 0.0)
    weights = score / (tl.sum(score) + 1e-20) * scaling
    tl.store(ids_ptr + token * K + place, ids, mask=is_place)
    tl.store(weights_ptr + token * K + place, weights, mask=is_place)


# --- Launch ---------------------------------------------------------------------------------------


def _precision(x: Tensor, gate: Tensor) -> Literal["bf16", "split", "tf32x3", "ieee"]:
    if x.dtype == gate.dtype == torch.bfloat16:
        return "bf16"
    if torch.version.hip is not None:
        return "ieee"
    return "split" if x.dtype == torch.bfloat16 else "tf32x3"


def _check(x_ND: Tensor, topk: int, **contiguous: Tensor) -> None:
    experts = contiguous["gate"].shape[0]
    if experts > MAX_EXPERTS or not 0 < topk <= min(MAX_TOPK, experts):
        raise ValueError(
            f"these kernels choose up to {MAX_TOPK} of up to {MAX_EXPERTS} experts, got {topk} "
            f"of {experts}"
        )
    if x_ND.stride(1) != 1:
        raise ValueError(f"a row's values must lie together, got strides {x_ND.stride()}")
    for name, tensor in contiguous.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _outputs(x_ND: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    shape = (x_ND.shape[0], topk)
    return (
        torch.empty(shape, dtype=torch.int64, device=x_ND.device),
        torch.empty(shape, dtype=torch.float32, device=x_ND.device),
    )


def route_by_score(
    x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """The gate may be float32 or bfloat16."""
    _check(x_ND, topk, gate=gate_ED, bias=bias_E)
    num_tokens, width = x_ND.shape
    experts = gate_ED.shape[0]
    ids, weights = _outputs(x_ND, topk)
    if num_tokens == 0:
        return ids, weights
    few = num_tokens <= FEW_TOKENS
    steps = triton.cdiv(width, BLOCK_D)
    steps_per_chunk = CHUNK // BLOCK_D
    slots = triton.cdiv(steps, steps_per_chunk) if few else 1
    block_n, block_e = (64, 32) if few else (128, 64)
    parts = torch.empty((num_tokens, slots, experts), dtype=torch.float32, device=x_ND.device)
    _gate_kernel[(triton.cdiv(num_tokens, block_n), triton.cdiv(experts, block_e), slots)](
        x_ND,
        gate_ED,
        parts,
        num_tokens,
        width,
        experts,
        x_ND.stride(0),
        steps_per_chunk if few else steps,
        PRECISION=_precision(x_ND, gate_ED),
        STEPS_PER_CHUNK=steps_per_chunk,
        BLOCK_N=block_n,
        BLOCK_E=block_e,
        BLOCK_D=BLOCK_D,
        num_warps=4 if few else 8,
    )
    _choose_kernel[(num_tokens,)](
        parts,
        bias_E,
        ids,
        weights,
        experts,
        scaling,
        SLOTS=slots,
        K=topk,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(topk),
        num_warps=4 if few else 1,
    )
    return ids, weights


def route_by_hash(
    x_ND: Tensor, gate_ED: Tensor, tid2eid_VK: Tensor, token_ids_N: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """The gate may be float32 or bfloat16."""
    topk = tid2eid_VK.shape[1]
    _check(x_ND, topk, gate=gate_ED, tid2eid=tid2eid_VK, token_ids=token_ids_N)
    num_tokens, width = x_ND.shape
    ids, weights = _outputs(x_ND, topk)
    if num_tokens == 0:
        return ids, weights
    _hash_kernel[(num_tokens,)](
        x_ND,
        gate_ED,
        tid2eid_VK,
        token_ids_N,
        ids,
        weights,
        width,
        topk,
        x_ND.stride(0),
        scaling,
        BLOCK_D=512,
        BLOCK_K=triton.next_power_of_2(topk),
        num_warps=8,
    )
    return ids, weights
