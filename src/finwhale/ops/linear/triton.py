"""Linear layers as Triton kernels. Legend: N tokens, K input width, M output width, G groups.

1. `_row_kernel`, up to ROW_TOKENS tokens: a program takes whole rows of the weight, asks for all of
   their bytes at once, rounds the tokens meanwhile, and sums in float32 without tensor cores.
2. `_tile_kernel` on tensor cores: tiles of the weight times all tokens (BLOCK_N of them), rounded on
   the way in; split over K into parts which `_sum_kernel` adds in order (no atomics).

A token's bits do not depend on the other tokens. They do not depend on how many there are within
1..ROW_TOKENS, nor within ROW_TOKENS+1.. : the split and the order over K follow from K and M alone.

FP8 weights have a float32 scale a block of 128x128; products within 128 values of K add up before
the scales are applied (tensor cores) or after (rows). Scales are powers of two, so that both are exact.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.linear import ACTIVATION_GROUP, LinearWeight
from finwhale.ops.linear.quantise import (
    clamped_swiglu,
    e4m3_scale,
    quantise,
    round_groups,
    round_input,
)
from finwhale.ops.moe import ExpertWeight

ROW_TOKENS = 4
SPLIT_TOKENS = 64
SUM_ROWS = 32
EARLY_LAUNCH = True
MIN_PROGRAMS = 2 * 132  # two for each multiprocessor
ROW_BYTES = 32768  # of the weight that a program of `_row_kernel` holds in registers


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    M,
    stride_xn,
    stride_xg,
    stride_on,
    limit,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[n, g, m] for BLOCK_M rows m; GATED: of gate rows m and up rows M + m, the SwiGLU."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    is_row = row < M
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    HALVES: tl.constexpr = 2 if GATED else 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    base = weight_ptr + (g * HALVES * M + row).to(tl.int64)[:, None] * K + k[None, :]
    gate = ()
    up = ()
    for i in tl.static_range(CHUNKS):
        mask = is_row[:, None] & (i * BLOCK_K + k < K)[None, :]
        gate += (tl.load(base + i * BLOCK_K, mask=mask, other=0.0),)
        if GATED:
            second = base + tl.cast(M, tl.int64) * K
            up += (tl.load(second + i * BLOCK_K, mask=mask, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    COLUMNS: tl.constexpr = (K + 127) // 128
    block = tl.program_id(0) * BLOCK_M // 128
    scales = scale_ptr + (g * HALVES * ((M + 127) // 128) + block) * COLUMNS
    for n in tl.static_range(TOKENS):
        total = tl.zeros([BLOCK_M], tl.float32)
        total_up = tl.zeros([BLOCK_M], tl.float32)
        for i in tl.static_range(CHUNKS):
            source = x_ptr + n * stride_xn + g * stride_xg + i * BLOCK_K + k
            x = tl.load(source, mask=i * BLOCK_K + k < K, other=0.0).to(tl.float32)
            x_up = x
            if ROUND:
                quantised, factor = round_groups(x, BLOCK_K)
                grouped = quantised.to(tl.float32)
            else:
                grouped = tl.reshape(x, [BLOCK_K // 128, 128])
                factor = tl.full([BLOCK_K // 128], 1.0, tl.float32)
            if SCALED:
                column = i * (BLOCK_K // 128) + tl.arange(0, BLOCK_K // 128)
                known = column < COLUMNS
                if GATED:
                    second = scales + (M // 128) * COLUMNS
                    other = factor * tl.load(second + column, mask=known, other=0.0)
                    x_up = tl.reshape(grouped * other[:, None], [BLOCK_K])
                factor = factor * tl.load(scales + column, mask=known, other=0.0)
            x = tl.reshape(grouped * factor[:, None], [BLOCK_K])
            if GATED and not SCALED:
                x_up = x
            total += tl.sum(gate[i].to(tl.float32) * x[None, :], axis=1)
            if GATED:
                total_up += tl.sum(up[i].to(tl.float32) * x_up[None, :], axis=1)
        if GATED:
            total = clamped_swiglu(total, total_up, limit)
        target = out_ptr + n * stride_on + g * M + row
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _tile_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    N,
    M,
    K,
    stride_xn,
    stride_xg,
    stride_sn,
    stride_sg,
    stride_sk,
    steps,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,
    QUANTISED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """PARTS: float32 parts [split, G, M, ceil(N)]; else out [N, G, M]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    g = tl.program_id(2)
    is_row = row < M
    is_token = token < N
    weights = weight_ptr + (g.to(tl.int64) * M + row)[:, None] * K
    tokens = x_ptr + token.to(tl.int64)[:, None] * stride_xn + g * stride_xg
    columns = (K + 127) // 128
    block = tl.program_id(0) % tiles * BLOCK_M // 128
    scales = scale_ptr + (g * ((M + 127) // 128) + block) * columns
    token_scales = x_scale_ptr + token.to(tl.int64) * stride_sn + g * stride_sg
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    last = tl.minimum((part + 1) * steps, tl.cdiv(K, BLOCK_K))
    for step in tl.range(part * steps, last, num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        is_k = (k < K)[None, :]
        weight = tl.load(weights + k[None, :], mask=is_row[:, None] & is_k, other=0.0)
        x = tl.load(tokens + k[None, :], mask=is_token[:, None] & is_k, other=0.0)
        if SCALED:
            # BLOCK_K is 128 here.
            factor = tl.load(scales + step)
            if QUANTISED:
                scale = tl.load(token_scales + step * stride_sk, mask=is_token, other=0.0)
            else:
                x = x.to(tl.float32)
                scale, inverse = e4m3_scale(tl.max(tl.abs(x), axis=1))
                x = (x * inverse[:, None]).to(tl.float8e4nv)
            product = tl.dot(weight, tl.trans(x))
            total += product * (scale * factor)[None, :]
        else:
            if ROUND:
                grouped = tl.reshape(x.to(tl.float32), [BLOCK_N, BLOCK_K // 128, 128])
                scale, inverse = e4m3_scale(tl.max(tl.abs(grouped), axis=2))
                grouped = (grouped * inverse[:, :, None]).to(tl.float8e4nv).to(tl.float32)
                x = tl.reshape(grouped * scale[:, :, None], [BLOCK_N, BLOCK_K])
            x = x.to(weight.dtype)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    if PARTS:
        padded = tl.cdiv(N, BLOCK_N) * BLOCK_N
        line = ((part * tl.num_programs(2) + g).to(tl.int64) * M + row) * padded
        tl.store(out_ptr + line[:, None] + token[None, :], total, mask=is_row[:, None])
    else:
        line = (token.to(tl.int64) * tl.num_programs(2) + g) * M
        mask = is_row[:, None] & is_token[None, :]
        value = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + line[None, :] + row[:, None], value, mask=mask)


@triton.jit
def _sum_kernel(
    parts_ptr,
    out_ptr,
    N,
    M,
    padded,
    size,
    stride_on,
    limit,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts [PARTS, M or 2M, padded] float32, `size` values each -> out [N, M]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (token < N)[None, :]
    source = parts_ptr + row.to(tl.int64)[:, None] * padded + token[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(source + part * size, mask=mask, other=0.0)
        if GATED:
            total_up += tl.load(source + part * size + M * padded, mask=mask, other=0.0)
    if GATED:
        total = clamped_swiglu(total, total_up, limit)
    target = out_ptr + token.to(tl.int64)[None, :] * stride_on + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)


# --- Launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """out[n, g] = x[n, g] @ weight[g]^T, or the SwiGLU of its two halves if `limit` is given."""

    x: Tensor  # [N, G, K], rows of values that lie together
    weight: Tensor  # [G, M, K], or [G, 2M, K] if gated, contiguous
    scale: Tensor | None  # [G, M/128, K/128] float32, contiguous
    round_input: bool
    out_dtype: torch.dtype
    limit: float | None = None

    @property
    def M(self) -> int:
        rows = self.weight.shape[1]
        return rows if self.limit is None else rows // 2

    def empty(self) -> Tensor:
        """[N, G, M]."""
        num_tokens, groups, _ = self.x.shape
        return torch.empty((num_tokens, groups, self.M), dtype=self.out_dtype, device=self.x.device)


@dataclass(frozen=True, slots=True)
class RowPlan:
    block_m: int
    block_k: int
    num_warps: int

    @staticmethod
    def of(p: Problem) -> "RowPlan":
        groups, rows, width = p.weight.shape
        block_k = min(width & -width, 4096 // p.weight.element_size())
        if block_k < ACTIVATION_GROUP:
            block_k = min(1024, max(ACTIVATION_GROUP, triton.next_power_of_2(width)))
        held = ROW_BYTES // (width * p.weight.element_size() * (rows // p.M))
        block_m = max(1, min(ACTIVATION_GROUP, 1 << held.bit_length() - 1 if held else 1))
        while block_m > 1 and groups * triton.cdiv(p.M, block_m) < MIN_PROGRAMS:
            block_m //= 2
        return RowPlan(block_m, block_k, 8)


@dataclass(frozen=True, slots=True)
class TilePlan:
    block_m: int
    block_n: int
    block_k: int
    split: int
    stages: int
    num_warps: int

    @staticmethod
    def of(p: Problem) -> "TilePlan":
        groups, rows, width = p.weight.shape
        num_tokens = p.x.shape[0]
        block_k = ACTIVATION_GROUP
        if num_tokens > SPLIT_TOKENS:
            return TilePlan(128, 128, block_k, 1, 3, 8)
        block_m, steps = 64, triton.cdiv(width, block_k)
        tiles = groups * triton.cdiv(rows, block_m)
        split = max(1, min(steps, MIN_PROGRAMS // tiles))
        block_n = min(64, max(16, triton.next_power_of_2(num_tokens)))
        return TilePlan(block_m, block_n, block_k, split, 5, 4)


def _early(x: Tensor) -> dict[str, Any]:
    """Launch options: start while the kernel before ends, on Hopper and later."""
    if x.device.type != "cuda" or torch.version.hip or not EARLY_LAUNCH:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def _run_rows(p: Problem, plan: RowPlan) -> Tensor:
    out = p.empty()
    num_tokens, groups, width = p.x.shape
    _row_kernel[(triton.cdiv(p.M, plan.block_m), groups)](
        p.x,
        p.weight,
        p.weight if p.scale is None else p.scale,
        out,
        p.M,
        p.x.stride(0),
        p.x.stride(1),
        out.stride(0),
        0.0 if p.limit is None else p.limit,
        K=width,
        TOKENS=num_tokens,
        SCALED=p.scale is not None,
        ROUND=p.round_input,
        GATED=p.limit is not None,
        BLOCK_M=plan.block_m,
        BLOCK_K=plan.block_k,
        num_warps=plan.num_warps,
        **_early(p.x),
    )
    return out


def _run_tiles(p: Problem, plan: TilePlan, x_scale: Tensor | None = None) -> Tensor:
    num_tokens, groups, width = p.x.shape
    rows = p.weight.shape[1]
    parted = plan.split > 1 or p.limit is not None
    blocks = triton.cdiv(num_tokens, plan.block_n)
    padded = blocks * plan.block_n
    out = parts = p.empty()
    if parted:
        shape = (plan.split, groups, rows, padded)
        parts = torch.empty(shape, dtype=torch.float32, device=p.x.device)
    scales = p.x.new_empty(0) if x_scale is None else x_scale
    strides = (0, 0, 0) if x_scale is None else x_scale.stride()
    _tile_kernel[(triton.cdiv(rows, plan.block_m) * blocks, plan.split, groups)](
        p.x,
        scales,
        p.weight,
        p.weight if p.scale is None else p.scale,
        parts,
        num_tokens,
        rows,
        width,
        p.x.stride(0),
        p.x.stride(1),
        *strides,
        triton.cdiv(triton.cdiv(width, plan.block_k), plan.split),
        SCALED=p.scale is not None,
        ROUND=p.round_input,
        QUANTISED=x_scale is not None,
        PARTS=parted,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
        **_early(p.x),
    )
    if parted:
        _sum(p, parts, out, plan)
    return out


def _sum(p: Problem, parts: Tensor, out: Tensor, plan: TilePlan) -> None:
    """A group's rows follow the group's before, in the parts and in a token's results."""
    width, padded = out.shape[1] * out.shape[2], parts.shape[-1]
    block_n = min(16, padded)
    grid = (triton.cdiv(width, SUM_ROWS), triton.cdiv(out.shape[0], block_n))
    _sum_kernel[grid](
        parts,
        out,
        out.shape[0],
        width,
        padded,
        parts[0].numel(),
        width,
        0.0 if p.limit is None else p.limit,
        PARTS=plan.split,
        GATED=p.limit is not None,
        BLOCK_M=SUM_ROWS,
        BLOCK_N=block_n,
        num_warps=4,
        **_early(p.x),
    )


def _check(p: Problem) -> None:
    if p.x.stride(2) != 1 or not p.weight.is_contiguous():
        raise ValueError(
            f"a row's values must lie together and the weight be contiguous, got strides"
            f" {p.x.stride()} and {p.weight.stride()}"
        )
    if p.weight.shape[2] != p.x.shape[2]:
        raise ValueError(f"inputs of {p.x.shape[2]} values for a weight {list(p.weight.shape)}")
    if (p.scale is None) != (p.weight.dtype != torch.float8_e4m3fn):
        raise ValueError(
            f"a weight of {p.weight.dtype} {'without' if p.scale is None else 'with'} a scale"
        )
    if p.scale is None:
        return
    groups, rows, width = p.weight.shape
    wanted = (groups, triton.cdiv(rows, ACTIVATION_GROUP), triton.cdiv(width, ACTIVATION_GROUP))
    if tuple(p.scale.shape) != wanted or not p.scale.is_contiguous():
        raise ValueError(f"the scale must be contiguous {list(wanted)}, got {list(p.scale.shape)}")
    if width % ACTIVATION_GROUP or (p.limit is not None and rows // 2 % ACTIVATION_GROUP):
        raise ValueError(f"E4M3 weights must be multiples of {ACTIVATION_GROUP} wide, got {width}")
    if not p.round_input:
        raise ValueError("E4M3 weights take rounded inputs only")


def run(p: Problem) -> Tensor:
    """[N, G, M], by the kernel for this number of tokens."""
    _check(p)
    num_tokens = p.x.shape[0]
    if num_tokens == 0:
        return p.empty()
    if num_tokens <= ROW_TOKENS:
        return _run_rows(p, RowPlan.of(p))
    if num_tokens <= SPLIT_TOKENS or (p.scale is None and p.limit is not None):
        return _run_tiles(p, TilePlan.of(p))
    if p.scale is None:
        return _run_many(p)
    x, x_scale = quantise(p.x)
    return _run_tiles(replace(p, x=x), TilePlan.of(p), x_scale)


def _run_many(p: Problem) -> Tensor:
    """Unscaled weights and many tokens: torch's own product."""
    x = round_input(p.x) if p.round_input else p.x
    x_GNK, weight_GKM = x.to(p.weight.dtype).transpose(0, 1), p.weight.mT
    if p.out_dtype == p.weight.dtype:
        return torch.bmm(x_GNK, weight_GKM).transpose(0, 1)
    if p.x.device.type != "cuda":
        return torch.bmm(x_GNK.float(), weight_GKM.float()).to(p.out_dtype).transpose(0, 1)
    return torch.bmm(x_GNK, weight_GKM, out_dtype=p.out_dtype).transpose(0, 1)


def _out_dtype(weight: Tensor, wanted: torch.dtype | None, x: Tensor) -> torch.dtype:
    if wanted is not None:
        return wanted
    return torch.bfloat16 if weight.dtype == torch.float8_e4m3fn else weight.dtype


def problem(x_NGK: Tensor, w: LinearWeight) -> Problem:
    weight, scale = w.weight, w.scale
    if weight.dim() == 2:
        weight, scale = weight[None], None if scale is None else scale[None]
    dtype = _out_dtype(weight, w.out_dtype, x_NGK)
    return Problem(x_NGK, weight, scale, w.round_input, dtype)


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    return run(problem(x_NK.unsqueeze(1), w)).squeeze(1)


def grouped_linear(x_NGK: Tensor, w: LinearWeight) -> Tensor:
    return run(problem(x_NGK, w))


def gated_problem(x_ND: Tensor, w: ExpertWeight, limit: float) -> Problem:
    scale = None if w.scale13 is None else w.scale13[None]
    return Problem(x_ND.unsqueeze(1), w.w13[None], scale, w.round_input, x_ND.dtype, limit)


def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
    """x [N, D], w13 [2I, D], w2 [D, I] with scale13, scale2 where they are E4M3; returns [N, D].

    The hidden values are rounded to x's dtype, then like every input.
    """
    hidden = run(gated_problem(x_ND, w, limit)).squeeze(1)
    return linear(hidden, LinearWeight(w.w2, w.round_input, w.scale2))
