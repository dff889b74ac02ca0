"""mHC with delayed mixes as Triton kernels (`MhcPreDelayed`), for H = 4 residual streams.

The first pass is that of mhc_triton.py: it multiplies the residual streams with fn, after a pending
post step or without one. The second pass computes the block's own mixes from the first one's
results, and the block's input from the mixes of the block before. Up to FEW_TOKENS, three programs
per token do this at the same time: the input, pre, and post with the residual mixes. With more
tokens, it has the two kernels of mhc_triton.py. So a block takes two launches up to FEW_TOKENS.

Bytes with bfloat16: 16 D per token for the residual streams, read and written, 4 D for the block's
output and input, and fn once, 16 M D. At 4.0 TB/s, 1, 64 and 8192 tokens of D = 5120 and M = 24
take at least 0.5, 2.1 and 210 us; the second pass reads the residual streams again, mostly from the
L2 cache up to some 1000 tokens, and later for 84 us more.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.deepseek_v41 import Pending
from finwhale.ops.launch import check_contiguous
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.mhc import MhcParams, MhcWeight, mhc_triton
from finwhale.ops.mhc.gates_triton import (
    block_input_kernel,
    gates_kernel,
    one_token_gates,
    pick,
    sigmoid,
    sums_of_parts,
)
from finwhale.ops.mhc.mhc_triton import DEFAULT, MhcOptions, MhcPlan, run_streams
from finwhale.ops.mhc.residual_streams_triton import load_four

BLOCK_D = 1024  # columns of a program that collapses residual streams
LAUNCH_CLASSES = mhc_triton.LAUNCH_CLASSES
Delayed = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _collapsed(source, stride_h, pre_ptr, mask):
    four = tl.arange(0, 4)
    pre = tl.load(pre_ptr + four)
    x = load_four(source, stride_h, mask)
    y = pick(pre, four, 0) * x[0].to(tl.float32) + pick(pre, four, 1) * x[1].to(tl.float32)
    return y + pick(pre, four, 2) * x[2].to(tl.float32) + pick(pre, four, 3) * x[3].to(tl.float32)


@triton.jit
def _delayed_input_kernel(
    streams_ptr,
    given_ptr,
    parts_ptr,
    scale_ptr,
    base_ptr,
    norm_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    y_ptr,
    D,
    stride_n,
    stride_h,
    eps,
    rms_eps,
    stride_t,
    stride_r,
    slots,
    ITERS: tl.constexpr,
    COMPILED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a token's input from the given mixes, or some of its own mixes from the parts."""
    token = tl.program_id(0).to(tl.int64)
    parts = parts_ptr + token * stride_t, stride_r, slots
    four = tl.arange(0, 4)
    start_next(PDL)
    if tl.program_id(1) == 0:
        d = tl.arange(0, BLOCK_D)
        mask = d < D
        norm = tl.load(norm_ptr + d, mask=mask, other=0.0)
        wait_for_last(PDL)
        y = _collapsed(streams_ptr + token * stride_n + d, stride_h, given_ptr + token * 4, mask)
        y = y * tl.rsqrt(tl.sum(y * y) / D + rms_eps) * norm
        tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)
    elif tl.program_id(1) == 1:
        weights, outputs = (scale_ptr, base_ptr), (post_ptr + token * 4, res_ptr + token * 16)
        # fmt: off
        one_token_gates(parts, weights, outputs, D, eps, rms_eps, ITERS, COMPILED, BLOCK_S, ROWS,
                         PDL)
        # fmt: on
    else:
        scale, base = tl.load(scale_ptr + four), tl.load(base_ptr + four)
        wait_for_last(PDL)
        pre = tl.sum(sums_of_parts(parts, 0, four, BLOCK_S, ROWS), axis=0)
        squares = sums_of_parts(parts, 24, tl.arange(0, 1), BLOCK_S, ROWS)
        rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (4 * D) + rms_eps)
        tl.store(pre_ptr + token * 4 + four, sigmoid(pre * rstd * scale + base) + eps)


@triton.jit
def _collapse_kernel(
    streams_ptr,
    pre_ptr,
    out_ptr,
    D,
    stride_n,
    stride_h,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    wait_for_last(PDL)
    y = _collapsed(streams_ptr + token * stride_n + d, stride_h, pre_ptr + token * 4, d < D)
    tl.store(out_ptr + token * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)


def _second_pass(
    streams_NHD: Tensor,
    parts: Tensor,
    given_NH: Tensor,
    w: MhcWeight,
    params: MhcParams,
    options: MhcOptions,
) -> Delayed:
    (num_tokens, H, D), device = streams_NHD.shape, streams_NHD.device
    check_contiguous(pre=given_NH, scale=w.scale, base=w.base, norm=w.norm)
    y_ND = torch.empty((num_tokens, D), dtype=streams_NHD.dtype, device=device)
    shapes = (num_tokens, H), (num_tokens, H), (num_tokens, H, H)
    pre, post, res = (torch.empty(s, dtype=torch.float32, device=device) for s in shapes)
    if num_tokens == 0:
        return y_ND, post, res, pre
    few = MhcPlan.of(num_tokens, streams_NHD.dtype, options).few
    _, slots, rows = parts.shape
    block_d = triton.next_power_of_2(D)
    mixes = parts, w.scale, w.base
    strides = streams_NHD.stride(0), streams_NHD.stride(1)
    layout = parts.stride(0), parts.stride(2), slots
    constants = {
        "ITERS": params.num_iters,
        "COMPILED": options.inline_asm,
        "ROWS": rows,
        "BLOCK_S": triton.next_power_of_2(slots),
        "BLOCK_D": block_d,
        "num_warps": min(16, max(1, block_d // (1024 if few else 512))),
    }
    if few:
        _delayed_input_kernel[(num_tokens, 3)](
            *(streams_NHD, given_NH, *mixes, w.norm, pre, post, res, y_ND),
            *(D, *strides, params.eps, params.rms_eps, *layout),
            **constants,
            **launch_options(options.early_launch),
        )
        return y_ND, post, res, pre
    gates_kernel[(triton.cdiv(num_tokens, 32),)](
        *(*mixes, pre, post, res, num_tokens, D, params.eps, params.rms_eps),
        ITERS=params.num_iters,
        COMPILED=options.inline_asm,
        SLOTS=slots,
        ROWS=rows,
        BLOCK_N=32,
        num_warps=1,
    )
    block_input_kernel[(num_tokens, 1)](
        *(streams_NHD, parts, given_NH, w.scale, w.base, w.norm, post, res, y_ND),
        *(D, *strides, params.eps, params.rms_eps, *layout),
        KIND="given",
        **constants,
        **launch_options(False),
    )
    return y_ND, post, res, pre


def mhc_pre_delayed(
    last: Pending | None,
    residual_NHD: Tensor,
    pre_NH: Tensor,
    w: MhcWeight,
    params: MhcParams,
    *,
    options: MhcOptions = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    streams, parts = run_streams(residual_NHD, last, w.fn, options)
    return *_second_pass(streams, parts, pre_NH, w, params, options), streams


def collapse(streams_NHD: Tensor, pre_NH: Tensor, *, early_launch: bool = False) -> Tensor:
    """sum_i pre_i X_i: [N,D] in the residual streams' dtype; 10 D bytes per token with bfloat16."""
    num_tokens, H, D = streams_NHD.shape
    if H != mhc_triton.NUM_STREAMS or streams_NHD.stride(2) != 1:
        raise ValueError(f"needs 4 residual streams, got strides {streams_NHD.stride()}, {H}")
    check_contiguous(pre=pre_NH)
    out_ND = torch.empty((num_tokens, D), dtype=streams_NHD.dtype, device=streams_NHD.device)
    if num_tokens:
        _collapse_kernel[(num_tokens, triton.cdiv(D, BLOCK_D))](
            *(streams_NHD, pre_NH, out_ND, D, streams_NHD.stride(0), streams_NHD.stride(1)),
            BLOCK_D=BLOCK_D,
            num_warps=4,
            **launch_options(early_launch),
        )
    return out_ND
