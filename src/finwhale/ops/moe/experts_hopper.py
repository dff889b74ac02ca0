"""The routed experts on Hopper GPUs, with GEMMs in Gluon.

Legend: N tokens, K experts per token, P rows in order of the experts, E experts, D hidden, I
intermediate width.

For many tokens, `dispatch` orders the pairs (dispatch_triton.py). `compute` rounds x, runs the
gate and up GEMM, rounds the hidden values, and runs the down GEMM. The gate and up kernel applies
the clamped SwiGLU and the routing weights. Few tokens need no order and have their own kernels
(experts_hopper_few.py). The weights of an expert are read once per block of its pairs. Blocks
without pairs return at once, so the host need not know each expert's tokens.

experts_hopper_program.py has the programs of both GEMMs. A program loads its first weights while
the previous kernel still rounds x, because it knows the expert already. Weights go from the ring to
registers, are decoded there to E4M3 (exactly), and enter the tensor cores from registers. The
tensor cores sum over 128 values. These sums, times the activations' scales, are added in float32,
in the same order for every N.

Floors: E' (3 I D / 2 + 3 I D / 32) bytes for E' different experts take, at 4.39 TB/s, 18 us for one
token of Flash and 750 us for 128. 6 I D operations per pair take 1742 us for 8192 tokens at 1.42
PFLOP/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from finwhale.ops.launch.gluon_functions import reinterpret
from finwhale.ops.launch.sizes import NUM_MULTIPROCESSORS, LaunchClasses, ModelSizes, up_to
from finwhale.ops.moe import Dispatched, ExpertWeight, experts_hopper_few
from finwhale.ops.moe.dispatch_triton import OrderedPairs, order_pairs
from finwhale.ops.moe.experts_hopper_few import FEW_TOKENS
from finwhale.ops.moe.experts_hopper_parts import (
    WORDS,
    after,
    decode,
    down_steps,
    mma,
    release,
    weight_descriptors,
)
from finwhale.ops.moe.experts_hopper_program import (
    hidden_values,
    program_options,
    run,
    store_hidden,
    store_out,
)
from finwhale.ops.moe.experts_layout import TiledExperts, check_inputs
from finwhale.ops.moe.round_rows_triton import launch_tokens_of, round_hidden, round_tokens


@gluon.jit
def _zeros(WIDTH: gl.constexpr):
    return gl.full([64, WIDTH], 0.0, gl.float32, mma(WIDTH))


@gluon.jit
def _add_part(
    total,
    a,
    x_tile,
    scale_tile,
    FROM: gl.constexpr,
    WIDTH: gl.constexpr,
    SCALES_FIRST: gl.constexpr,
):
    """total + (a times WIDTH columns of the tile) times these columns' scales.

    SCALES_FIRST: load the scales into their own registers while the tensor cores multiply.
    """
    x = x_tile.slice(FROM, WIDTH, 0).permute((1, 0))
    scale_tile = scale_tile.slice(FROM, WIDTH, 0)
    if SCALES_FIRST:
        scale = scale_tile.load(gl.SliceLayout(0, mma(WIDTH)))
    part = warpgroup_mma(a, x, _zeros(WIDTH), use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    if not SCALES_FIRST:
        scale = scale_tile.load(gl.SliceLayout(0, mma(WIDTH)))
    return total + part * gl.expand_dims(scale, 0)


@gluon.constexpr_function
def _parts(width, groups):
    """(first, columns) of each part of a block of `width` columns. Each part is a separate MMA.

    The registers of a thread must hold one part's result and the sums of all parts.
    """
    if groups == 4 and width == 128:
        return [(0, 32), (32, 32), (64, 32), (96, 32)]
    found, first, size = [], 0, 64 if groups == 4 else 128
    while first < width:
        while size > width - first:
            size //= 2
        found.append((first, size))
        first += size
    return found


@gluon.constexpr_function
def _scales_first(width, groups, part):
    """Whether a thread has registers for a part's scales, the sums and the result."""
    return groups < 4 and (width <= 192 or part[1] <= 32)


@gluon.jit
def _multiply(
    rings,
    slot,
    phase,
    blocks,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """w x^T before the rows' scales (`row_scale`): one total per part of WIDTH columns.

    Also returns the ring's next slot and phase. The tensor cores sum over 128 values; these sums
    are added in float32.
    """
    x_ring, scale_rings, w_ring, exponent_bits_ring, full, empty = rings
    PARTS: gl.constexpr = _parts(WIDTH, GROUPS)
    operand: gl.constexpr = gl.DotOperandLayout(0, mma(PARTS[0][1]), 4)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    totals = ()
    for p in gl.static_range(len(PARTS)):
        totals += (_zeros(PARTS[p][1]),)  # type: ignore[assignment]
    for _ in range(blocks):
        mbarrier.wait(full.index(slot), phase)
        weight_slot = slot * GROUPS + GROUP
        exponent_bits = reinterpret(exponent_bits_ring.index(weight_slot), gl.int32, [64], plain)
        a = decode(w_ring.index(weight_slot), exponent_bits, operand)
        x = x_ring.index(slot)
        scale = reinterpret(scale_rings[0].index(slot), gl.float32, [max(COLUMNS, 32)], plain)
        added = ()
        for p in gl.static_range(len(PARTS)):
            # fmt: off
            total = _add_part(totals[p], a, x, scale, PARTS[p][0], PARTS[p][1],
                              _scales_first(WIDTH, GROUPS, PARTS[p]))
            # fmt: on
            added += (total,)  # type: ignore[assignment]
        totals = added
        release(empty, slot)
        slot, phase = after(slot, phase, STAGES)
    return totals, slot, phase


@gluon.jit
def _scaled(total, row_scale_ptr):
    row_scale = gl.load(row_scale_ptr + gl.arange(0, 64, gl.SliceLayout(1, total.type.layout)))
    return total * gl.expand_dims(row_scale, 1)


@gluon.jit
def _store_hidden(total, hidden, pairs, row_scale_ptr, first, end, row):
    hidden_ptr, inner, limit = hidden
    result = hidden_values(_scaled(total, row_scale_ptr), pairs, limit)
    store_hidden(result, hidden_ptr, inner, first, end, row)


@gluon.jit
def _store_out(total, out, pairs, row_scale_ptr, first, end, row):
    store_out(_scaled(total, row_scale_ptr), out, pairs, row)


@gluon.jit
def _opaque(x):
    """Return x. This keeps computations from x inside the loop, where they save registers."""
    asm: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _columns(
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
    rings, results, pairs, row_scale_ptr, first, end, row, blocks = work
    slot = 0
    phase = 0
    for t in range(TILES):
        step = t * GROUPS + GROUP
        totals, slot, phase = _multiply(
            rings, slot, phase, blocks, COLUMNS, WIDTH, STAGES, GROUPS, GROUP
        )
        tile_row_scale_ptr = row_scale_ptr + step * 64
        end = _opaque(end)
        first = _opaque(first)
        PARTS: gl.constexpr = _parts(WIDTH, GROUPS)
        for p in gl.static_range(len(PARTS)):
            # fmt: off
            STORE(totals[p], results, pairs.slice(PARTS[p][0], PARTS[p][1], 0), tile_row_scale_ptr,
                  first + PARTS[p][0], end, row + step)
            # fmt: on


@gluon.constexpr_function
def _codes(columns, groups):
    """(most pairs, columns) of the codes of a program for up to `columns` pairs, ascending."""
    steps = (64, 96, 128) if groups == 4 else (64, 128, 160, 192, 224, 256)
    *widths, last = [columns] if columns <= 64 else [width for width in steps if width <= columns]
    return [*((width, width) for width in widths), (2**31 - 1, last)]


@gluon.jit
def _row_scales(row_scale_ptr, expert, tiles, row):
    return row_scale_ptr + (expert * tiles + row) * 64


@gluon.jit
def _gate_up_kernel(
    x_desc,
    scale_desc,
    w_desc,
    exponent_bits_desc,
    order_ptr,
    blocks_ptr,
    row_scale_ptr,
    weights_ptr,
    hidden_ptr,
    D,
    I,  # noqa: E741
    limit,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """hidden[pair_row] = weight * the clamped SwiGLU of w1 x and w3 x, for a block of pairs."""
    descs = x_desc, (scale_desc,), w_desc, exponent_bits_desc
    results = hidden_ptr, I, limit
    # fmt: off
    run(descs, results, (order_ptr, weights_ptr), row_scale_ptr, blocks_ptr, I, D, 32, _row_scales,
        _columns, _codes, _store_hidden, COLUMNS, TILES, STAGES, GROUPS, REGISTERS, PDL)
    # fmt: on


@gluon.jit
def _down_kernel(
    x_desc,
    scale_desc,
    w_desc,
    exponent_bits_desc,
    order_ptr,
    blocks_ptr,
    row_scale_ptr,
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
    """out[pair] = w2 hidden for a block of pairs."""
    descs = x_desc, (scale_desc,), w_desc, exponent_bits_desc
    # fmt: off
    run(descs, (out_ptr, D), (order_ptr, None), row_scale_ptr, blocks_ptr, D, I, 64, _row_scales,
        _columns, _codes, _store_out, COLUMNS, TILES, STAGES, GROUPS, REGISTERS, PDL)
    # fmt: on


BYTES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """Tile sizes of one launch.

    Attributes:
        block_rows: pairs of one expert in a program.
        groups: groups of warps in a program.
        gate_up, down: for each GEMM, (steps of a program through the rows of weights, tiles of the
            ring). A down program takes more steps if I is short (`down_steps`).
    """

    block_rows: int
    groups: int
    gate_up: tuple[int, int]
    down: tuple[int, int]


# (largest average number of pairs per expert, plan)
PLANS = (
    (6, HopperPlan(16, 1, (1, 4), (1, 4))),
    (32, HopperPlan(32, 1, (1, 6), (1, 6))),
    (64, HopperPlan(64, 1, (1, 3), (1, 4))),
    (104, HopperPlan(128, 4, (2, 4), (2, 4))),
    (math.inf, HopperPlan(256, 2, (2, 4), (4, 4))),
)
# See `program_options`. With one group and 64 at launch, the first group gets 104, and four
# programs share a multiprocessor. With 128 at launch only two do, which takes a fifth longer for 30
# to 50 pairs per expert.
REGISTERS = {1: (80, 64), 2: (232, 168), 4: (112, 96)}


def plan(num_pairs: int, num_experts: int) -> HopperPlan:
    return next(plan for most, plan in PLANS if num_pairs <= most * num_experts)


def launch_tokens(model: ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""
    return launch_tokens_of(plan, model, most) | up_to(most, range(1, FEW_TOKENS + 1))


LAUNCH_CLASSES = LaunchClasses(tokens=launch_tokens)


def dispatch(ids_NK: Tensor, num_experts: int) -> Dispatched:
    """ids int32 or int64, contiguous. The pairs of few tokens are not ordered."""
    if 0 < len(ids_NK) <= FEW_TOKENS:
        return Dispatched(ids_NK)
    block_rows = plan(ids_NK.numel(), num_experts).block_rows
    return order_pairs(ids_NK, num_experts, block_rows, early_launch=True)


def compute(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: Dispatched,
    w: ExpertWeight,
    limit: float,
    *,
    num_multiprocessors: int = NUM_MULTIPROCESSORS,
) -> Tensor:
    """x bfloat16 with strided rows. Returns bfloat16 [N,K,D].

    num_multiprocessors: number in the GPU; the rings of few tokens depend on it.
    """
    tiled = check_inputs(x_ND, weights_NK, pairs, w)
    each = torch.empty((*pairs.ids.shape, x_ND.shape[1]), dtype=torch.bfloat16, device=x_ND.device)
    if isinstance(pairs, OrderedPairs):
        if len(x_ND):
            chosen = plan(pairs.ids.numel(), len(tiled.w2))
            launch(x_ND, weights_NK, pairs, tiled, limit, chosen, each)
    else:
        experts_hopper_few.launch(
            x_ND, weights_NK, pairs.ids, tiled, limit, each, num_multiprocessors
        )
    return each


def launch(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: OrderedPairs,
    w: TiledExperts,
    limit: float,
    plan: HopperPlan,
    each_NKD: Tensor,
) -> None:
    """`compute` of several tokens with a given plan; `dispatch` must have used its block_rows.

    The hidden values bfloat16 [P,I] of x E4M3 [P,D] are rounded to odd, so rounding them to E4M3
    next has the result of a single rounding. That holds only because the first kernel multiplies by
    the routing weight in float32.

    Both kernels read the pairs' order and blocks, and the first one the routing weights, before the
    previous kernel has ended. That is safe: the previous kernel writes none of them, and lets this
    one start only after all kernels before it have ended.
    """
    x, x_scale = round_tokens(x_ND, pairs, early_launch=True)
    width, inner = x.shape[1], w.w2.shape[2] * 2
    hidden = torch.empty((len(x), inner), dtype=torch.bfloat16, device=x_ND.device)
    w13, exponent_bits13, row_scale13 = w.gate_up()
    programs, options = _options(plan, inner // 32, plan.gate_up)
    _gate_up_kernel[(programs, len(pairs.blocks))](
        *_descriptors(x, x_scale, w13, exponent_bits13, plan.block_rows),
        *(pairs.order, pairs.blocks, row_scale13, weights_NK, hidden, width, inner, limit),
        **options,
    )
    hidden, hidden_scale = round_hidden(hidden, pairs, early_launch=True)
    w2, exponent_bits2, row_scale2 = w.down()
    cut = down_steps(plan.down[0], inner), plan.down[1]
    programs, options = _options(plan, width // 64, cut)
    _down_kernel[(programs, len(pairs.blocks))](
        *_descriptors(hidden, hidden_scale, w2, exponent_bits2, plan.block_rows),
        *(pairs.order, pairs.blocks, row_scale2, each_NKD, width, inner),
        **options,
    )


def _descriptors(
    x: Tensor, scale: Tensor, w: Tensor, exponent_bits: Tensor, columns: int
) -> tuple[TensorDescriptor, ...]:
    # Rows of x in a box: with 128 columns, 96 columns are three boxes of 32.
    height = 32 if columns == 128 else min(columns, 64)
    return (
        TensorDescriptor.from_tensor(x, [height, 128], BYTES),
        # A box has at least 32 scales, 128 bytes.
        TensorDescriptor.from_tensor(scale, [1, max(columns, 32)], WORDS),
        *weight_descriptors(w, exponent_bits),
    )


def _options(plan: HopperPlan, tiles: int, cut: tuple[int, int]) -> tuple[int, dict[str, Any]]:
    groups = math.gcd(plan.groups, tiles)
    return program_options(tiles, groups, cut, plan.block_rows, REGISTERS)
