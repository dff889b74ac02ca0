"""The routed experts of one to FEW_TOKENS tokens on Hopper GPUs, in Gluon: each pair on its own.

Read experts_hopper.py first. Here a program computes a tile of one pair and rounds the token's row
itself while its first weights arrive, so no launches are needed to order and round. The row is row
0 of tiles of eight rows in shared memory; the results of the other seven rows are ignored. The bits
are those of experts_hopper.py. If several tokens have the same expert, its weights are read for
each of them; few tokens seldom do.

Each program reads the whole row, 8 KiB from L2, and rounds it to 1 KiB of shared memory per block
of 128 values. A token of Flash has 384 programs. With several tokens on one of several ranks, a
program of the down GEMM computes several tiles (`down_steps`).

One launch computes gate and up, and one down. If all programs of one token fit on the GPU at once,
as Flash's do, one launch computes both. Each program computes a tile of both. While it waits for
the other tiles of its pair's hidden values, its ring already has the first weights of w2. The
programs count in `arrivals`; the last one that has waited for a pair resets the counts. If they do
not fit, programs would wait for others that never start. The kernels of other streams may delay the
start of some programs, but must not wait for this launch themselves.

On one of several ranks, gate and up have fewer tiles than down, and one token has two launches too:
that of gate and up has longer rings, so that as many bytes are in flight.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from finwhale.number_formats import E4M3_MAX
from finwhale.ops.launch import launch_options
from finwhale.ops.launch.early_launch_hopper import start_next, wait_for_last
from finwhale.ops.launch.streamed_loads import stream_tma_loads
from finwhale.ops.moe.experts_hopper_parts import (
    barriers,
    decode,
    down_steps,
    mma,
    ring,
    swiglu,
    weight_descriptors,
)
from finwhale.ops.moe.experts_layout import MOST_PAIRS, TiledExperts
from finwhale.ops.rounding import MIN_AMAX

# With more tokens, ordering the pairs by expert costs less than reading weights again.
FEW_TOKENS = 8
# Tiles of a program's ring. A launch with fewer than MANY_PROGRAMS programs, such as gate and up on
# one of several ranks, has up to MOST_STAGES, so that as many bytes are in flight.
STAGES, MOST_STAGES = 6, 24
MANY_PROGRAMS = 396  # three per multiprocessor
# Synchronises the threads of a group of warps. Triton 3.7 renamed the function.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
REGISTERS = 64  # per thread; four programs share a multiprocessor if their rows fit
MOST_PROGRAMS = 4  # of a multiprocessor, for that reason
# Bytes of shared memory: of a multiprocessor; of a program beyond its row and ring.
SHARED_BYTES, PROGRAM_BYTES = 227 * 1024, 2048


@gluon.constexpr_function
def _columns():
    """The fewest columns of a GEMM. A function, because shared functions read no constants."""
    return 8


@gluon.jit
def _round_row(
    x_ptr, x, scales, BLOCKS: gl.constexpr, CHUNK: gl.constexpr, TOP: gl.constexpr, LEAST
):
    """Round BLOCKS blocks of 128 values into row 0 of x's tiles, with one scale per block.

    The function rounds CHUNK blocks, a power of two, at a time.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = x._reinterpret(gl.float8e4nv, [BLOCKS // CHUNK, CHUNK, _columns() * 128], plain)
    columns = scales._reinterpret(gl.float32, [BLOCKS // CHUNK, CHUNK, _columns()], plain)
    block = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    i = gl.arange(0, 128, gl.SliceLayout(0, layout))
    for chunk in gl.static_range(BLOCKS // CHUNK):
        at = gl.expand_dims((chunk * CHUNK + block) * 128, 1) + gl.expand_dims(i, 0)
        values = gl.load(x_ptr + at).to(gl.float32)
        amax = gl.maximum(gl.max(gl.abs(values), axis=1), LEAST)
        bits = (amax * (1.0 / TOP)).to(gl.int32, bitcast=True)
        bits = (bits + 0x7FFFFF) & 0x7F800000
        inverse = gl.expand_dims((0x7F000000 - bits).to(gl.float32, bitcast=True), 1)
        rows.index(chunk).slice(0, 128, 1).store((values * inverse).to(gl.float8e4nv))
        scale = gl.expand_dims(bits.to(gl.float32, bitcast=True), 1)
        columns.index(chunk).store(scale + gl.full([CHUNK, _columns()], 0.0, gl.float32, layout))
    fence_async_shared()


@gluon.jit
def _after(slot, phase, STAGES: gl.constexpr):
    """The ring's next tile, and its phase."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _start_part(rings, slot, x, k):
    """Start the product [64,8] of a tile of the ring and block k of the row."""
    w_ring, steps_ring, _, _ = rings
    operand: gl.constexpr = gl.DotOperandLayout(0, mma(_columns()), 4)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    zero = gl.full([64, _columns()], 0.0, gl.float32, mma(_columns()))
    steps = steps_ring.index(slot)._reinterpret(gl.int32, [64], plain)
    a = decode(w_ring.index(slot), steps, operand)
    return warpgroup_mma(a, x.index(k).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scaled(part, scales, k):
    """A product times the factor of block k of the row."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scale = scales.index(k)._reinterpret(gl.float32, [_columns()], plain)
    return part * gl.expand_dims(scale.load(gl.SliceLayout(0, mma(_columns()))), 0)


@gluon.jit
def _multiply(
    rings, first, x, scales, TWO: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr
):
    """w x^T [64,8] before the rows' factors: sums over 128 values, which are added in float32.

    first: number of the tiles that the program has read from the ring before.
    TWO: decode a block while the tensor cores multiply the one before. That shortens a program. It
        helps where few programs run at once, as those of one token.
    """
    _, _, full, empty = rings
    total = gl.full([64, _columns()], 0.0, gl.float32, mma(_columns()))
    slot = first % STAGES
    phase = (first // STAGES) & 1
    if TWO:
        for i in range(BLOCKS // 2):
            other, other_phase = _after(slot, phase, STAGES)
            mbarrier.wait(full.index(slot), phase)
            mbarrier.wait(full.index(other), other_phase)
            part = _start_part(rings, slot, x, 2 * i)
            other_part = _start_part(rings, other, x, 2 * i + 1)
            part, other_part = warpgroup_mma_wait(0, deps=[part, other_part])
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(empty.index(other), count=1)
            total += _scaled(part, scales, 2 * i)
            total += _scaled(other_part, scales, 2 * i + 1)
            slot, phase = _after(other, other_phase, STAGES)
    for k in range(BLOCKS // 2 * 2 if TWO else 0, BLOCKS):
        mbarrier.wait(full.index(slot), phase)
        part = warpgroup_mma_wait(0, deps=[_start_part(rings, slot, x, k)])
        total += _scaled(part, scales, k)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = _after(slot, phase, STAGES)
    return total


@gluon.jit
def _load(descs, rings, first, tile, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """Load a tile's blocks of weights, one after the other, after `first` others."""
    w_desc, steps_desc = descs
    w_ring, steps_ring, full, empty = rings
    slot = first % STAGES
    phase = ((first // STAGES) & 1) ^ 1
    for k in range(BLOCKS):
        mbarrier.wait(empty.index(slot), phase)
        ready = full.index(slot)
        mbarrier.expect(ready, 64 * 64 + 64 * 4)
        at = tile * BLOCKS + k
        tma.async_copy_global_to_shared(w_desc, [at * 64, 0], ready, w_ring.index(slot))
        tma.async_copy_global_to_shared(steps_desc, [at, 0], ready, steps_ring.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _load_tiles(
    descs, rings, tile, TILES: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr
):
    """The work of one warp: load the weights of adjacent tiles."""
    for i in range(TILES):
        _load(descs, rings, i * BLOCKS, tile + i, BLOCKS, STAGES)


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
def _shared_memory(descs, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate a program's rings, and its row of BLOCKS blocks with their scales."""
    w_desc, steps_desc = descs
    w = ring(w_desc, STAGES, 64)
    steps = ring(steps_desc, STAGES, 1)
    bytes_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8, rank=2
    )
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x = gl.allocate_shared_memory(gl.float8e4nv, [BLOCKS, _columns(), 128], bytes_layout)
    scales = gl.allocate_shared_memory(gl.float32, [BLOCKS, 1, _columns()], words)
    full, empty = barriers(STAGES, 1)
    return (w, steps, full, empty), x, scales


@gluon.jit
def _group(
    rings,
    x,
    scales,
    x_ptr,
    unit_ptr,
    result,
    STORE: gl.constexpr,
    WAIT: gl.constexpr,
    TWO: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
):
    """The work of four warps: round the row, then multiply TILES tiles of weights with it."""
    row = gl.arange(0, 64, gl.SliceLayout(1, mma(_columns())))
    unit = gl.load(unit_ptr + row)
    wait_for_last(WAIT)
    _round_row(x_ptr, x, scales, BLOCKS, CHUNK, TOP, LEAST)
    for i in range(TILES):
        next_unit = gl.load(unit_ptr + gl.minimum(i + 1, TILES - 1) * 64 + row)
        total = _multiply(rings, i * BLOCKS, x, scales, TWO, BLOCKS, STAGES)
        STORE(total * gl.expand_dims(unit, 1), result, i)
        unit = next_unit


@gluon.jit
def _run(
    descs,
    arguments,
    expert,
    STORE: gl.constexpr,
    WAIT: gl.constexpr,
    TWO: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
):
    x_ptr, unit_ptr, result = arguments
    tile = (expert * gl.num_programs(0) + gl.program_id(0)) * TILES
    rings, x, scales = _shared_memory(descs, BLOCKS, STAGES)
    unit_ptr += tile * 64
    # fmt: off
    gl.warp_specialize(
        [
            (_group, (rings, x, scales, x_ptr, unit_ptr, result, STORE, WAIT, TWO, TILES, BLOCKS,
                      CHUNK, STAGES, TOP, LEAST)),
            (_load_tiles, (descs, rings, tile, TILES, BLOCKS, STAGES)),
        ],
        [1],
        [24],
    )
    # fmt: on


@gluon.jit
def _few_gate_up_kernel(
    x_ptr,
    stride_x,
    ids_ptr,
    w_desc,
    steps_desc,
    unit_ptr,
    weights_ptr,
    hidden_ptr,
    limit,
    TOPK: gl.constexpr,
    TWO: gl.constexpr,
    BLOCKS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
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
        arguments = x_ptr, unit_ptr, (hidden_ptr, gl.load(weights_ptr + pair), limit)
        _run(
            (w_desc, steps_desc),
            arguments,
            expert,
            _store_hidden,
            False,
            TWO,
            1,
            BLOCKS,
            CHUNK,
            STAGES,
            TOP,
            LEAST,
        )


@gluon.jit
def _few_down_kernel(
    hidden_ptr,
    ids_ptr,
    w_desc,
    steps_desc,
    unit_ptr,
    out_ptr,
    TWO: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
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
        arguments = hidden_ptr, unit_ptr, out_ptr
        _run(
            (w_desc, steps_desc),
            arguments,
            expert,
            _store_out,
            PDL,
            TWO,
            TILES,
            BLOCKS,
            CHUNK,
            STAGES,
            TOP,
            LEAST,
        )
    else:
        wait_for_last(PDL)


@gluon.jit
def _group_of_both(
    rings,
    x,
    scales,
    up,
    down,
    UP_BLOCKS: gl.constexpr,
    UP_CHUNK: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    DOWN_CHUNK: gl.constexpr,
    MOST_PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
):
    """The work of four warps: a tile of gate and up, then a tile of down."""
    up_expert, x_ptr, up_unit_ptr, hidden_ptr, weight, limit, stored_ptr = up
    down_expert, row_ptr, down_unit_ptr, out_ptr, arrived_ptr = down
    rows: gl.constexpr = gl.SliceLayout(1, mma(_columns()))
    if up_expert >= 0:
        unit = gl.load(up_unit_ptr + gl.arange(0, 64, rows))
        _round_row(x_ptr, x, scales, UP_BLOCKS, UP_CHUNK, TOP, LEAST)
        total = _multiply(rings, 0, x, scales, True, UP_BLOCKS, STAGES)
        _store_hidden(total * gl.expand_dims(unit, 1), (hidden_ptr, weight, limit), 0)
        _barrier()
        gl.atomic_add(stored_ptr, 1, sem="release", scope="gpu")
    if down_expert >= 0:
        unit = gl.load(down_unit_ptr + gl.arange(0, 64, rows))
        arrived = gl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
        while arrived < DOWN_BLOCKS * 4:
            arrived = gl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
        _round_row(row_ptr, x, scales, DOWN_BLOCKS, DOWN_CHUNK, TOP, LEAST)
        first = (up_expert >= 0).to(gl.int32) * UP_BLOCKS
        total = _multiply(rings, first, x, scales, True, DOWN_BLOCKS, STAGES)
        _store_out(total * gl.expand_dims(unit, 1), out_ptr, 0)
        waited = gl.atomic_add(arrived_ptr + MOST_PAIRS, 1, sem="relaxed", scope="gpu")
        if waited == UP_BLOCKS * 2 - 1:
            gl.store(arrived_ptr, 0)
            gl.store(arrived_ptr + MOST_PAIRS, 0)


@gluon.jit
def _load_both(
    rings, up, down, UP_BLOCKS: gl.constexpr, DOWN_BLOCKS: gl.constexpr, STAGES: gl.constexpr
):
    """The work of one warp: load the weights of both tiles."""
    up_expert, up_descs, up_tile = up
    down_expert, down_descs, down_tile = down
    if up_expert >= 0:
        _load(up_descs, rings, 0, up_tile, UP_BLOCKS, STAGES)
    if down_expert >= 0:
        first = (up_expert >= 0).to(gl.int32) * UP_BLOCKS
        _load(down_descs, rings, first, down_tile, DOWN_BLOCKS, STAGES)


@gluon.jit
def _one_token_kernel(
    x_ptr,
    ids_ptr,
    w13_desc,
    steps13_desc,
    unit13_ptr,
    weights_ptr,
    hidden_ptr,
    limit,
    w2_desc,
    steps2_desc,
    unit2_ptr,
    out_ptr,
    arrivals_ptr,
    PAIRS: gl.constexpr,
    UP_BLOCKS: gl.constexpr,
    UP_CHUNK: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    DOWN_CHUNK: gl.constexpr,
    MOST_PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute both GEMMs of the token's pairs, one after the other.

    Program i computes tile i of the gate and up GEMM, and tile i of the down GEMM if there is one.
    Tiles are numbered through all pairs.

    arrivals [2, MOST_PAIRS]: for each pair, the programs that have stored their hidden values, and
    the programs that have waited for them.
    """
    stream_tma_loads()
    wait_for_last(PDL)
    start_next(PDL)
    up_tiles: gl.constexpr = DOWN_BLOCKS * 4  # of 32 hidden values
    down_tiles: gl.constexpr = UP_BLOCKS * 2  # of 64 values of D
    program = gl.program_id(0)
    up_pair = program // up_tiles
    down_pair = program // down_tiles
    up_expert = gl.load(ids_ptr + gl.minimum(up_pair, PAIRS - 1)).to(gl.int32)
    down_expert = gl.load(ids_ptr + gl.minimum(down_pair, PAIRS - 1)).to(gl.int32)
    weight = gl.load(weights_ptr + gl.minimum(up_pair, PAIRS - 1))
    up_expert = gl.where(up_pair < PAIRS, up_expert, -1)
    down_expert = gl.where(down_pair < PAIRS, down_expert, -1)
    up_tile = up_expert * up_tiles + program % up_tiles
    down_tile = down_expert * down_tiles + program % down_tiles
    most: gl.constexpr = UP_BLOCKS if UP_BLOCKS > DOWN_BLOCKS else DOWN_BLOCKS
    rings, x, scales = _shared_memory((w13_desc, steps13_desc), most, STAGES)
    # fmt: off
    up = (up_expert, x_ptr, unit13_ptr + up_tile * 64, hidden_ptr + program * 32,
          weight, limit, arrivals_ptr + up_pair)
    down = (down_expert, hidden_ptr + down_pair * (DOWN_BLOCKS * 128), unit2_ptr + down_tile * 64,
            out_ptr + program * 64, arrivals_ptr + down_pair)
    gl.warp_specialize(
        [
            (_group_of_both, (rings, x, scales, up, down, UP_BLOCKS, UP_CHUNK, DOWN_BLOCKS,
                              DOWN_CHUNK, MOST_PAIRS, STAGES, TOP, LEAST)),
            (_load_both, (rings, (up_expert, (w13_desc, steps13_desc), up_tile),
                          (down_expert, (w2_desc, steps2_desc), down_tile), UP_BLOCKS,
                          DOWN_BLOCKS, STAGES)),
        ],
        [1],
        [24],
    )
    # fmt: on


# --- Launch ---------------------------------------------------------------------------------------


def _stages(programs: int, blocks: int) -> int:
    """The ring's tiles for a launch of programs that each read `blocks` tiles."""
    return max(STAGES, min(blocks, MOST_STAGES, STAGES * (MANY_PROGRAMS // programs)))


# Of every launch.
COMMON: dict[str, Any] = {
    "TOP": E4M3_MAX,
    "LEAST": MIN_AMAX,
    "num_warps": 4,
    "maxnreg": REGISTERS,
    **launch_options(early=True),
}


def _chunk(blocks: int) -> int:
    """The blocks of a row that a program rounds at a time: a power of two that divides them."""
    return min(32, blocks & -blocks)


def _options(width: int, programs: int) -> dict[str, Any]:
    """Options of a launch that computes one GEMM."""
    blocks = width // 128
    return COMMON | {
        "BLOCKS": blocks,
        "CHUNK": _chunk(blocks),
        "STAGES": _stages(programs, blocks),
    }


def programs_at_once(width: int, inner: int, num_multiprocessors: int) -> int:
    """How many programs of the launch that computes both GEMMs run at once."""
    blocks = max(width, inner) // 128
    ring = STAGES * (64 * 64 + 64 * 4)
    shared = blocks * (128 + 4) * 8 + ring + PROGRAM_BYTES
    return num_multiprocessors * min(MOST_PROGRAMS, SHARED_BYTES // shared)


def takes_one_launch(width: int, inner: int, topk: int, num_multiprocessors: int) -> bool:
    """Whether one launch computes both GEMMs."""
    up_tiles, down_tiles = inner // 32, width // 64
    at_once = programs_at_once(width, inner, num_multiprocessors)
    return up_tiles >= down_tiles and topk <= MOST_PAIRS and up_tiles * topk <= at_once


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
    num_pairs = num_tokens * topk
    hidden = torch.empty((num_pairs, inner), dtype=torch.float32, device=x.device)
    w13, steps13, unit13 = w.gate_up()
    gate_up = (ids, *weight_descriptors(w13, steps13), unit13, weights, hidden, limit)
    w2, steps2, unit2 = w.down()
    down = (*weight_descriptors(w2, steps2), unit2, out)
    if num_tokens == 1 and takes_one_launch(width, inner, topk, num_multiprocessors):
        assert w.arrivals is not None
        up_blocks, down_blocks = width // 128, inner // 128
        _one_token_kernel[(inner // 32 * topk,)](
            *(x, *gate_up, *down, w.arrivals),
            PAIRS=topk,
            UP_BLOCKS=up_blocks,
            UP_CHUNK=_chunk(up_blocks),
            DOWN_BLOCKS=down_blocks,
            DOWN_CHUNK=_chunk(down_blocks),
            MOST_PAIRS=MOST_PAIRS,
            STAGES=STAGES,
            **COMMON,
        )
        return
    up_programs, down_programs = inner // 32 * topk, width // 64 * topk
    if num_tokens > 1:  # one launch signature for any number of them
        up_programs = down_programs = MANY_PROGRAMS
    two = num_tokens == 1
    _few_gate_up_kernel[(inner // 32, num_pairs)](
        x, x.stride(0), *gate_up, TOPK=topk, TWO=two, **_options(width, up_programs)
    )
    tiles = 1 if num_tokens == 1 else math.gcd(down_steps(1, inner), width // 64)
    _few_down_kernel[(width // 64 // tiles, num_pairs)](
        *(hidden, ids, *down), TWO=two, TILES=tiles, **_options(inner, down_programs)
    )
