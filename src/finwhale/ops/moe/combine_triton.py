"""Adds the outputs of each token's experts, as a Triton kernel. The package has the legend.

A program adds some columns of one token in registers, in order of k. So the kernel reads each
output once: 2 D (K + 2) bytes per token.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last

MAX_COLUMNS = 1024  # of a program


# Some rows of the ids may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _sum_kernel(
    pairs_ptr,
    ids_ptr,
    shared_ptr,
    out_ptr,
    D,
    stride_shared,
    K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add BLOCK_D columns of a token's pairs, in order of k."""
    token = tl.program_id(0).to(tl.int64)
    start_next(PDL)
    wait_for_last(PDL)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_d = d < D
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        # Load every row, though no kernel writes unused ones: the loads do not wait for the ids.
        is_used = tl.load(ids_ptr + token * K + k) >= 0
        row = tl.load(pairs_ptr + (token * K + k) * D + d, mask=is_d, other=0.0)
        total += tl.where(is_used, row, 0.0).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * stride_shared + d, mask=is_d, other=0.0)
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=is_d)


def combine(
    each_NKD: Tensor,
    ids_NK: Tensor,
    shared_ND: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    early_launch: bool = False,
) -> Tensor:
    """each bfloat16, contiguous; shared bfloat16 rows. Returns bfloat16 or float32 [N,D]."""
    num_tokens, topk, width = each_NKD.shape
    dtype = out_dtype or torch.bfloat16
    out = torch.empty((num_tokens, width), dtype=dtype, device=each_NKD.device)
    if num_tokens == 0:
        return out
    block_d = min(MAX_COLUMNS, triton.next_power_of_2(width))
    _sum_kernel[(num_tokens, triton.cdiv(width, block_d))](
        *(each_NKD, ids_NK, each_NKD if shared_ND is None else shared_ND, out, width),
        0 if shared_ND is None else shared_ND.stride(0),
        K=topk,
        HAS_SHARED=shared_ND is not None,
        BLOCK_D=block_d,
        num_warps=4,
        **launch_options(early_launch),
    )
    return out
