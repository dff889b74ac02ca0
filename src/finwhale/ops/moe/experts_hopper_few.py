"""The routed experts of one to FEW_TOKENS tokens on Hopper GPUs, in Gluon: each pair on its own.

Read experts_hopper.py first. Here a program computes tiles of one pair and rounds the token's row
itself while its first weights arrive, so no launches are needed to order and round. The row is row
0 of tiles of eight rows in shared memory; the results of the other seven rows are ignored. The bits
are those of experts_hopper.py. If several tokens have the same expert, its weights are read for
each of them; few tokens seldom do.

One launch computes gate and up, and one down. A program is one group of four warps, without a warp
of its own for the loads. So it has few registers and little shared memory: it holds only a part of
its row at a time, and up to five programs share a multiprocessor. Its loads go to a ring. Each
brings up to four blocks of 128 columns. When all warps have read a load, the next one is requested
in its place. With REGISTERS registers, the assembler (ptxas) overlaps two products but serialises
four, so at most two are under way.

Every multiprocessor should run the same number of programs, because the slowest sets the time. The
GPU does not balance them: with room for five programs on each, it may give five to some and two to
others. So the length of the ring follows from the number of programs (`_loads`): longer rings leave
room for fewer programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from finwhale.number_formats import E4M3_MAX
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.launch.gluon_functions import async_load, reinterpret, start_next, wait_for_last
from finwhale.ops.launch.streamed_loads import stream_tma_loads
from finwhale.ops.moe.experts_hopper_parts import (
    after,
    decode,
    mma,
    power_of_two,
    ring,
    swiglu,
    weight_descriptors,
)
from finwhale.ops.moe.experts_layout import TiledExperts
from finwhale.ops.rounding import MIN_AMAX

# With more tokens, ordering the pairs by expert costs less than reading weights again.
FEW_TOKENS = 8
MOST_LOAD = 4  # blocks of weights of one load
# With several tokens, a program of the down GEMM has tiles of up to this many blocks, or one tile.
BLOCKS_OF_DOWN = 8
REGISTERS = 96  # per thread; five programs share a multiprocessor
# The length of the ring, in loads of MOST_LOAD blocks, by the number of programs that then fit a
# multiprocessor.
LOADS = {2: 4, 3: 3, 5: 2}
# Synchronises the threads of a group of warps. Triton 3.7 renamed the function.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def _columns():
    """The fewest columns of a GEMM. A function, because shared functions read no constants."""
    return 8


@gluon.constexpr_function
def _most_held():
    """The blocks of its row that a program holds at most, and has room for."""
    return 8


@gluon.jit
def _part_of_row(x_ptr, BLOCKS: gl.constexpr):
    """BLOCKS blocks of 128 values, in the layout in which they are rounded."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, layout))
    i = gl.arange(0, 128, gl.SliceLayout(0, layout))
    return gl.load(x_ptr + gl.expand_dims(block * 128, 1) + gl.expand_dims(i, 0))


@gluon.jit
def _round_part(values, row, TOP: gl.constexpr, LEAST: gl.constexpr):
    """Round blocks of 128 values into row 0 of their tiles, with one scale per block."""
    tiles, scales = row
    blocks: gl.constexpr = values.shape[0]
    layout: gl.constexpr = values.type.layout
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first_rows = reinterpret(tiles, gl.float8e4nv, [blocks, _columns() * 128], plain)
    columns = reinterpret(scales, gl.float32, [blocks, _columns()], plain)
    values = values.to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(values), axis=1), LEAST)
    scale, inverse = power_of_two(amax, TOP)
    first_rows.slice(0, 128, 1).store((values * gl.expand_dims(inverse, 1)).to(gl.float8e4nv))
    columns.store(gl.expand_dims(scale, 1) + gl.full([blocks, _columns()], 0.0, gl.float32, layout))
    fence_async_shared()


@gluon.jit
def _request(weights, rings, n, slot, LOAD: gl.constexpr):
    """Start the n-th load of the program. After the program's last load, do nothing.

    weights: the descriptors, the program's first block, and its number of blocks.
    """
    w_desc, exponent_bits_desc, first, count = weights
    w_ring, exponent_bits_ring, full = rings
    ready = full.index(slot)
    at = first + n * LOAD
    more = n * LOAD < count
    mbarrier.expect(ready, LOAD * (64 * 64 + 64 * 4), pred=more)
    async_load(w_desc, [at * 64, 0], ready, w_ring.index(slot), pred=more)
    async_load(exponent_bits_desc, [at, 0], ready, exponent_bits_ring.index(slot), pred=more)


@gluon.jit
def _start_product(rings, slot, j: gl.constexpr, x, k):
    """Start the product [64,8] of block j of a load and block k of the row."""
    w_ring, exponent_bits_ring, _ = rings
    operand: gl.constexpr = gl.DotOperandLayout(0, mma(_columns()), 4)
    each: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    load: gl.constexpr = exponent_bits_ring.shape[1]
    exponent_bits = reinterpret(
        exponent_bits_ring.index(slot), gl.int32, [load, 1, 64], each
    ).index(j)
    exponent_bits = reinterpret(exponent_bits, gl.int32, [64], plain)
    a = decode(w_ring.index(slot).slice(j * 64, 64, 0), exponent_bits, operand)
    zero = gl.full([64, _columns()], 0.0, gl.float32, mma(_columns()))
    return warpgroup_mma(a, x.index(k).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scaled(product, scales, k):
    """A product times the factor of block k of the row."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale = reinterpret(scales.index(k), gl.float32, [_columns()], plain)
    return product * gl.expand_dims(scale.load(gl.SliceLayout(0, mma(_columns()))), 0)


@gluon.jit
def _multiply(total, rings, slot, row, k, LOAD: gl.constexpr):
    """total + the products of a load and the row's blocks from k on, added in their order."""
    x, scales = row
    if LOAD == 1:
        a = warpgroup_mma_wait(0, deps=[_start_product(rings, slot, 0, x, k)])
        total += _scaled(a, scales, k)
    elif LOAD == 2:
        a = _start_product(rings, slot, 0, x, k)
        b = _start_product(rings, slot, 1, x, k + 1)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        total += _scaled(a, scales, k)
        total += _scaled(b, scales, k + 1)
    else:
        gl.static_assert(LOAD == 4)
        a = _start_product(rings, slot, 0, x, k)
        b = _start_product(rings, slot, 1, x, k + 1)
        # With 96 registers the compiler would let each of four products wait for the one before.
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        c = _start_product(rings, slot, 2, x, k + 2)
        d = _start_product(rings, slot, 3, x, k + 3)
        total += _scaled(a, scales, k)
        total += _scaled(b, scales, k + 1)
        c, d = warpgroup_mma_wait(0, deps=[c, d])
        total += _scaled(c, scales, k + 2)
        total += _scaled(d, scales, k + 3)
    return total


@gluon.jit
def _start(weights, STAGES: gl.constexpr, LOAD: gl.constexpr):
    """Allocate a program's ring and the part of its row that it holds, and start its first loads.

    There is always room for `_most_held` blocks of the row. So the shared memory of a program
    depends on its ring alone, as LOADS says.
    """
    w_desc, exponent_bits_desc, _, _ = weights
    bytes_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8, rank=2
    )
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x = gl.allocate_shared_memory(gl.float8e4nv, [_most_held(), _columns(), 128], bytes_layout)
    scales = gl.allocate_shared_memory(gl.float32, [_most_held(), 1, _columns()], words)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    _barrier()
    rings = ring(w_desc, STAGES, 64 * LOAD), ring(exponent_bits_desc, STAGES, LOAD), full
    for slot in gl.static_range(STAGES):
        _request(weights, rings, slot, slot, LOAD)
    return rings, (x, scales)


@gluon.jit
def _tiles(
    weights,
    rings,
    row,
    x_ptr,
    row_scale_ptr,
    row_scale,
    result,
    TILES: gl.constexpr,
    STORE: gl.constexpr,
    BLOCKS: gl.constexpr,
    HELD: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
):
    """Compute adjacent tiles.

    row_scale: of the first tile's rows, requested before the program's row was complete.
    HELD: blocks of the row that the program holds at a time.
    """
    _, _, full = rings
    n = 0
    slot = 0
    phase = 0
    values = _part_of_row(x_ptr, HELD)
    for i in range(TILES):
        next_row_scale = _row_scales(row_scale_ptr, gl.minimum(i + 1, TILES - 1))
        total = gl.full([64, _columns()], 0.0, gl.float32, mma(_columns()))
        for part in range(BLOCKS // HELD):
            if HELD < BLOCKS or i == 0:
                _round_part(values, row, TOP, LEAST)
            if HELD < BLOCKS:
                values = _part_of_row(x_ptr + (part + 1) % (BLOCKS // HELD) * (HELD * 128), HELD)
            for k in range(0, HELD, LOAD):
                mbarrier.wait(full.index(slot), phase)
                total = _multiply(total, rings, slot, row, k, LOAD)
                _barrier()
                _request(weights, rings, n + STAGES, slot, LOAD)
                n += 1
                slot, phase = after(slot, phase, STAGES)
        STORE(total * gl.expand_dims(row_scale, 1), result, i)
        row_scale = next_row_scale


@gluon.jit
def _row_scales(row_scale_ptr, tile):
    """The scales [64] of a tile's rows."""
    return gl.load(row_scale_ptr + tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, mma(_columns()))))


@gluon.jit
def _store_hidden(total, hidden, i):
    """Store 32 values of I, the i-th of a program, times the routing weight."""
    hidden_ptr, weight, limit = hidden
    _store_first(hidden_ptr + i * 32, swiglu(total, limit) * weight)


@gluon.jit
def _store_out(total, out_ptr, i):
    """Store 64 values of D, the i-th of a program."""
    _store_first(out_ptr + i * 64, total.to(gl.bfloat16))


@gluon.jit
def _store_first(ptr, x):
    """Store the first column, which belongs to the token."""
    layout: gl.constexpr = x.type.layout
    row = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, _columns(), gl.SliceLayout(0, layout)), 0)
    gl.store(ptr + row + 0 * column, x, mask=(column == 0) & (row >= 0))


@gluon.jit
def _few_gate_up_kernel(
    x_ptr,
    stride_x,
    ids_ptr,
    w_desc,
    exponent_bits_desc,
    row_scale_ptr,
    weights_ptr,
    hidden_ptr,
    limit,
    TOPK: gl.constexpr,
    BLOCKS: gl.constexpr,
    HELD: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
    PDL: gl.constexpr,
):
    """hidden[pair] = weight * the clamped SwiGLU of w1 x and w3 x, [NK,I]; TOPK pairs a token."""
    stream_tma_loads()
    # Wait first: the next kernel reads `ids` before its own wait.
    wait_for_last(PDL)
    start_next(PDL)
    pair = gl.program_id(1)
    expert = gl.load(ids_ptr + pair).to(gl.int32)
    x_ptr += pair // TOPK * stride_x
    hidden_ptr += (pair * gl.num_programs(0) + gl.program_id(0)) * 32
    if expert >= 0:
        tile = expert * gl.num_programs(0) + gl.program_id(0)
        weights = w_desc, exponent_bits_desc, tile * BLOCKS, BLOCKS
        rings, row = _start(weights, STAGES, LOAD)
        row_scale = _row_scales(row_scale_ptr, tile)
        result = hidden_ptr, gl.load(weights_ptr + pair), limit
        # fmt: off
        _tiles(weights, rings, row, x_ptr, row_scale_ptr, row_scale, result, 1, _store_hidden,
               BLOCKS, HELD, STAGES, LOAD, TOP, LEAST)
        # fmt: on


@gluon.jit
def _few_down_kernel(
    hidden_ptr,
    ids_ptr,
    w_desc,
    exponent_bits_desc,
    row_scale_ptr,
    out_ptr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    HELD: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[pair] = w2 hidden. The kernel loads w2 and ids before the previous kernel has ended.

    TILES: adjacent tiles of 64 rows that a program computes.
    """
    stream_tma_loads()
    start_next(PDL)
    pair = gl.program_id(1)
    expert = gl.load(ids_ptr + pair, cache_modifier=".cg").to(gl.int32)
    hidden_ptr += pair * (BLOCKS * 128)
    out_ptr += (pair * gl.num_programs(0) + gl.program_id(0)) * (64 * TILES)
    if expert >= 0:
        tile = (expert * gl.num_programs(0) + gl.program_id(0)) * TILES
        weights = w_desc, exponent_bits_desc, tile * BLOCKS, TILES * BLOCKS
        rings, row = _start(weights, STAGES, LOAD)
        row_scale_ptr += tile * 64
        row_scale = _row_scales(row_scale_ptr, 0)
        wait_for_last(PDL)
        # fmt: off
        _tiles(weights, rings, row, hidden_ptr, row_scale_ptr, row_scale, out_ptr, TILES,
               _store_out, BLOCKS, HELD, STAGES, LOAD, TOP, LEAST)
        # fmt: on
    else:
        wait_for_last(PDL)


# Options of every launch.
COMMON: dict[str, Any] = {
    "TOP": E4M3_MAX,
    "LEAST": MIN_AMAX,
    "num_warps": 4,
    "maxnreg": REGISTERS,
    **launch_options(early=True),
}


def _loads(programs: int, num_multiprocessors: int) -> int:
    """The length of the rings of a launch with `programs` programs, in loads of MOST_LOAD blocks.

    The rings are the longest with which the GPU holds all programs at once. If a multiprocessor has
    six programs to run, two rounds of three take less time than five and then one.
    """
    for per_multiprocessor, loads in LOADS.items():
        if programs <= per_multiprocessor * num_multiprocessors:
            return loads
    return LOADS[3] if programs <= 6 * num_multiprocessors else LOADS[5]


def _options(width: int, grid: tuple[int, int], num_multiprocessors: int) -> dict[str, Any]:
    """Options of a launch whose rows have `width` values."""
    blocks = width // 128
    held = min(_most_held(), blocks & -blocks)  # a power of two that divides them
    load = min(MOST_LOAD, held)
    stages = _loads(math.prod(grid), num_multiprocessors) * MOST_LOAD // load
    return COMMON | {"BLOCKS": blocks, "HELD": held, "STAGES": stages, "LOAD": load}


def _down_tiles(num_tokens: int, width: int, inner: int) -> int:
    """The tiles of 64 rows that a program of the down GEMM computes; they divide the rows."""
    if num_tokens == 1:
        return 1
    return math.gcd(max(1, BLOCKS_OF_DOWN * 128 // inner), width // 64)


def _launches(
    num_tokens: int, width: int, inner: int, topk: int, num_multiprocessors: int
) -> tuple[tuple[tuple[int, int], dict[str, Any]], tuple[tuple[int, int], dict[str, Any]]]:
    """The grid and the constants of both launches: of gate and up, and of down."""
    num_pairs, tiles = num_tokens * topk, _down_tiles(num_tokens, width, inner)
    up, down = (inner // 32, num_pairs), (width // 64 // tiles, num_pairs)
    return (
        (up, _options(width, up, num_multiprocessors) | {"TOPK": topk}),
        (down, _options(inner, down, num_multiprocessors) | {"TILES": tiles}),
    )


def launch(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w: TiledExperts,
    limit: float,
    out: Tensor,
    num_multiprocessors: int,
) -> None:
    """Compute out bfloat16 [N,K,D] of few tokens x bfloat16 [N,D]; ids and weights [N,K].

    Rows of out with id -1 are not written.
    """
    (num_tokens, width), inner, topk = x.shape, w.w2.shape[2] * 2, ids.shape[1]
    up, down = _launches(num_tokens, width, inner, topk, num_multiprocessors)
    hidden = torch.empty((num_tokens * topk, inner), dtype=torch.float32, device=x.device)
    grid, options = up
    w13, exponent_bits13, row_scale13 = w.gate_up()
    weights13 = (*weight_descriptors(w13, exponent_bits13, options["LOAD"]), row_scale13)
    _few_gate_up_kernel[grid](x, x.stride(0), ids, *weights13, weights, hidden, limit, **options)
    grid, options = down
    w2, exponent_bits2, row_scale2 = w.down()
    weights2 = (*weight_descriptors(w2, exponent_bits2, options["LOAD"]), row_scale2)
    _few_down_kernel[grid](hidden, ids, *weights2, out, **options)
