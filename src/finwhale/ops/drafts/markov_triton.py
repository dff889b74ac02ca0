"""The logits of a draft with the Markov head's correction, as one Triton kernel for few drafts.

A kernel gathers the rows of the tokens before the drafts, multiplies them by the head's weight, and
adds the logits. `row_kernel` and `tile_kernel` (linear/gemm_triton.py) compute the same products:
one or two drafts on CUDA cores, up to MAX_TILE_DRAFTS on tensor cores. Both kernels here have their
plans and their order of sums, so the bits are those of a gather, a linear layer and a sum.

With more drafts, `markov_logits` runs these three. It also does if the products are not float32, if
the plan splits K or gives a program several blocks of rows, and with `Options.invariant`.

With `early_launch`, `_rows_kernel` loads its weight before the previous kernel ends, so that kernel
must not write the weight. Everything else is read after it has ended.

The floor is the bytes of the weight and of both rows of logits. At 4.39 TB/s, a rank of two with
Flash takes 7.7 us for one draft: 33 MB of the weight and 0.5 MB of logits.

Legend: B drafts, X tokens of this rank, R width of the Markov head, V vocabulary.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.drafts.ref import corrected_logits
from finwhale.ops.launch.arguments import check_contiguous
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.launch.sizes import LaunchClasses, up_to
from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear.gemm_triton import dot_rows, load_rows, load_token
from finwhale.ops.linear.linear_triton import (
    DEFAULT,
    ROW_TOKENS,
    Options,
    RowPlan,
    TilePlan,
    linear,
    problem,
)

MAX_TILE_DRAFTS = 16
# Integers and pointers that differ between the drafts of a step: Triton must not specialise on
# them.
_kernel = triton.jit(
    do_not_specialize=["B", "stride_logits", "stride_newest"],
    do_not_specialize_on_alignment=["logits_ptr", "newest_ptr"],
)


@_kernel
def _rows_kernel(
    logits_ptr,
    newest_ptr,
    markov_ptr,
    weight_ptr,
    out_ptr,
    X,
    stride_logits,
    stride_newest,
    R: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of BLOCK_X tokens for DRAFTS drafts, with the sums of `row_kernel`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    CHUNKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    weights = load_rows(weight_ptr, row, X, R, BLOCK_R)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # All loads that depend on no other load come first.
    newest, logits, tokens = (), (), ()
    for b in tl.static_range(DRAFTS):
        at = logits_ptr + tl.cast(stride_logits, tl.int64) * b + row
        newest = newest + (tl.load(newest_ptr + b * stride_newest),)  # type: ignore[assignment]  # noqa: RUF005
        logits = logits + (tl.load(at, mask=row < X, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    for b in tl.static_range(DRAFTS):
        tokens = tokens + load_token(markov_ptr + newest[b] * R, (), R, BLOCK_R, False, False)
    for b in tl.static_range(DRAFTS):
        total = dot_rows(weights, tokens, b, CHUNKS)
        line = tl.cast(X, tl.int64) * b
        tl.store(out_ptr + line + row, logits[b] + total, mask=row < X)


@_kernel
def _tile_kernel(
    logits_ptr,
    newest_ptr,
    markov_ptr,
    weight_ptr,
    out_ptr,
    B,
    X,
    stride_logits,
    stride_newest,
    R: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of BLOCK_X tokens for up to BLOCK_B drafts, with the sums of `tile_kernel`
    for an unscaled weight.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    draft = tl.arange(0, BLOCK_B)
    is_row, is_draft = row < X, draft < B
    newest = tl.load(newest_ptr + draft * stride_newest, mask=is_draft, other=0)
    weights = weight_ptr + row.to(tl.int64)[:, None] * R
    tokens = markov_ptr + newest[:, None] * R
    total = tl.zeros([BLOCK_X, BLOCK_B], tl.float32)
    for step in tl.range((R + BLOCK_R - 1) // BLOCK_R, num_stages=STAGES):
        k = step * BLOCK_R + tl.arange(0, BLOCK_R)
        is_k = (k < R)[None, :]
        weight = tl.load(weights + k[None, :], mask=is_row[:, None] & is_k, other=0.0)
        x = tl.load(tokens + k[None, :], mask=is_draft[:, None] & is_k, other=0.0)
        x = x.to(weight.dtype)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    mask = is_draft[:, None] & is_row[None, :]
    line = draft.to(tl.int64)[:, None]
    logits = tl.load(logits_ptr + line * stride_logits + row[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + line * X + row[None, :], logits + tl.trans(total), mask=mask)


# --- Launch ---------------------------------------------------------------------------------------


LAUNCH_CLASSES = LaunchClasses(
    rows=lambda model, most: up_to(most, (1, ROW_TOKENS, MAX_TILE_DRAFTS))
)


def markov_logits(
    logits_BX: Tensor,
    newest_B: Tensor,
    markov_w1: Tensor,
    markov_w2: LinearWeight,
    *,
    options: Options = DEFAULT,
) -> Tensor:
    _check(logits_BX, newest_B, markov_w1, markov_w2)
    plan = _plan(len(newest_B), markov_w1, markov_w2, options)
    if plan is None:
        linear_layer = partial(linear, options=options)
        return corrected_logits(logits_BX, newest_B, markov_w1, markov_w2, linear_layer)
    num_drafts, num_tokens = logits_BX.shape
    out_BX = torch.empty_like(logits_BX, memory_format=torch.contiguous_format)
    tensors = logits_BX, newest_B, markov_w1, markov_w2.weight, out_BX
    strides = logits_BX.stride(0), newest_B.stride(0)
    grid = (triton.cdiv(num_tokens, plan.block_m),)
    shared = {
        "R": markov_w1.shape[1],
        "BLOCK_X": plan.block_m,
        "BLOCK_R": plan.block_k,
        "num_warps": plan.num_warps,
        **launch_options(options.early_launch),
    }
    if isinstance(plan, RowPlan):
        _rows_kernel[grid](*tensors, num_tokens, *strides, DRAFTS=num_drafts, **shared)
    else:
        sizes = num_drafts, num_tokens
        blocks = {"BLOCK_B": plan.block_n, "STAGES": plan.stages}
        _tile_kernel[grid](*tensors, *sizes, *strides, **blocks, **shared)
    return out_BX


def _plan(
    num_drafts: int, markov_w1: Tensor, markov_w2: LinearWeight, options: Options
) -> RowPlan | TilePlan | None:
    """The plan of `linear` if a kernel here has the same sums; None: it has not."""
    p = problem(markov_w1[:0, None], markov_w2, options)
    if not 0 < num_drafts <= MAX_TILE_DRAFTS or options.invariant or p.out_dtype != torch.float32:
        return None
    if num_drafts <= ROW_TOKENS:
        rows = RowPlan.of(p)
        return rows if rows.blocks == 1 else None
    tiles = TilePlan.of(p, num_drafts)
    return tiles if tiles.split == 1 else None


def _check(logits_BX: Tensor, newest_B: Tensor, markov_w1: Tensor, markov_w2: LinearWeight) -> None:
    check_contiguous(markov_w1=markov_w1, markov_w2=markov_w2.weight)
    if markov_w2.scale is not None or markov_w2.round_input:
        raise ValueError("the Markov head's weight must have no scale, and its input no rounding")
    (rows, width), shape = markov_w2.weight.shape, (len(newest_B), markov_w2.weight.shape[0])
    if markov_w1.shape[1] != width:
        raise ValueError(f"rows of {markov_w1.shape[1]} values do not fit a weight {[rows, width]}")
    if logits_BX.dtype != torch.float32 or logits_BX.shape != shape or logits_BX.stride(1) != 1:
        raise ValueError(
            f"logits must be float32 {list(shape)} with contiguous rows, got {logits_BX.dtype} "
            f"{list(logits_BX.shape)} with strides {logits_BX.stride()}"
        )
