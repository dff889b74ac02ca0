"""A Triton kernel that rounds tokens to E4M3 into the rows of their pairs, for experts' GEMMs.

A program rounds some groups of one token once, and writes them to the K rows of the token's pairs.

Legend: N tokens, K experts per token, P rows in order of the experts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.linear.quantise_triton import round_e4m3
from finwhale.ops.moe.dispatch_triton import OrderedPairs, launch_tokens_of_plan
from finwhale.ops.moe.experts_layout import GROUP

# Up to this number of rows, a program rounds fewer groups. Flash's hidden values have 16 groups.
FEW_ROWS = 256
FEW_GROUPS, MANY_GROUPS = 8, 16


@triton.jit(do_not_specialize=["stride_scale"])
def _round_rows_kernel(
    x_ptr,
    pair_rows_ptr,
    values_ptr,
    scale_ptr,
    stride_scale,
    D,
    stride_x,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round BLOCK groups of row n of x into rows pair_rows[n K ..] of values and columns of scale.

    The kernel skips rows of -1. Without pair_rows_ptr, K is 1 and row n of x goes to row n.
    """
    # Wait first: the next kernel reads `order` and `blocks` before its own wait.
    wait_for_last(PDL)
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_group = group < D // 128
    d = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + token * stride_x + d, mask=is_group[:, None], other=0.0).to(tl.float32)
    values, scale = round_e4m3(x, 1)
    for k in tl.static_range(K):
        target_row = token
        if pair_rows_ptr is not None:
            target_row = tl.load(pair_rows_ptr + token * K + k).to(tl.int64)
        used = is_group & (target_row >= 0)
        tl.store(values_ptr + target_row * D + d, values, mask=used[:, None])
        tl.store(scale_ptr + group * stride_scale + target_row, scale, mask=used)


def round_tokens(x_ND: Tensor, pairs: OrderedPairs, early_launch: bool) -> tuple[Tensor, Tensor]:
    """Round each token into the rows of its pairs: E4M3 [P,D] and float32 scales [D/128,P'].

    P' exceeds P by a block, because kernels read the scales of whole blocks.
    """
    return _round_rows(x_ND, pairs.pair_rows, pairs.ids.shape[1], pairs, early_launch)


def round_hidden(
    hidden_PI: Tensor, pairs: OrderedPairs, early_launch: bool
) -> tuple[Tensor, Tensor]:
    """Round hidden values in the rows of the pairs: E4M3 [P,I] and scales [I/128,P']."""
    return _round_rows(hidden_PI, None, 1, pairs, early_launch)


def _rounded_groups(num_rows: int) -> int:
    """Number of groups of 128 that a program rounds."""
    return FEW_GROUPS if num_rows <= FEW_ROWS else MANY_GROUPS


def launch_tokens_of(plan: Callable[[int, int], Any], model: ModelSizes, most: int) -> set[int]:
    """`LaunchClasses.tokens` for a plan function of pairs and experts."""

    def of_rounding(num_tokens: int, rows: int) -> object:
        return num_tokens == 1, _rounded_groups(num_tokens), _rounded_groups(rows)

    return launch_tokens_of_plan(plan, model, most, of_rounding)


def _round_rows(
    x: Tensor, pair_rows: Tensor | None, topk: int, pairs: OrderedPairs, early_launch: bool
) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    padded = len(pairs.order)
    values = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (width // GROUP, padded + pairs.block_rows)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    groups = _rounded_groups(num_rows)
    _round_rows_kernel[(num_rows, triton.cdiv(width, groups * GROUP))](
        *(x, pair_rows, values, scale, scale.stride(0), width, x.stride(0)),
        K=topk,
        BLOCK=groups,
        num_warps=4,
        **launch_options(early_launch),
    )
    return values, scale
