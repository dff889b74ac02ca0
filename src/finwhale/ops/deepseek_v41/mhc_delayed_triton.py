"""mHC with delayed mixes as Triton kernels (`MhcInput`, `MhcMixes`), for H = 4 residual streams.

The kernels are those of mhc_triton.py, in another order: a block's input needs the mixes of the
block before, and its own mixes are needed by the next block alone.

- Up to FEW_TOKENS, the input takes two launches: the post step, and the collapse with the norm. The
  mixes take two more, which can run beside the block: the GEMM with fn, and the gates, of which two
  programs per token compute pre, and post with the residual mixes.
- With more tokens, one kernel applies the post step and multiplies with fn, so that the residual
  streams are read once for both.

Bytes with bfloat16: 16 D per token for the residual streams, read and written, 4 D for the block's
output and input, and fn once, 16 M D. At 4.0 TB/s, 1, 64 and 8192 tokens of D = 5120 and M = 24
take at least 0.5, 2.1 and 210 us. The collapse reads the residual streams again, mostly from the L2
cache up to some 1000 tokens, and later for 84 us more; so does the GEMM up to FEW_TOKENS.
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
from finwhale.ops.mhc.gates_triton import one_token_gates, pick, sigmoid, sums_of_parts
from finwhale.ops.mhc.mhc_triton import (
    DEFAULT,
    MhcOptions,
    MhcPlan,
    Mixes,
    empty_mixes,
    run_block_input,
    run_gates,
    run_streams,
)
from finwhale.ops.mhc.residual_streams_triton import load_four

BLOCK_D = 1024  # columns of a program that collapses residual streams
LAUNCH_CLASSES = mhc_triton.LAUNCH_CLASSES


@triton.jit
def _gates_few_kernel(
    parts_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    D,
    eps,
    rms_eps,
    stride_t,
    stride_r,
    slots,
    ITERS: tl.constexpr,
    COMPILED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some of a token's mixes from the parts: pre, or the others."""
    token = tl.program_id(0).to(tl.int64)
    parts = parts_ptr + token * stride_t, stride_r, slots
    four = tl.arange(0, 4)
    start_next(PDL)
    if tl.program_id(1) == 1:
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
    streams_ptr, pre_ptr, out_ptr, D, stride_n, stride_h, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    wait_for_last(PDL)
    four = tl.arange(0, 4)
    pre = tl.load(pre_ptr + token * 4 + four)
    x = load_four(streams_ptr + token * stride_n + d, stride_h, d < D)
    y = pick(pre, four, 0) * x[0].to(tl.float32) + pick(pre, four, 1) * x[1].to(tl.float32)
    y += pick(pre, four, 2) * x[2].to(tl.float32) + pick(pre, four, 3) * x[3].to(tl.float32)
    tl.store(out_ptr + token * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)


def mhc_input(
    last: Pending | None,
    residual_NHD: Tensor,
    pre_NH: Tensor,
    w: MhcWeight,
    params: MhcParams,
    *,
    options: MhcOptions = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor | None]:
    check_contiguous(pre=pre_NH, norm=w.norm)
    streams, parts = residual_NHD, None
    if not MhcPlan.of(len(streams), streams.dtype, options).few:
        streams, parts = run_streams(streams, last, w.fn, options)
    elif last is not None:
        streams, _ = run_streams(streams, last, None, options)
    # The kernel reads no parts.
    given = (pre_NH,) * 3
    return run_block_input(streams, streams, w, given, "given", params, options), streams, parts


def mhc_mixes(
    streams_NHD: Tensor,
    parts: Tensor | None,
    w: MhcWeight,
    params: MhcParams,
    *,
    options: MhcOptions = DEFAULT,
) -> Mixes:
    check_contiguous(scale=w.scale, base=w.base)
    (num_tokens, _, width), mixes = streams_NHD.shape, empty_mixes(streams_NHD)
    if num_tokens == 0:
        return mixes
    if parts is not None:
        run_gates(parts, width, w, mixes, params, options)
        return mixes
    _, parts = run_streams(streams_NHD, None, w.fn, options)
    _, slots, rows = parts.shape
    _gates_few_kernel[(num_tokens, 2)](
        *(parts, w.scale, w.base, *mixes, width, params.eps, params.rms_eps),
        *(parts.stride(0), parts.stride(2), slots),
        ITERS=params.num_iters,
        COMPILED=options.inline_asm,
        ROWS=rows,
        BLOCK_S=triton.next_power_of_2(slots),
        num_warps=8,
        **launch_options(options.early_launch),
    )
    return mixes


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
