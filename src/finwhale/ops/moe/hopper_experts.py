"""The two products of the routed experts on Hopper GPUs, in Gluon.

The legend is triton_experts.py's, the weights' layout triton_fold.py's. A program has one, two or
four groups of four warps, each with 64 rows of weights, and a warp that fills a ring of tiles
through the copy engine, weights first: the expert is known while x is still being rounded. Weights
go from the ring to registers, are decoded there, and enter the tensor cores from there.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from dataclasses import dataclass

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from finwhale.ops.launch import early_launch
from finwhale.ops.launch.early_launch_hopper import start_next, wait_for_last


@gluon.jit
def _decode_group(w, first, second):
    """w uint8 [64,32]; first and second [64,1]: what shifts the table of either half's values."""
    # No constants of the module: this is shared between files, and what Triton finds a compiled
    # kernel by would depend on which kernel it met first.
    # $2: eight values; $3, $7: the table of the first four; $11, $15: of the second four. Arguments
    # of 32 bits come once for each of the four bytes.
    asm: gl.constexpr = """{
.reg .b32 magnitudes, second, sign;
and.b32 magnitudes, $2, 0x77777777;
prmt.b32 $0, $3, $7, magnitudes;
shr.u32 second, magnitudes, 16;
prmt.b32 second, $11, $15, second;
and.b32 sign, $2, 0x80808080;
or.b32 $0, $0, sign;
shl.b32 sign, $2, 4;
and.b32 sign, sign, 0x80808080;
or.b32 $1, second, sign;
}"""
    operands: gl.constexpr = "=&r,=&r" + ",r" * 17
    first_low, _ = gl.broadcast(0x14100800 + first * 0x01010100, w)
    first_high, _ = gl.broadcast(0x24201C18 + first * 0x01010101, w)
    second_low, _ = gl.broadcast(0x14100800 + second * 0x01010100, w)
    second_high, _ = gl.broadcast(0x24201C18 + second * 0x01010101, w)
    return gl.inline_asm_elementwise(
        asm,
        operands,
        [w, first_low, first_high, second_low, second_high],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _beside(a, b, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """[64,WIDTH] of two [64,WIDTH/2]."""
    both = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [64, WIDTH])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def decode(w_tile, steps_tile, LAYOUT: gl.constexpr):
    """128 values of 64 rows as the tensor cores' left operand."""
    w = gl.permute(gl.reshape(w_tile.load(LAYOUT), [64, 2, 32]), (0, 2, 1))
    left, right = gl.split(w)
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
    steps = gl.expand_dims(steps_tile.load(gl.SliceLayout(1, LAYOUT)), 1)
    a, c = _decode_group(left, steps & 0xFF, (steps >> 16) & 0xFF)
    b, d = _decode_group(right, (steps >> 8) & 0xFF, (steps >> 24) & 0xFF)
    values = _beside(_beside(a, b, 64, LAYOUT), _beside(c, d, 64, LAYOUT), 128, LAYOUT)
    return values.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _load(
    load,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Fill the ring: for each of TILES steps through the rows, all blocks of 128 columns.

    Its first weights are asked for while the kernel before still writes x. Of x come as many boxes
    of rows as `count` pairs need.
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
        # No variable that is set to 0 after the first tile: Triton loses what only bounds read.
        for k in range(gl.where(t == 0, ahead, 0), blocks):
            mbarrier.wait(empty.index(slot), phase)
            chunk = (tile + t * GROUPS) * blocks + k
            _load_weights(descs, rings, slot, chunk, blocks, boxes, COLUMNS, GROUPS)
            _load_rows(descs, rings, slot, k, first, boxes, COLUMNS)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _load_weights(
    descs, rings, slot, chunk, blocks, boxes, COLUMNS: gl.constexpr, GROUPS: gl.constexpr
):
    """A block of each group's rows; announces what _load_rows brings, too."""
    x_desc, scale_desc, w_desc, steps_desc = descs
    _, _, w_ring, steps_ring, full, _ = rings
    height: gl.constexpr = x_desc.block_type.shape[0]
    size: gl.constexpr = scale_desc.block_type.shape[1] * 4 + GROUPS * (64 * 64 + 64 * 4)
    ready = full.index(slot)
    for box in gl.static_range(COLUMNS // height):
        mbarrier.expect(ready, size + (box + 1) * height * 128, pred=boxes == box + 1)
    for group in gl.static_range(GROUPS):
        place = slot * GROUPS + group
        at = chunk + group * blocks
        tma.async_copy_global_to_shared(w_desc, [at * 64, 0], ready, w_ring.index(place))
        tma.async_copy_global_to_shared(steps_desc, [at, 0], ready, steps_ring.index(place))


@gluon.jit
def _load_rows(descs, rings, slot, k, first, boxes, COLUMNS: gl.constexpr):
    x_desc, scale_desc, _, _ = descs
    x_ring, scale_ring, _, _, full, _ = rings
    height: gl.constexpr = x_desc.block_type.shape[0]
    ready = full.index(slot)
    for box in gl.static_range(COLUMNS // height):
        rows = x_ring.index(slot).slice(box * height, height, 0)
        at = [first + box * height, k * 128]
        tma.async_copy_global_to_shared(x_desc, at, ready, rows, pred=box < boxes)
    tma.async_copy_global_to_shared(scale_desc, [k, first], ready, scale_ring.index(slot))


@gluon.constexpr_function
def mma(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])


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

    SCALES_FIRST: they are read while the product is computed, in registers of their own.
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
    """(first, columns) of the products that a block of `width` columns is cut into: one is held
    beside the sums of all, in the registers that so many groups leave a thread.
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
def _num_parts(width, groups):
    return len(_parts(width, groups))


@gluon.constexpr_function
def _first(width, groups, part):
    return _parts(width, groups)[part][0]


@gluon.constexpr_function
def _size(width, groups, part):
    return _parts(width, groups)[part][1]


@gluon.constexpr_function
def _scales_first(width, groups, part):
    """Whether registers are left for a part's scales beside the sums and the product."""
    return groups < 4 and (width <= 192 or _size(width, groups, part) <= 32)


@gluon.constexpr_function
def _scales_last(width, groups):
    """Whether a part's scales are read after its product."""
    return not all(_scales_first(width, groups, p) for p in range(_num_parts(width, groups)))


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
    """w x^T in units of the rows, parts of WIDTH columns, and the ring's next place.

    Sums over 128 values, then over these.
    """
    x_ring, scale_ring, w_ring, steps_ring, full, empty = rings
    operand: gl.constexpr = gl.DotOperandLayout(0, mma(_size(WIDTH, GROUPS, 0)), 4)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    totals = ()
    for p in gl.static_range(_num_parts(WIDTH, GROUPS)):
        totals += (_zeros(_size(WIDTH, GROUPS, p)),)  # type: ignore[assignment]
    for _ in range(blocks):
        mbarrier.wait(full.index(slot), phase)
        place = slot * GROUPS + GROUP
        steps = steps_ring.index(place)._reinterpret(gl.int32, [64], plain)
        a = decode(w_ring.index(place), steps, operand)
        x = x_ring.index(slot)
        scale = scale_ring.index(slot)._reinterpret(gl.float32, [max(COLUMNS, 32)], plain)
        added = ()
        for p in gl.static_range(_num_parts(WIDTH, GROUPS)):
            # fmt: off
            added += (_add_part(  # type: ignore[assignment]
                totals[p], a, x, scale, _first(WIDTH, GROUPS, p), _size(WIDTH, GROUPS, p),
                _scales_first(WIDTH, GROUPS, p),
            ),)
            # fmt: on
        totals = added
        if _scales_last(WIDTH, GROUPS):
            # The loads of the scales come right before. Without the fence, the copy that refills
            # this place overtook some of them: H200, the last blocks of a tile of rows.
            fence_async_shared()
        mbarrier.arrive(empty.index(slot), count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return totals, slot, phase


@gluon.jit
def swiglu(total, limit):
    """The clamped SwiGLU [32,C] of [64,C]: rows alternate, eight of w1 and eight of w3."""
    columns: gl.constexpr = total.shape[1]
    both = gl.permute(gl.reshape(total, [4, 2, 8, columns]), (0, 2, 3, 1))
    gate, up = gl.split(both)
    gate = gl.minimum(gate, limit)
    up = gl.minimum(gl.maximum(up, -limit), limit)
    return gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [32, columns])


@gluon.jit
def _to_odd(x):
    """float32 x as bfloat16, its last bit set if anything was cut off: "rounded to odd".

    Rounding that to E4M3, which has four bits less, gives what rounding x itself would, and no x
    changes sides at a scale's boundary, which is 448 times a power of two: a bfloat16. (Also with
    1/448 rounded to float32, and at the least amax; test_rounding_to_odd.py.)
    """
    bits = x.to(gl.int32, bitcast=True)
    bits = (bits >> 16) | ((bits & 0xFFFF) != 0).to(gl.int32)
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _store_hidden(total, hidden, unit_ptr, first, end, row, limit):
    """Store 32 hidden values of each pair, times its routing weight.

    The rows of `total` alternate: eight of w1, then eight of w3.
    """
    hidden_ptr, order_ptr, weights_ptr, inner = hidden
    MMA: gl.constexpr = total.type.layout
    columns: gl.constexpr = total.shape[1]
    unit = gl.load(unit_ptr + gl.arange(0, 64, gl.SliceLayout(1, MMA)))
    total *= gl.expand_dims(unit, 1)
    result = swiglu(total, limit)
    # This group of warps has not waited for the kernel before: as `_block`, from L2.
    place = first + gl.arange(0, columns, gl.SliceLayout(0, result.type.layout))
    pair = gl.load(order_ptr + place, mask=place < end, other=0, cache_modifier=".cg")
    weight = gl.load(weights_ptr + pair, cache_modifier=".cg")
    result *= gl.expand_dims(weight, 0)
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    result = gl.convert_layout(_to_odd(result), layout)
    place = first + gl.arange(0, columns, gl.SliceLayout(0, layout))
    i = row * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
    target = hidden_ptr + gl.expand_dims(place.to(gl.int64) * inner, 0) + gl.expand_dims(i, 1)
    gl.store(target, result, mask=gl.expand_dims(place < end, 0))


@gluon.jit
def _store_out(total, out, unit_ptr, first, end, row, limit):
    """Store 64 output values of each pair, in the pair's row."""
    out_ptr, order_ptr, width = out
    MMA: gl.constexpr = total.type.layout
    columns: gl.constexpr = total.shape[1]
    unit = gl.load(unit_ptr + gl.arange(0, 64, gl.SliceLayout(1, MMA)))
    total *= gl.expand_dims(unit, 1)
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(total.to(gl.bfloat16), layout)
    place = first + gl.arange(0, columns, gl.SliceLayout(0, layout))
    pair = gl.load(order_ptr + place, mask=place < end, other=0).to(gl.int64)
    d = row * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    target = out_ptr + gl.expand_dims(pair * width, 0) + gl.expand_dims(d, 1)
    gl.store(target, result, mask=gl.expand_dims(place < end, 0))


@gluon.jit
def _opaque(x):
    """x, so that what is computed from it stays in the loop: outside it would cost registers."""
    asm: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _columns(
    rings,
    results,
    unit_ptr,
    first,
    end,
    row,
    blocks,
    limit,
    STORE: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    slot = 0
    phase = 0
    for t in range(TILES):
        step = t * GROUPS + GROUP
        totals, slot, phase = _multiply(
            rings, slot, phase, blocks, COLUMNS, WIDTH, STAGES, GROUPS, GROUP
        )
        unit = unit_ptr + step * 64
        end = _opaque(end)
        first = _opaque(first)
        for p in gl.static_range(_num_parts(WIDTH, GROUPS)):
            start = first + _first(WIDTH, GROUPS, p)
            STORE(totals[p], results, unit, start, end, row + step, limit)


@gluon.constexpr_function
def _widths(columns, groups):
    """Columns that a program for up to `columns` pairs has code for, ascending."""
    if columns <= 64:
        return [columns]
    steps = (64, 96, 128) if groups == 4 else (64, 128, 160, 192, 224, 256)
    return [width for width in steps if width <= columns]


@gluon.constexpr_function
def _num_widths(columns, groups):
    return len(_widths(columns, groups))


@gluon.constexpr_function
def _width(columns, groups, i):
    """The i-th; before the first 0, after the last more than any block has."""
    widths = [0, *_widths(columns, groups), 2**31 - 1]
    return widths[i + 1]


@gluon.jit
def _group(
    work,
    STORE: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """What four warps do: their rows times as many columns as the block has pairs."""
    rings, results, unit_ptr, first, end, row, blocks, limit = work
    count = end - first
    last: gl.constexpr = _num_widths(COLUMNS, GROUPS) - 1
    # fmt: off
    for i in gl.static_range(last + 1):
        if (count > _width(COLUMNS, GROUPS, i - 1)) & (
            count <= _width(COLUMNS, GROUPS, i + (i == last))
        ):
            _columns(rings, results, unit_ptr, first, end, row, blocks, limit, STORE, COLUMNS,
                     _width(COLUMNS, GROUPS, i), TILES, STAGES, GROUPS, GROUP)
    # fmt: on


@gluon.jit
def ring(desc, SIZE: gl.constexpr, HEIGHT: gl.constexpr):
    shape: gl.constexpr = [SIZE, HEIGHT, desc.block_type.shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) of a ring that one warp fills and READERS groups read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def _rings(descs, COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    x_desc, scale_desc, w_desc, steps_desc = descs
    x = ring(x_desc, STAGES, COLUMNS)
    scale = ring(scale_desc, STAGES, 1)
    w = ring(w_desc, STAGES * GROUPS, 64)
    steps = ring(steps_desc, STAGES * GROUPS, 1)
    full, empty = barriers(STAGES, GROUPS)
    return x, scale, w, steps, full, empty


@gluon.jit
def _run(
    descs,
    results,
    unit_ptr,
    first,
    end,
    tiles,
    blocks,
    expert,
    limit,
    STORE: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    row = gl.program_id(0) * GROUPS * TILES
    tile = expert * tiles + row
    unit_ptr += tile * 64
    rings = _rings(descs, COLUMNS, STAGES, GROUPS)
    work = rings, results, unit_ptr, first, end, row, blocks, limit
    load = descs, rings, first, end - first, tile, blocks
    if GROUPS == 4:
        gl.warp_specialize(
            [
                (_group, (work, STORE, COLUMNS, TILES, STAGES, GROUPS, 0)),
                (_group, (work, STORE, COLUMNS, TILES, STAGES, GROUPS, 1)),
                (_group, (work, STORE, COLUMNS, TILES, STAGES, GROUPS, 2)),
                (_group, (work, STORE, COLUMNS, TILES, STAGES, GROUPS, 3)),
                (_load, (load, COLUMNS, TILES, STAGES, GROUPS, PDL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_group, (work, STORE, COLUMNS, TILES, STAGES, GROUPS, 0)),
                (_group, (work, STORE, COLUMNS, TILES, STAGES, GROUPS, 1)),
                (_load, (load, COLUMNS, TILES, STAGES, GROUPS, PDL)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_group, (work, STORE, COLUMNS, TILES, STAGES, GROUPS, 0)),
                (_load, (load, COLUMNS, TILES, STAGES, GROUPS, PDL)),
            ],
            [1],
            [24],
        )


@gluon.jit
def _block(blocks_ptr):
    """(expert, first pair, end) of this program, which the kernel before does not write: it lets
    this one start when those before it have ended. From L2, which all that they wrote has reached.
    """
    entry = blocks_ptr + gl.program_id(1) * 3
    expert = gl.load(entry, cache_modifier=".cg")
    first = gl.load(entry + 1, cache_modifier=".cg")
    end = gl.load(entry + 2, cache_modifier=".cg")
    return expert, first, end


@gluon.jit
def _gate_up_kernel(
    x_desc,
    scale_desc,
    w_desc,
    steps_desc,
    order_ptr,
    blocks_ptr,
    unit_ptr,
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
    """hidden[place] = weight * the clamped SwiGLU of w1 x and w3 x, for a block of pairs."""
    start_next(PDL)
    expert, first, end = _block(blocks_ptr)
    if expert >= 0:
        _run(
            (x_desc, scale_desc, w_desc, steps_desc),
            (hidden_ptr, order_ptr, weights_ptr, I),
            unit_ptr,
            gl.multiple_of(first, 8),
            end,
            I // 32,
            D // 128,
            expert,
            limit,
            _store_hidden,
            COLUMNS,
            TILES,
            STAGES,
            GROUPS,
            REGISTERS,
            PDL,
        )
    else:
        wait_for_last(PDL)


@gluon.jit
def _down_kernel(
    x_desc,
    scale_desc,
    w_desc,
    steps_desc,
    order_ptr,
    blocks_ptr,
    unit_ptr,
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
    start_next(PDL)
    expert, first, end = _block(blocks_ptr)
    if expert >= 0:
        _run(
            (x_desc, scale_desc, w_desc, steps_desc),
            (out_ptr, order_ptr, D),
            unit_ptr,
            gl.multiple_of(first, 8),
            end,
            D // 64,
            I // 128,
            expert,
            0.0,
            _store_out,
            COLUMNS,
            TILES,
            STAGES,
            GROUPS,
            REGISTERS,
            PDL,
        )
    else:
        wait_for_last(PDL)


# --- Launch ---------------------------------------------------------------------------------------

BYTES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
NIBBLES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """Groups of warps in a program, and of either product: steps through the rows, tiles in the
    ring.
    """

    groups: int
    gate_up: tuple[int, int]
    down: tuple[int, int]


def weight_descriptors(w: Tensor, steps: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of folded weights and their words of four steps: a block of a tile's rows at a time."""
    return (
        TensorDescriptor.from_tensor(w.view(-1, 64), [64, 64], NIBBLES),
        TensorDescriptor.from_tensor(steps.view(-1, 64), [1, 64], WORDS),
    )


def _descriptors(
    x: Tensor, scale: Tensor, w: Tensor, steps: Tensor, columns: int
) -> tuple[TensorDescriptor, ...]:
    height = 32 if columns == 128 else min(columns, 64)  # of a box: 96 columns need three of 32
    return (
        TensorDescriptor.from_tensor(x, [height, 128], BYTES),
        TensorDescriptor.from_tensor(
            scale, [1, max(columns, 32)], WORDS
        ),  # 128 bytes: a tile's unit
        *weight_descriptors(w, steps),
    )


def _options(columns: int, groups: int, tiles: int, stages: int) -> dict[str, int]:
    """Registers a thread: at launch, and of each group of warps after the first then; the loader
    keeps 24, and the first group gets the rest: 104 of 64 at launch, with which four programs share
    a multiprocessor (two with 128: a fifth slower for 30 to 50 pairs an expert).
    """
    registers, at_launch = {1: (80, 64), 2: (232, 168), 4: (112, 96)}[groups]
    return {
        "num_warps": 4,
        "maxnreg": at_launch,
        "REGISTERS": registers,
        "COLUMNS": columns,
        "GROUPS": groups,
        "TILES": tiles,
        "STAGES": stages,
    }


def _cut(rows: int, groups: int, tiles: int) -> tuple[int, int, int]:
    """(groups of a program, its steps, programs) for an even number of tiles of rows: no more than
    asked for of either, and no rest.
    """
    groups = math.gcd(groups, rows)
    tiles = math.gcd(tiles, rows // groups)
    return groups, tiles, rows // (groups * tiles)


def gate_up(
    x: Tensor,
    x_scale: Tensor,
    order: Tensor,
    blocks: Tensor,
    w13: Tensor,
    steps13: Tensor,
    unit13: Tensor,
    weights: Tensor,
    hidden: Tensor,
    limit: float,
    columns: int,
    plan: HopperPlan,
) -> None:
    """hidden bfloat16 [P,I] of x E4M3 [P,D] and its scales [D/128,P]; P a multiple of 8.

    hidden is rounded to odd: what is to be rounded to E4M3 next loses nothing. That holds only
    because the routing weight is multiplied here, in float32.

    order [P]: each row's pair, a place in the routing weights [N,K]. blocks [B,3]: (expert, first
    row, end). The kernel before writes none of these three, and lets this one start when those
    before it have ended.
    """
    width, inner = x.shape[1], hidden.shape[1]
    groups, tiles, programs = _cut(inner // 32, plan.groups, plan.gate_up[0])
    _gate_up_kernel[(programs, len(blocks))](
        *_descriptors(x, x_scale, w13, steps13, columns),
        order,
        blocks,
        unit13,
        weights,
        hidden,
        width,
        inner,
        limit,
        **_options(columns, groups, tiles, plan.gate_up[1]),
        **early_launch(x),
    )


def down(
    hidden: Tensor,
    hidden_scale: Tensor,
    order: Tensor,
    blocks: Tensor,
    w2: Tensor,
    steps2: Tensor,
    unit2: Tensor,
    out: Tensor,
    columns: int,
    plan: HopperPlan,
) -> None:
    """out bfloat16 [pairs,D] of hidden E4M3 [P,I] and its scales [I/128,P]; as `gate_up`."""
    width, inner = out.shape[1], hidden.shape[1]
    groups, tiles, programs = _cut(width // 64, plan.groups, plan.down[0])
    _down_kernel[(programs, len(blocks))](
        *_descriptors(hidden, hidden_scale, w2, steps2, columns),
        order,
        blocks,
        unit2,
        out,
        width,
        inner,
        **_options(columns, groups, tiles, plan.down[1]),
        **early_launch(hidden),
    )
