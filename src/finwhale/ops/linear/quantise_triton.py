"""Rounding activations to E4M3 as a Triton kernel: alone, or fused with the clamped SwiGLU.

128 values of a row share a scale: amax / 448 rounded up to a power of two, where amax is at least
1e-4. A program rounds a tile of tokens and scale groups in registers. The bits are those of
`ops/rounding.py`. Legend: N tokens, G groups of the grouped linear, K width.

Memory bandwidth is the limit: 3 bytes per value (5 with SwiGLU). The floor for 8192 rows of 4096
values is 23 us at 4.39 TB/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import ModelSizes, last_of_classes
from finwhale.ops.linear import KERNEL_GROUP

# From this many programs on, a next kernel that starts early only takes resources from this one.
EARLY_PROGRAMS = 256
GROUPS_PER_PROGRAM = 32
SCALE_ALIGNMENT = 4  # float32 values in 16 bytes, the alignment of a bulk copy of scales


@triton.jit
def round_e4m3(x, AXIS: tl.constexpr):
    """(E4M3 values x / scale, scale) of float32 x, with one power-of-two scale along the axis."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=AXIS), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return (x * tl.expand_dims(inverse, AXIS)).to(tl.float8e4nv), bits.to(tl.float32, bitcast=True)


@triton.jit
def clamped_swiglu(gate, up, limit):
    gate = tl.minimum(gate, limit)
    return gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def _quantise_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    N,
    K,
    stride_xn,
    stride_xg,
    stride_sn,
    stride_sk,
    limit,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    DEQUANTISE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y [N, G, K] from x; a program has BLOCK_N tokens and GROUPS groups of 128 values.

    GATED: round the SwiGLU of x's halves. DEQUANTISE: write the rounded values, without scales.
    """
    start_next(PDL)
    wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.program_id(2)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = (token < N)[:, None, None] & (k < K)[None]
    source = x_ptr + token[:, None, None] * stride_xn + g * stride_xg + k[None]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + K, mask=mask, other=0.0).to(tl.float32)
        x = clamped_swiglu(x, up, limit).to(x_ptr.dtype.element_ty).to(tl.float32)
    y, scale = round_e4m3(x, 2)
    target = y_ptr + (token[:, None, None] * G + g) * K + k[None]
    if DEQUANTISE:
        y = y.to(tl.float32) * scale[:, :, None]
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(target, y, mask=mask)
        scale_group = g * tl.cdiv(K, 128) + group
        where = token[:, None] * stride_sn + scale_group[None, :] * stride_sk
        tl.store(scale_ptr + where, scale, mask=(token < N)[:, None] & (group * 128 < K)[None])


def _launch(
    x_NGK: Tensor,
    y: Tensor,
    scale: Tensor,
    limit: float | None,
    *,
    early_launch: bool,
    dequantise: bool = False,
) -> None:
    num_tokens, num_groups, _ = x_NGK.shape
    width = y.shape[2]
    if x_NGK.stride(2) != 1:
        raise ValueError(f"a row's values must be contiguous, got strides {x_NGK.stride()}")
    if num_tokens == 0:
        return
    total = triton.cdiv(width, KERNEL_GROUP)
    assert dequantise or num_groups == 1 or scale.stride(1) == total * scale.stride(2)
    groups, block_n, grid, few = _programs(num_tokens, num_groups, total)
    _quantise_kernel[grid](
        *(x_NGK, y, scale, num_tokens, width, x_NGK.stride(0), x_NGK.stride(1)),
        *(scale.stride(0), scale.stride(2)),
        0.0 if limit is None else limit,
        G=num_groups,
        GROUPS=groups,
        GATED=limit is not None,
        DEQUANTISE=dequantise,
        BLOCK_N=block_n,
        num_warps=max(1, min(8, groups * block_n // 4)),
        **launch_options(early_launch and few),
    )


def _programs(
    num_tokens: int, num_groups: int, total: int
) -> tuple[int, int, tuple[int, int, int], bool]:
    """(groups of 128 values per program, tokens per program, grid, whether the grid is small)."""
    groups = min(GROUPS_PER_PROGRAM, triton.next_power_of_2(total))
    block_n = max(1, 8 // groups) if num_tokens >= 8 else 1
    grid = (triton.cdiv(num_tokens, block_n), triton.cdiv(total, groups), num_groups)
    return groups, block_n, grid, grid[0] * grid[1] * grid[2] < EARLY_PROGRAMS


def launch_tokens(model: ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""
    found: set[int] = set()
    for per_token, num_groups, width in model.linears:
        total = triton.cdiv(width, KERNEL_GROUP)

        def tile(n: int, sizes: tuple[int, int, int] = (per_token, num_groups, total)) -> object:
            groups, block_n, _, few = _programs(n * sizes[0], *sizes[1:])
            return groups, block_n, few

        # The smallest grid has one program per token.
        found |= last_of_classes(tile, min(most, 8 * EARLY_PROGRAMS))
    return found


def empty_quantised(
    num_tokens: int, num_groups: int, width: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Allocate E4M3 [N, G, K] and float32 scales [N, G, ceil(K/128)] in `quantise`'s layout."""
    shape = (num_tokens, num_groups, width)
    y = torch.empty(shape, dtype=torch.float8_e4m3fn, device=like.device)
    total = triton.cdiv(width, KERNEL_GROUP)
    shape = (num_groups, total, triton.cdiv(num_tokens, SCALE_ALIGNMENT) * SCALE_ALIGNMENT)
    scales = torch.empty(shape, dtype=torch.float32, device=like.device)
    return y, scales.permute(2, 0, 1)[:num_tokens]


def quantise(
    x_NK: Tensor, num_rows: int | None = None, *, early_launch: bool = False
) -> tuple[Tensor, Tensor]:
    """x [N, K] or [N, G, K] -> (E4M3 of the same shape, float32 scales [.., ceil(K/128)]).

    The scales of all tokens for one group are contiguous and start at a multiple of 16 bytes, which
    is DeepGEMM's layout. With `num_rows` (at least N), the results have that many rows; rows past N
    are not written.
    """
    x_NGK = x_NK.unsqueeze(1) if x_NK.dim() == 2 else x_NK
    y, scale = empty_quantised(num_rows or x_NGK.shape[0], x_NGK.shape[1], x_NGK.shape[2], x_NK)
    _launch(x_NGK, y, scale, None, early_launch=early_launch)
    return (y.squeeze(1), scale.squeeze(1)) if x_NK.dim() == 2 else (y, scale)


def swiglu_quantise(
    gate_up: Tensor, limit: float, *, early_launch: bool = False
) -> tuple[Tensor, Tensor]:
    """gate_up [N, 2I] -> (E4M3 [N, I], scales [N, ceil(I/128)] in `quantise`'s layout).

    silu(min(gate, limit)) * clamp(up, -limit, limit) is rounded to gate_up's dtype, then to E4M3.
    """
    num_tokens, double = gate_up.shape
    y, scale = empty_quantised(num_tokens, 1, double // 2, gate_up)
    _launch(gate_up.unsqueeze(1), y, scale, limit, early_launch=early_launch)
    return y.squeeze(1), scale.squeeze(1)


def round_input(x_NK: Tensor, *, early_launch: bool = False) -> Tensor:
    """Round x [N, K] or [N, G, K] to E4M3 by groups; returns x's dtype (exact in bfloat16)."""
    x_NGK = x_NK.unsqueeze(1) if x_NK.dim() == 2 else x_NK
    y = torch.empty(x_NGK.shape, dtype=x_NK.dtype, device=x_NK.device)
    _launch(x_NGK, y, y, None, early_launch=early_launch, dequantise=True)
    return y.view(x_NK.shape)
