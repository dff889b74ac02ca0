"""A Triton kernel that rounds tokens to E4M3 into the rows of their pairs, for experts' GEMMs.

A program rounds some groups of one or several rows once, and writes them to the K pairs' rows.

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


@triton.jit(do_not_specialize=["N", "stride_scale"])
def _round_rows_kernel(
    x_ptr,
    pair_rows_ptr,
    values_ptr,
    scale_ptr,
    N,
    stride_scale,
    D,
    stride_x,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round BLOCK groups of row n of x into rows pair_rows[n K ..] of values and columns of scale.

    A program rounds ROWS rows. The kernel skips pair rows of -1. Without pair_rows_ptr, K is 1 and
    row n of x goes to row n.
    """
    # Wait first: the next kernel reads `order` and `blocks` before its own wait.
    wait_for_last(PDL)
    start_next(PDL)
    i = tl.arange(0, ROWS * BLOCK)
    token = tl.program_id(0).to(tl.int64) * ROWS + (i // BLOCK if ROWS > 1 else 0 * i)
    group = tl.program_id(1) * BLOCK + i % BLOCK
    is_group = (token < N) & (group < D // 128)
    d = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    source = x_ptr + (token * stride_x)[:, None] + d
    x = tl.load(source, mask=is_group[:, None], other=0.0).to(tl.float32)
    values, scale = round_e4m3(x, 1)
    for k in tl.static_range(K):
        target_row = token
        if pair_rows_ptr is not None:
            target = pair_rows_ptr + token * K + k
            target_row = tl.load(target, mask=is_group, other=-1).to(tl.int64)
        used = is_group & (target_row >= 0)
        tl.store(values_ptr + (target_row * D)[:, None] + d, values, mask=used[:, None])
        tl.store(scale_ptr + group * stride_scale + target_row, scale, mask=used)


# --- Launch ---------------------------------------------------------------------------------------


def _rounded_groups(num_rows: int) -> int:
    """Number of groups of 128 that a program rounds."""
    return FEW_GROUPS if num_rows <= FEW_ROWS else MANY_GROUPS


def launch_tokens_of(plan: Callable[[int, int], Any], model: ModelSizes, most: int) -> set[int]:
    """`LaunchClasses.tokens` for a plan function of pairs and experts."""

    def of_rounding(num_tokens: int, rows: int) -> object:
        return num_tokens == 1, _rounded_groups(num_tokens), _rounded_groups(rows)

    return launch_tokens_of_plan(plan, model, most, of_rounding)


def round_rows(
    x: Tensor, pairs: OrderedPairs, early_launch: bool, pair_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round rows of x to E4M3 [P,..] and float32 scales [../128,P'].

    P' exceeds P by a block, because kernels read the scales of whole blocks.

    Args:
        x: hidden values in the rows of the pairs; or the tokens, if pair_rows are those of `pairs`.
    """
    num_rows, width = x.shape
    padded = len(pairs.order)
    values = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (width // GROUP, padded + pairs.block_rows)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    most = _rounded_groups(num_rows)
    groups = min(most, triton.next_power_of_2(width // GROUP))
    rows = most // groups
    _round_rows_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, groups * GROUP))](
        *(x, pair_rows, values, scale, num_rows, scale.stride(0), width, x.stride(0)),
        K=1 if pair_rows is None else pairs.ids.shape[1],
        ROWS=rows,
        BLOCK=groups,
        num_warps=4,
        **launch_options(early_launch),
    )
    return values, scale
