"""DeepSeek-V4.1's routed experts on Hopper GPUs, in Gluon: FP4 weights, inputs in groups of 32.

`dispatch` orders the pairs as V4's does (ops/moe/dispatch_triton.py), and V4's `combine` adds them.
`compute` rounds x into the rows of its pairs, and has two GEMMs, whose programs are V4's
(ops/moe/experts_hopper_program.py). Weights go from the ring to registers, are decoded there to
bfloat16 (exactly, with their scales), and enter the tensor cores from registers, which sum over all
of K in float32. Gate and up applies the clamped SwiGLU and the routing weight, and rounds the
hidden values by groups of 32, so down reads them as they are. All plans add K in its order, so a
token's bits do not depend on N. One token has kernels and bits of its own (experts_row_triton.py).

Layout of the weights after `finish_experts`, in place. A tile has 64 rows: of w2, or 32 of w1 and
32 of w3, eight by eight. It is contiguous, in blocks of 64 columns (of 32, if K has no whole
blocks): the block's bytes row by row, and in the other tensor the rows' factors, one for 32
columns. Word t of a group of 32 has the codes of columns 2 t, 2 t + 1, and of those 8, 16 and 24
further, which a thread of the tensor cores wants. Their bits are where the decoder needs them. A
factor is an exponent field of bfloat16: 2^126 times the scale. So a scale is at most 2. An expert
with a larger one keeps scales relative to it, and has a factor in `expert_scale`.

Floors: 3 I D 17/32 bytes for each expert that is hit, at 4.0 TB/s, such as 7 us for one token on
one of four ranks (I 576); then 6 I D operations a pair at 790 TFLOP/s, such as 1.1 ms for 8,192
tokens there.

Legend: N tokens, K experts per token, P rows in order of the experts, E experts, D hidden, I
intermediate width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from finwhale.number_formats import E4M3_MAX
from finwhale.ops.deepseek_v41 import experts_row_triton
from finwhale.ops.deepseek_v41.expand_triton import round_columns
from finwhale.ops.deepseek_v41.experts_row_triton import decoder
from finwhale.ops.deepseek_v41.gemm_triton import DEFAULT, GROUP, ROUND_BLOCK, GemmOptions
from finwhale.ops.launch import early_launch
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.launch.gluon_functions import reinterpret
from finwhale.ops.launch.sizes import LaunchClasses
from finwhale.ops.moe import Dispatched, ExpertWeight
from finwhale.ops.moe.dispatch_triton import OrderedPairs, launch_tokens_of_plan, order_pairs
from finwhale.ops.moe.experts_hopper_parts import after, power_of_two, release
from finwhale.ops.moe.experts_hopper_program import (
    hidden_values,
    program_options,
    run,
    store_hidden,
    store_out,
)
from finwhale.ops.moe.experts_layout import check_fp4, check_rows
from finwhale.ops.rounding import MIN_AMAX

TILE = 64  # rows
AT_ONCE = 2**25  # values that `finish_experts` converts
MAX_EXPONENT = 128  # E8M0: the scale 2


# --- Weights --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts(ExpertWeight):
    """FP4 weights in the layout of this file.

    Attributes:
        expert_scale: float32 [E, 2]: factors of the results of w13 and of w2. They are 1 unless a
            weight has scales above 2.
    """

    expert_scale: Tensor


def block_columns(width: int) -> int:
    """Columns of a block of a weight [.., width]."""
    return min(64, width & -width)


def finish_experts(w: ExpertWeight) -> GroupedExperts:
    """Convert the checkpoint's layout to that of this file, in place.

    Takes w13 uint8 [E,2I,D/2], scale13 uint8 [E,2I,D/32], w2 [E,D,I/2], scale2 [E,D,I/32], all
    contiguous, D a multiple of 64 and I of 32. The shapes do not change, and every value stays
    exact. (With scales above 2, those below the expert's largest by 2^128 are raised to that.)
    """
    matrices = (w.w13, w.scale13, True), (w.w2, w.scale2, False)
    factors = [_regroup(*matrix) for matrix in matrices]
    fields = w.w13, w.w2, w.input_group, w.scale13, w.scale2, w.scale_block
    return GroupedExperts(*fields, expert_scale=torch.stack(factors, 1))


def _regroup(w: Tensor, scale: Tensor | None, paired: bool) -> Tensor:
    """Convert one matrix of each expert. Returns their factors, float32 [E]."""
    rows, row_bytes = w.shape[1:]
    scale = check_fp4(w, scale)
    if row_bytes % 16 or rows % TILE:
        raise ValueError(
            f"weights must have rows in whole tiles of {TILE} and columns in whole groups of "
            f"{GROUP}, got {tuple(w.shape)}"
        )
    if w.is_meta:
        return torch.empty(len(w), device=w.device)
    factors, columns = [], block_columns(row_bytes * 2)
    some = max(1, AT_ONCE // (rows * row_bytes * 2))
    for codes, exponents in zip(w.split(some), scale.split(some), strict=True):
        groups = _packed(codes.unflatten(-1, (-1, 16))).flatten(-2)
        codes.copy_(_blocks(groups, paired, columns // 2).view(codes.shape))
        largest = exponents.flatten(1).amax(1)
        above = (largest.clamp(min=MAX_EXPONENT) - MAX_EXPONENT)[:, None, None]
        # The exponent field of 2^126 times the scale.
        fields = (exponents.clamp(min=above) - above).clamp(max=MAX_EXPONENT) + 126
        exponents.copy_(_blocks(fields, paired, columns // GROUP).view(exponents.shape))
        factor = torch.exp2(above.flatten().float())
        factors.append(factor.masked_fill_(largest == 255, torch.nan))  # as E8M0 defines it
    return torch.cat(factors)


def _packed(group: Tensor) -> Tensor:
    """Groups of 32 codes, uint8 [..,16], in the order of `_decoded`; the same shape."""
    values = torch.stack((group & 15, group >> 4), -1).flatten(-2).to(torch.int16)
    # (eight columns, word, half of the word)
    a, b, c, d = values.unflatten(-1, (4, 4, 2)).unbind(-3)
    word = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | c & 7
    word |= (d & 6) << 12 | (d & 1) << 11 | (d & 8) << 7
    return word.flatten(-2).view(torch.uint8)


def _blocks(rows: Tensor, paired: bool, size: int) -> Tensor:
    """[E,R,X] -> [E,tiles,blocks,64,size], of w13 with eight rows of w1 and eight of w3 in turn."""
    tiles = rows.unflatten(1, (-1, TILE))
    if paired:
        halves = rows.unflatten(1, (2, -1, TILE // 16, 8))
        tiles = halves.permute(0, 2, 3, 1, 4, 5).flatten(2, 4)
    return tiles.unflatten(-1, (-1, size)).transpose(2, 3).contiguous()


# --- Kernels --------------------------------------------------------------------------------------


@triton.jit
def _round_rows_kernel(
    x_ptr,
    pair_rows_ptr,
    y_ptr,
    D,
    stride_x,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round BLOCK columns of token n into the rows pair_rows[n K ..] of y, as bfloat16."""
    # Wait first: the next kernel reads the pairs' order and blocks before its own wait.
    early_launch.wait_for_last(PDL)
    early_launch.start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    y = tl.reshape(round_columns(x[None, :], 1, BLOCK).to(tl.bfloat16), [BLOCK])
    for k in tl.static_range(K):
        row = tl.load(pair_rows_ptr + token * K + k).to(tl.int64)
        tl.store(y_ptr + row * D + d, y, mask=(d < D) & (row >= 0))


@gluon.constexpr_function
def _mma(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def _bytes_layout(columns):
    """A thread's bytes of a block of 64 rows: words of the groups, of a row and of one 8 below."""
    groups = [[0, 16]] if columns == 64 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], *groups],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns // 2],
    )


@gluon.jit
def _decoded(w_tile, factors, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """A block of 64 rows in bfloat16, as the left operand of a product with WIDTH columns.

    factors: int [64], a byte for each group of 32 columns.
    """
    # Because of pack=4, the factor occurs four times in a row.
    layout: gl.constexpr = _bytes_layout(COLUMNS)
    groups: gl.constexpr = COLUMNS // 32
    w = w_tile.load(layout)
    at = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, layout)) // 16 * 8
    field = (gl.expand_dims(factors.to(gl.int32), 1) >> gl.expand_dims(at, 0)) & 0xFF
    low, high = gl.inline_asm_elementwise(
        decoder(),
        "=&r,=&r,=&r,=&r" + ",r" * 5,
        [w, field * 0x00800080],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    both = gl.reshape(gl.join(low, high), [64, groups, 4, 2, 2, 2])
    # (row, group, word, second eight, second value, second half) -> the columns' order
    both = gl.reshape(gl.permute(both, (0, 1, 5, 3, 2, 4)), [64, COLUMNS])
    operand: gl.constexpr = gl.DotOperandLayout(0, _mma(WIDTH), 2)
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def _step(
    total,
    rings,
    slot,
    phase,
    before,
    WIDTH: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
):
    """Add the product of a load.

    With several blocks, a product runs while the next block is decoded, and the slot `before` is
    freed. With one, two products would need the same registers.
    """
    x_ring, _, w_ring, factor_ring, full, empty = rings
    loads: gl.constexpr = w_ring.shape[1] // 64
    columns: gl.constexpr = x_ring.shape[2] // loads
    each: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row: gl.constexpr = gl.SliceLayout(1, _bytes_layout(columns))
    dtype: gl.constexpr = factor_ring.dtype
    weight_slot = slot * GROUPS + GROUP
    mbarrier.wait(full.index(slot), phase)
    fields = reinterpret(
        factor_ring.index(weight_slot).slice(0, loads, 0), dtype, [loads, 1, 64], each
    )
    for j in gl.static_range(loads):
        factors = reinterpret(fields.index(j), dtype, [64], plain).load(row)
        a = _decoded(w_ring.index(weight_slot).slice(j * 64, 64, 0), factors, WIDTH, columns)
        x = x_ring.index(slot).slice(0, WIDTH, 0).slice(j * columns, columns, 1).permute((1, 0))
        if loads > 1 and not (FIRST and j == 0):
            total = warpgroup_mma_wait(0, deps=[total])
            if j == 0:
                release(empty, before)
        total = warpgroup_mma(a, x, total, use_acc=not (FIRST and j == 0), is_async=True)
    if loads == 1:
        total = warpgroup_mma_wait(0, deps=[total])
        release(empty, slot)
    return total


@gluon.jit
def _product(
    rings,
    slot,
    phase,
    steps,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """w x^T [64,WIDTH] of a group's tile; also the ring's next slot and phase."""
    total = gl.full([64, WIDTH], 0.0, gl.float32, _mma(WIDTH))
    # The first step is not a part of the loop: the assembler (ptxas) would serialise all products.
    total = _step(total, rings, slot, phase, slot, WIDTH, GROUPS, GROUP, True)
    before = slot
    slot, phase = after(slot, phase, STAGES)
    for _ in range(1, steps):
        total = _step(total, rings, slot, phase, before, WIDTH, GROUPS, GROUP, False)
        before = slot
        slot, phase = after(slot, phase, STAGES)
    if rings[2].shape[1] > 64:
        total = warpgroup_mma_wait(0, deps=[total])
        release(rings[5], before)
    return total, slot, phase


@gluon.jit
def _store_hidden(total, hidden, pairs, first, end, tile):
    """Store 32 hidden values of each pair, times its routing weight, rounded in this group.

    The rows of `total` alternate: eight of w1, then eight of w3.
    """
    hidden_ptr, inner, limit, TOP, LEAST = hidden
    # Rounding to odd first changes nothing, and moves half as many bytes between threads.
    result = hidden_values(total, pairs, limit).to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(result), axis=0), LEAST)
    scale, inverse = power_of_two(amax, TOP)
    result = (result * gl.expand_dims(inverse, 0)).to(gl.float8e4nv).to(gl.float32)
    result *= gl.expand_dims(scale, 0)
    store_hidden(result, hidden_ptr, inner, first, end, tile)


@gluon.jit
def _store_out(total, out, pairs, first, end, tile):
    store_out(total, out, pairs, tile)


@gluon.jit
def _tiles(
    work,
    STORE: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A group's tiles, times WIDTH columns."""
    rings, results, pairs, expert_scale_ptr, first, end, tile, blocks = work
    pairs = pairs.slice(0, WIDTH, 0)
    slot = 0
    phase = 0
    for t in range(TILES):
        total, slot, phase = _product(rings, slot, phase, blocks, WIDTH, STAGES, GROUPS, GROUP)
        total *= gl.load(expert_scale_ptr)
        STORE(total, results, pairs, first, end, tile + t * GROUPS + GROUP)


@gluon.constexpr_function
def _widths(columns, groups):
    """(most pairs, columns) of the codes of a program for up to `columns` pairs, ascending."""
    if columns <= 64:
        return [(2**31 - 1, columns)]
    return [(32, 32), (64, 64), (2**31 - 1, columns)]


@gluon.jit
def _expert_scale(expert_scale_ptr, expert, tiles, tile):
    return expert_scale_ptr + expert * 2


@gluon.jit
def _gate_up_kernel(
    x_desc,
    w_desc,
    factor_desc,
    order_ptr,
    blocks_ptr,
    expert_scale_ptr,
    weights_ptr,
    hidden_ptr,
    D,
    I,  # noqa: E741
    limit,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """hidden[pair_row] = the rounded weight * clamped SwiGLU of w1 x and w3 x."""
    descs = x_desc, (), w_desc, factor_desc
    results = hidden_ptr, I, limit, TOP, LEAST
    # fmt: off
    run(descs, results, (order_ptr, weights_ptr), expert_scale_ptr, blocks_ptr, I, D, 32,
        _expert_scale, _tiles, _widths, _store_hidden, COLUMNS, TILES, STAGES, GROUPS, REGISTERS,
        PDL)
    # fmt: on


@gluon.jit
def _down_kernel(
    x_desc,
    w_desc,
    factor_desc,
    order_ptr,
    blocks_ptr,
    expert_scale_ptr,
    out_ptr,
    D,
    I,  # noqa: E741
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[pair] = w2 hidden."""
    descs = x_desc, (), w_desc, factor_desc
    # fmt: off
    run(descs, (out_ptr, D), (order_ptr, None), expert_scale_ptr + 1, blocks_ptr, D, I, 64,
        _expert_scale, _tiles, _widths, _store_out, COLUMNS, TILES, STAGES, GROUPS, REGISTERS, PDL)
    # fmt: on


# --- Launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Tile sizes of one launch.

    Attributes:
        block_rows: most (token, expert) pairs that a program computes, all of one expert.
        load: most columns of a tile of the ring.
        gate_up, down: groups of warps, steps of a program through the rows of the weights, and
            tiles of the ring. The first two are upper bounds.
    """

    block_rows: int
    load: int
    gate_up: tuple[int, int, int]
    down: tuple[int, int, int]


# (largest average number of pairs per expert, plan)
PLANS = (
    (0.13, ExpertsPlan(16, 128, (1, 1, 8), (1, 2, 8))),
    (1, ExpertsPlan(16, 256, (2, 1, 4), (2, 8, 8))),
    (6, ExpertsPlan(16, 128, (1, 1, 8), (1, 4, 8))),
    (24, ExpertsPlan(32, 128, (2, 1, 6), (2, 4, 12))),
    (math.inf, ExpertsPlan(128, 64, (3, 1, 8), (4, 10, 8))),
)
# By a program's number of groups: the registers of a thread (`program_options` explains the pair).
# With up to 32 columns, a group needs fewer, and more programs share a multiprocessor.
REGISTERS = {1: (80, 128), 2: (232, 168), 3: (160, 128), 4: (112, 96)}
FEW_REGISTERS = {1: (80, 80), 2: (104, 80), 3: (96, 80), 4: (88, 80)}


def plan(num_pairs: int, num_experts: int) -> ExpertsPlan:
    return next(plan for most, plan in PLANS if num_pairs <= most * num_experts)


LAUNCH_CLASSES = LaunchClasses(
    tokens=partial(launch_tokens_of_plan, plan, others=lambda num_tokens, rows: num_tokens == 1)
)


def dispatch(ids_NK: Tensor, num_experts: int, *, options: GemmOptions = DEFAULT) -> Dispatched:
    """ids int32 or int64, contiguous. One token's pairs are not ordered."""
    if len(ids_NK) == 1:
        return Dispatched(ids_NK)
    block_rows = plan(ids_NK.numel(), num_experts).block_rows
    return order_pairs(ids_NK, num_experts, block_rows, options.early_launch)


def compute(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: Dispatched,
    w: ExpertWeight,
    limit: float,
    *,
    options: GemmOptions = DEFAULT,
) -> Tensor:
    """x bfloat16 with strided rows. Returns bfloat16 [N,K,D]."""
    if not isinstance(w, GroupedExperts) or w.input_group != GROUP:
        raise ValueError("these kernels read FP4 weights in the layout of `finish_experts`")
    check_rows(x_ND, weights_NK, pairs, w, GROUP)
    each = torch.empty((*pairs.ids.shape, x_ND.shape[1]), dtype=torch.bfloat16, device=x_ND.device)
    if not isinstance(pairs, OrderedPairs):
        assert len(x_ND) == 1
        one = x_ND, weights_NK, pairs.ids, w, w.expert_scale, limit, each
        experts_row_triton.launch(*one, options)
    elif len(x_ND):
        launch(x_ND, weights_NK, pairs, w, limit, plan(pairs.ids.numel(), len(w.w2)), each)
    return each


def launch(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: OrderedPairs,
    w: GroupedExperts,
    limit: float,
    plan: ExpertsPlan,
    each_NKD: Tensor,
) -> None:
    """`compute` with a given plan; `dispatch` must have used its block_rows."""
    (num_tokens, width), inner = x_ND.shape, w.w2.shape[2] * 2
    x = torch.empty((len(pairs.order), width), dtype=torch.bfloat16, device=x_ND.device)
    hidden = x.new_empty(len(x), inner)
    _round_rows_kernel[(num_tokens, triton.cdiv(width, ROUND_BLOCK))](
        *(x_ND, pairs.pair_rows, x, width, x_ND.stride(0)),
        K=pairs.ids.shape[1],
        BLOCK=ROUND_BLOCK,
        num_warps=4,
        **launch_options(early=True),
    )
    assert w.scale13 is not None and w.scale2 is not None
    programs, options = _options(plan.block_rows, inner // 32, plan.gate_up)
    _gate_up_kernel[(programs, len(pairs.blocks))](
        *_descriptors(x, w.w13, w.scale13, plan.block_rows, plan.load),
        *(pairs.order, pairs.blocks, w.expert_scale, weights_NK, hidden, width, inner, limit),
        TOP=E4M3_MAX,
        LEAST=MIN_AMAX,
        **options,
    )
    programs, options = _options(plan.block_rows, width // 64, plan.down)
    _down_kernel[(programs, len(pairs.blocks))](
        *_descriptors(hidden, w.w2, w.scale2, plan.block_rows, plan.load),
        *(pairs.order, pairs.blocks, w.expert_scale, each_NKD, width, inner),
        **options,
    )


def _descriptors(
    x: Tensor, w: Tensor, factors: Tensor, rows: int, load: int
) -> tuple[TensorDescriptor, ...]:
    """Of the rows of x, the weights and their factors; load: the most columns of a load."""
    columns = block_columns(x.shape[1])
    blocks = math.gcd(load // columns, x.shape[1] // columns)
    values = gl.NVMMASharedLayout(columns * 2, 16, 2)
    codes = gl.NVMMASharedLayout(32 if columns == 64 else 0, 8, 2)
    word = torch.int16 if columns == 64 else torch.uint8
    fields = factors.view(-1).view(word).view(-1, 64)
    plain = gl.NVMMASharedLayout(0, word.itemsize * 8, 2)
    return (
        TensorDescriptor.from_tensor(x, [min(rows, 32), columns * blocks], values),
        TensorDescriptor.from_tensor(w.view(-1, columns // 2), [64 * blocks, columns // 2], codes),
        TensorDescriptor.from_tensor(fields, [blocks, 64], plain),
    )


def _options(block_rows: int, tiles: int, cut: tuple[int, int, int]) -> tuple[int, dict[str, Any]]:
    """The number of programs that share an expert's tiles of rows, and the launch's options."""
    most, steps, stages = cut
    groups = next(groups for groups in range(most, 0, -1) if tiles % groups == 0)
    registers = REGISTERS if block_rows > 32 else FEW_REGISTERS
    return program_options(tiles, groups, (steps, stages), block_rows, registers)
