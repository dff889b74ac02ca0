"""The routed experts as Triton kernels for GPUs of any vendor: FP4 weights, E4M3 activations.

Legend: N tokens, K experts per token, P rows in order of the experts, E experts, D hidden, I
intermediate width.

`dispatch` orders the pairs (dispatch_triton.py). `compute` has up to four launches: round x, gate
and up, round the hidden values, down. The gate and up kernel applies the clamped SwiGLU and the
routing weights; if its tiles hold whole scale groups, it also rounds. A program computes some rows
of the weights for one block of an expert's pairs, so each block reads the expert's weights once.
Blocks without pairs return at once, so the host need not know each expert's tokens.

The kernels decode weights to bfloat16, exactly. The matrix units sum over 128 values. These sums,
times the activations' scales, are added in float32, in the same order for every N.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from finwhale.ops.launch.sizes import LaunchClasses
from finwhale.ops.linear.quantise_triton import clamped_swiglu, round_e4m3
from finwhale.ops.moe import Dispatched, ExpertWeight
from finwhale.ops.moe.dispatch_triton import OrderedPairs, order_pairs
from finwhale.ops.moe.experts_layout import GROUP, TiledExperts, check_inputs
from finwhale.ops.moe.round_rows_triton import launch_tokens_of, round_hidden, round_tokens


@triton.jit
def _decode(w, exponent_bits, ROWS: tl.constexpr):
    """Decode the 128 FP4 values of each row. Returns the first and the last 64: two [ROWS,64].

    w: uint8 [ROWS,64], two values a byte.
    exponent_bits: int32 [ROWS], a byte for each of a row's four groups.
    """
    half = tl.arange(0, 2)
    first = (exponent_bits[:, None] >> (8 * half)[None, :]) & 0xFF
    second = (exponent_bits[:, None] >> (16 + 8 * half)[None, :]) & 0xFF
    w = w.to(tl.int32)
    words = tl.permute(tl.reshape(w, [ROWS, 16, 2, 2]), (0, 1, 3, 2))
    low, high = tl.split(words)
    a = _values(tl.join(low & 7, (low >> 4) & 7), first, w >> 7, ROWS)
    b = _values(tl.join(high & 7, (high >> 4) & 7), second, w >> 3, ROWS)
    return a, b


@triton.jit
def _values(codes, exponent_bits, signs, ROWS: tl.constexpr):
    """The values of codes with the exponent bits of their groups, in bfloat16 [ROWS,64]."""
    codes = tl.reshape(codes, [ROWS, 2, 32])
    byte = tl.where(codes == 1, 8, 8 + 4 * codes) + exponent_bits[:, :, None]
    bits = tl.where(codes == 0, 0, (byte << 4) + (120 << 7))
    bits = tl.reshape(bits, [ROWS, 64]) | ((signs & 1) << 15)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _product(
    x, w, first, tile, blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):
    """w x^T [ROWS,COLUMNS] before the rows' scales: sums over 128 values, added in float32.

    The rows start at 64 * tile, the columns at the row of pair `first`.

    x: a descriptor of the values, the scales and their stride; w: a descriptor and exponent bits.
    """
    x_desc, x_scale_ptr, stride = x
    w_desc, exponent_bits_ptr = w
    row = tl.arange(0, ROWS)
    exponent_bits_ptrs = (
        exponent_bits_ptr + (tile + row // 64).to(tl.int64) * blocks * 64 + row % 64
    )
    scale_ptrs = x_scale_ptr + first + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(0, blocks, num_stages=STAGES):
        codes = tl.reshape(w_desc.load([tile, k, 0, 0]), [ROWS, 64])
        a, b = _decode(codes, tl.load(exponent_bits_ptrs + k * 64), ROWS)
        x0 = x_desc.load([first, k * 128])
        x1 = x_desc.load([first, k * 128 + 64])
        scale = tl.load(scale_ptrs + k * stride)
        part = tl.dot(a, tl.trans(x0.to(tl.bfloat16)))
        part = tl.dot(b, tl.trans(x1.to(tl.bfloat16)), part)
        total += part * scale[None, :]
    return total


@triton.jit(do_not_specialize=["stride"])
def _gate_up_kernel(
    x_desc,
    x_scale_ptr,
    order_ptr,
    blocks_ptr,
    w_desc,
    exponent_bits_ptr,
    row_scale_ptr,
    weights_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    stride,
    D,
    I,  # noqa: E741
    limit,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """hidden[pair_row] = weight * clamped SwiGLU of BLOCK_I rows of w1 and of w3, for a block of
    pairs. If BLOCK_I is a whole group, the kernel rounds the result.

    The rows of the GEMM alternate, eight of w1 and eight of w3, so that a thread holds both.
    """
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        tile = expert * (I // 32) + tl.program_id(0) * (BLOCK_I // 32)
        x, w = (x_desc, x_scale_ptr, stride), (w_desc, exponent_bits_ptr)
        total = _product(x, w, first, tile, D // 128, 2 * BLOCK_I, BLOCK_N, STAGES)
        total *= tl.load(row_scale_ptr + tile * 64 + tl.arange(0, 2 * BLOCK_I))[:, None]
        both = tl.reshape(total, [BLOCK_I // 8, 2, 8, BLOCK_N])
        gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
        hidden = clamped_swiglu(gate, up, limit)
        hidden = tl.trans(tl.reshape(hidden, [BLOCK_I, BLOCK_N]))
        pair_row = first + tl.arange(0, BLOCK_N)
        pair = tl.load(order_ptr + pair_row, mask=pair_row < end, other=0)
        hidden *= tl.load(weights_ptr + pair)[:, None]
        i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
        target = hidden_ptr + pair_row.to(tl.int64)[:, None] * I + i[None, :]
        if BLOCK_I == 128:
            values, scale = round_e4m3(hidden, 1)
            tl.store(target, values, mask=(pair_row < end)[:, None])
            scale_ptrs = hidden_scale_ptr + tl.program_id(0) * stride + pair_row
            tl.store(scale_ptrs, scale, mask=pair_row < end)
        else:
            tl.store(target, hidden.to(hidden_ptr.dtype.element_ty), mask=(pair_row < end)[:, None])


@triton.jit(do_not_specialize=["stride"])
def _down_kernel(
    hidden_desc,
    hidden_scale_ptr,
    order_ptr,
    blocks_ptr,
    w_desc,
    exponent_bits_ptr,
    row_scale_ptr,
    out_ptr,
    stride,
    D,
    I,  # noqa: E741
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[pair] = w2 hidden, BLOCK_D rows for a block of pairs."""
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        tile = expert * (D // 64) + tl.program_id(0) * (BLOCK_D // 64)
        x, w = (hidden_desc, hidden_scale_ptr, stride), (w_desc, exponent_bits_ptr)
        total = _product(x, w, first, tile, I // 128, BLOCK_D, BLOCK_N, STAGES)
        total *= tl.load(row_scale_ptr + tile * 64 + tl.arange(0, BLOCK_D))[:, None]
        pair_row = first + tl.arange(0, BLOCK_N)
        pair = tl.load(order_ptr + pair_row, mask=pair_row < end, other=0).to(tl.int64)
        total = tl.trans(total)
        d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        tl.store(
            out_ptr + pair[:, None] * D + d[None, :],
            total.to(tl.bfloat16),
            mask=(pair_row < end)[:, None],
        )


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Tile sizes of one launch.

    Attributes:
        block_rows: most (token, expert) pairs that a program computes, all of one expert.
        gate_up: rows of w1, and as many of w3, in a program; pipeline stages; warps.
        down: rows of w2 in a program; pipeline stages; warps.
    """

    block_rows: int
    gate_up: tuple[int, int, int] = (64, 3, 8)
    down: tuple[int, int, int] = (128, 3, 8)


# (largest average number of pairs per expert, plan)
PLANS = (
    (6, ExpertsPlan(16, (128, 4, 8), (64, 4, 4))),
    (20, ExpertsPlan(32, (128, 4, 8), (64, 4, 4))),
    (64, ExpertsPlan(64, (128, 3, 8), (128, 3, 8))),
    (math.inf, ExpertsPlan(128)),
)


def plan(num_pairs: int, num_experts: int) -> ExpertsPlan:
    return next(plan for most, plan in PLANS if num_pairs <= most * num_experts)


LAUNCH_CLASSES = LaunchClasses(tokens=partial(launch_tokens_of, plan))


def dispatch(ids_NK: Tensor, num_experts: int) -> OrderedPairs:
    """ids int32 or int64, contiguous."""
    block_rows = plan(ids_NK.numel(), num_experts).block_rows
    return order_pairs(ids_NK, num_experts, block_rows, early_launch=False)


def compute(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: Dispatched,
    w: ExpertWeight,
    limit: float,
    *,
    plan: Callable[[int, int], ExpertsPlan] = plan,
) -> Tensor:
    """x bfloat16 with strided rows. Returns bfloat16 [N,K,D].

    plan: tile sizes for (number of pairs, number of experts), with the block_rows of `plan` above.
    """
    assert isinstance(pairs, OrderedPairs)
    tiled = check_inputs(x_ND, weights_NK, pairs, w)
    each = torch.empty((*pairs.ids.shape, x_ND.shape[1]), dtype=torch.bfloat16, device=x_ND.device)
    if len(x_ND):
        launch(x_ND, weights_NK, pairs, tiled, limit, plan(pairs.ids.numel(), len(tiled.w2)), each)
    return each


def launch(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: OrderedPairs,
    w: TiledExperts,
    limit: float,
    plan: ExpertsPlan,
    each_NKD: Tensor,
) -> None:
    """`compute` with a given plan; `dispatch` must have used its block_rows."""
    x, x_scale = round_tokens(x_ND, pairs, early_launch=False)
    (num_rows, width), inner = x.shape, w.w2.shape[2] * 2
    block_i, stages, warps = plan.gate_up
    rounds = block_i == GROUP  # whether the tiles hold whole scale groups
    hidden_dtype = torch.float8_e4m3fn if rounds else torch.float32
    hidden = torch.empty((num_rows, inner), dtype=hidden_dtype, device=x.device)
    shape = (inner // GROUP, num_rows + plan.block_rows)
    hidden_scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    _gate_up_kernel[(inner // block_i, len(pairs.blocks))](
        TensorDescriptor.from_tensor(x, [plan.block_rows, 64]),
        *(x_scale, pairs.order, pairs.blocks),
        _tiles(w.w13, 2 * block_i),
        *w.gate_up()[1:],
        *(weights_NK, hidden, hidden_scale, x_scale.stride(0), width, inner, limit),
        BLOCK_I=block_i,
        BLOCK_N=plan.block_rows,
        STAGES=stages,
        num_warps=warps,
    )
    if not rounds:
        hidden, hidden_scale = round_hidden(hidden, pairs, early_launch=False)
    block_d, stages, warps = plan.down
    _down_kernel[(width // block_d, len(pairs.blocks))](
        TensorDescriptor.from_tensor(hidden, [plan.block_rows, 64]),
        *(hidden_scale, pairs.order, pairs.blocks),
        _tiles(w.w2, block_d),
        *w.down()[1:],
        *(each_NKD, hidden_scale.stride(0), width, inner),
        BLOCK_D=block_d,
        BLOCK_N=plan.block_rows,
        STAGES=stages,
        num_warps=warps,
    )


def _tiles(w: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of w uint8 [E,M,K/2] as [tiles,blocks,64,64], for `rows` rows at a time."""
    experts, height, row_bytes = w.shape
    tiles = w.view(experts * height // 64, row_bytes // 64, 64, 64)
    return TensorDescriptor.from_tensor(tiles, [rows // 64, 1, 64, 64])
