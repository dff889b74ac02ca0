"""A program of the experts' GEMMs on Hopper GPUs, in Gluon: its ring, loader and groups of warps.

A program has one to four groups of four warps, each with 64 rows of weights, and a warp that fills
a ring of tiles through TMA. The GEMMs of experts_hopper.py and of deepseek_v41/experts_hopper.py
pass what differs: descriptors, and the functions that multiply (MULTIPLY), choose the numbers of
columns to compile for (WIDTHS), and store (STORE).

No function reads a constant of the module: whether that were a part of a kernel's key would depend
on the order in which kernels are compiled (tests/ops/test_kernel_sources.py).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.launch.gluon_functions import async_load, start_next, wait_for_last
from finwhale.ops.moe.experts_hopper_parts import after, barriers, ring, swiglu, to_odd


@gluon.constexpr_function
def _factor_rows(blocks, bits):
    """Rows of factors of a slot, which TMA needs to have 128 bytes."""
    return blocks if bits == 32 else max(2, blocks)


@gluon.constexpr_function
def _warps(groups):
    """Warps of the groups after the first one, and of the loader."""
    return [4] * (groups - 1) + [1]


@gluon.constexpr_function
def _registers(groups, registers):
    """Registers of a thread of these warps."""
    return [registers] * (groups - 1) + [24]


@gluon.constexpr_function
def _num_bytes(block_type):
    rows, columns = block_type.shape
    return rows * columns * block_type.element_ty.primitive_bitwidth // 8


@gluon.jit
def _load_weights(
    descs, rings, slot, chunk, blocks, boxes, COLUMNS: gl.constexpr, GROUPS: gl.constexpr
):
    """Start to copy a block of each group's rows of weights to shared memory.

    The barrier waits for these bytes and for those that `_load_rows` copies.
    """
    x_desc, scale_descs, w_desc, factor_desc = descs
    _, _, w_ring, factor_ring, full, _ = rings
    height: gl.constexpr = x_desc.block_type.shape[0]
    loads: gl.constexpr = factor_desc.block_type.shape[0]
    box_bytes: gl.constexpr = _num_bytes(x_desc.block_type)
    each: gl.constexpr = _num_bytes(w_desc.block_type) + _num_bytes(factor_desc.block_type)
    of_scales: gl.constexpr = _num_bytes(scale_descs[0].block_type) if len(scale_descs) > 0 else 0
    size: gl.constexpr = GROUPS * each + of_scales
    ready = full.index(slot)
    for box in gl.static_range(COLUMNS // height):
        mbarrier.expect(ready, size + (box + 1) * box_bytes, pred=boxes == box + 1)
    for group in gl.static_range(GROUPS):
        weight_slot = slot * GROUPS + group
        at = (chunk + group * blocks) * loads
        async_load(w_desc, [at * 64, 0], ready, w_ring.index(weight_slot))
        async_load(factor_desc, [at, 0], ready, factor_ring.index(weight_slot).slice(0, loads, 0))


@gluon.jit
def _load_rows(descs, rings, slot, k, first, boxes, COLUMNS: gl.constexpr):
    x_desc, scale_descs, _, _ = descs
    x_ring, scale_rings, _, _, full, _ = rings
    height: gl.constexpr = x_desc.block_type.shape[0]
    width: gl.constexpr = x_desc.block_type.shape[1]
    ready = full.index(slot)
    for box in gl.static_range(COLUMNS // height):
        rows = x_ring.index(slot).slice(box * height, height, 0)
        at = [first + box * height, k * width]
        async_load(x_desc, at, ready, rows, pred=box < boxes)
    for i in gl.static_range(len(scale_descs)):
        async_load(scale_descs[i], [k, first], ready, scale_rings[i].index(slot))


@gluon.jit
def _load(
    load,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Fill the ring: for each of TILES steps through the rows, all blocks of columns.

    The warp requests its first weights while the previous kernel still writes x. It loads only the
    boxes of rows of x that `count` pairs need.
    """
    descs, rings, first, count, tile, blocks = load
    height: gl.constexpr = descs[0].block_type.shape[0]
    empty = rings[5]
    boxes = gl.minimum((count + height - 1) // height, COLUMNS // height)
    ahead = gl.minimum(blocks, STAGES)
    for k in range(ahead):
        _load_weights(descs, rings, k, tile * blocks + k, blocks, boxes, COLUMNS, GROUPS)
    wait_for_last(PDL)
    for k in range(ahead):
        _load_rows(descs, rings, k, k, first, boxes, COLUMNS)
    slot = ahead % STAGES
    phase = 1 - ahead // STAGES
    for t in range(TILES):
        # Do not use a variable that the first tile sets to 0: Triton loses variables that only
        # loop bounds read.
        for k in range(gl.where(t == 0, ahead, 0), blocks):
            mbarrier.wait(empty.index(slot), phase)
            chunk = (tile + t * GROUPS) * blocks + k
            _load_weights(descs, rings, slot, chunk, blocks, boxes, COLUMNS, GROUPS)
            _load_rows(descs, rings, slot, k, first, boxes, COLUMNS)
            slot, phase = after(slot, phase, STAGES)


@gluon.jit
def _pair_memory(pairs, first, end, COLUMNS: gl.constexpr):
    """Copy the block's routing weights, or without any its pairs (-1: none), to shared memory.

    This takes no time, because the group then waits for its first weights. These warps have not
    waited for the previous kernel, so the loads bypass L1, as in `run`.
    """
    order_ptr, weights_ptr = pairs
    row = gl.arange(0, COLUMNS, gl.BlockedLayout([max(1, COLUMNS // 128)], [32], [4], [0]))
    used = row < end - first
    value = gl.load(order_ptr + first + row, mask=used, other=-1, cache_modifier=".cg")
    if weights_ptr is not None:
        value = gl.load(weights_ptr + value, mask=used, other=0.0, cache_modifier=".cg")
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(value.dtype, [COLUMNS], plain, value)


@gluon.jit
def _group(
    work,
    MULTIPLY: gl.constexpr,
    WIDTHS: gl.constexpr,
    STORE: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The work of four warps: multiply their rows by the columns of the block's pairs."""
    rings, results, pairs, scale_ptr, first, end, tile, blocks = work
    count = end - first
    pairs = _pair_memory(pairs, first, end, COLUMNS)
    work = rings, results, pairs, scale_ptr, first, end, tile, blocks
    W: gl.constexpr = WIDTHS(COLUMNS, GROUPS)
    for i in gl.static_range(len(W)):
        if (count > (W[i - 1][0] if i > 0 else 0)) & (count <= W[i][0]):
            MULTIPLY(work, STORE, COLUMNS, W[i][1], TILES, STAGES, GROUPS, GROUP)


@gluon.jit
def run(
    descs,
    results,
    pairs,
    scale_ptr,
    blocks_ptr,
    rows,
    columns,
    TILE_ROWS: gl.constexpr,
    SCALE_OF: gl.constexpr,
    MULTIPLY: gl.constexpr,
    WIDTHS: gl.constexpr,
    STORE: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A program's tiles of an expert, for a block of pairs.

    The previous kernel does not write the pairs' blocks and order, and lets this one start only
    after all kernels before it have ended. So both are read without a wait. The loads bypass L1,
    because those kernels' writes are in L2.

    Args:
        descs: of x, a tuple of one for the scales of x or none, the weights, and their factors.
        results: what STORE needs.
        pairs: (the pair of each row, the pairs' routing weights or None).
        rows, columns: of an expert's weight, in tiles of TILE_ROWS rows of the result.
        SCALE_OF: (scale_ptr, expert, tiles, the program's first) -> its scales.
        MULTIPLY: computes and stores a group's tiles: (work, STORE, COLUMNS, width, TILES, STAGES,
            GROUPS, GROUP), where work is (rings, results, pairs in shared memory, scales, first
            pair, end, tile, blocks).
        WIDTHS: (COLUMNS, GROUPS) -> (most pairs, width) of the codes to compile, ascending.
    """
    start_next(PDL)
    entry = blocks_ptr + gl.program_id(1) * 3
    expert = gl.load(entry, cache_modifier=".cg")
    first = gl.load(entry + 1, cache_modifier=".cg")
    end = gl.load(entry + 2, cache_modifier=".cg")
    if expert >= 0:
        first = gl.multiple_of(first, 8)
        tiles = rows // TILE_ROWS
        blocks = columns // descs[0].block_type.shape[1]
        row = gl.program_id(0) * GROUPS * TILES
        scale_ptr = SCALE_OF(scale_ptr, expert, tiles, row)
        x_desc, scale_descs, w_desc, factor_desc = descs
        loads: gl.constexpr = factor_desc.block_type.shape[0]
        bits: gl.constexpr = factor_desc.dtype.primitive_bitwidth
        x = ring(x_desc, STAGES, COLUMNS)
        scales = ()
        for i in gl.static_range(len(scale_descs)):
            scales += (ring(scale_descs[i], STAGES, 1),)  # type: ignore[assignment]
        w = ring(w_desc, STAGES * GROUPS, w_desc.block_type.shape[0])
        factor = ring(factor_desc, STAGES * GROUPS, _factor_rows(loads, bits))
        full, empty = barriers(STAGES, GROUPS)
        rings = x, scales, w, factor, full, empty
        work = rings, results, pairs, scale_ptr, first, end, row, blocks
        load = descs, rings, first, end - first, expert * tiles + row, blocks
        gl.warp_specialize(
            [
                (_group, (work, MULTIPLY, WIDTHS, STORE, COLUMNS, TILES, STAGES, GROUPS, part))
                if part < GROUPS
                else (_load, (load, COLUMNS, TILES, STAGES, GROUPS, PDL))
                for part in (0, 1, 2, 3, 4)[: GROUPS + 1]
            ],
            _warps(GROUPS),
            _registers(GROUPS, REGISTERS),
        )
    else:
        wait_for_last(PDL)


@gluon.jit
def hidden_values(total, pairs, limit):
    """32 hidden values of each pair, times its routing weight, rounded to odd.

    The rows of `total` alternate: eight of w1, then eight of w3.
    """
    result = swiglu(total, limit)
    result *= gl.expand_dims(pairs.load(gl.SliceLayout(0, result.type.layout)), 0)
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    return gl.convert_layout(to_odd(result), layout)


@gluon.jit
def store_hidden(result, hidden_ptr, inner, first, end, tile):
    """Store 32 hidden values of each pair. The pairs' rows are in the order of `dispatch`."""
    layout: gl.constexpr = result.type.layout
    pair_row = first + gl.arange(0, result.shape[1], gl.SliceLayout(0, layout))
    i = tile * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
    target = hidden_ptr + gl.expand_dims(pair_row.to(gl.int64) * inner, 0) + gl.expand_dims(i, 1)
    gl.store(target, result.to(gl.bfloat16), mask=gl.expand_dims(pair_row < end, 0))


@gluon.jit
def store_out(total, out, pairs, tile):
    """Store 64 output values of each pair. Row p of the output belongs to pair p."""
    out_ptr, width = out
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(total.to(gl.bfloat16), layout)
    pair = pairs.load(gl.SliceLayout(0, layout)).to(gl.int64)
    d = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    target = out_ptr + gl.expand_dims(pair * width, 0) + gl.expand_dims(d, 1)
    gl.store(target, result, mask=gl.expand_dims(pair >= 0, 0))


def program_options(
    tiles: int,
    groups: int,
    cut: tuple[int, int],
    columns: int,
    registers: dict[int, tuple[int, int]],
) -> tuple[int, dict[str, Any]]:
    """The number of programs that share an expert's tiles of rows, and the launch's options.

    Args:
        groups: of a program; it divides the tiles.
        cut: the most steps of a program, and tiles of the ring.
        registers: by groups: the registers per thread of each group except the first, and at
            launch (maxnreg). The loader gets 24, and the first group gets the rest.
    """
    steps = math.gcd(cut[0], tiles // groups)
    after_start, at_launch = registers[groups]
    return tiles // (groups * steps), {
        "COLUMNS": columns,
        "TILES": steps,
        "STAGES": cut[1],
        "GROUPS": groups,
        "REGISTERS": after_start,
        "maxnreg": at_launch,
        "num_warps": 4,
        **launch_options(early=True),
    }
