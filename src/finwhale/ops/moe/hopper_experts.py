"""The two products of the routed experts on Hopper GPUs, in Gluon.

The legend and the weights' layout are triton_experts.py's. A program has one or two groups of four
warps, each with 64 rows of weights, and a warp that fills a ring of tiles through the copy engine.
Weights go from the ring to registers, are decoded there, and enter the tensor cores from there,
while the next tile is being decoded.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# $2: eight values; $3, $7: the table of the first four; $11, $15: of the second four. Arguments of
# 32 bits come once for each of the four bytes.
DECODE = gl.constexpr("""{
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
}""")
OPERANDS = gl.constexpr("=&r,=&r" + ",r" * 17)


@gluon.jit
def _decode_group(w, first, second):
    """w uint8 [64,32]; first and second [64,1]: what shifts the table of either half's values."""
    first_low, _ = gl.broadcast(0x14100800 + first * 0x01010100, w)
    first_high, _ = gl.broadcast(0x24201C18 + first * 0x01010101, w)
    second_low, _ = gl.broadcast(0x14100800 + second * 0x01010100, w)
    second_high, _ = gl.broadcast(0x24201C18 + second * 0x01010101, w)
    return gl.inline_asm_elementwise(
        DECODE,
        OPERANDS,
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
def _decode(w_tile, steps_tile, LAYOUT: gl.constexpr):
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
    x_desc,
    w_desc,
    steps_desc,
    rings,
    first,
    tile,
    blocks,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    x_ring, w_ring, steps_ring, full, empty = rings
    size: gl.constexpr = x_desc.block_type.nbytes + GROUPS * (64 * 64 + 64 * 4)
    slot = 0
    phase = 1
    for k in range(blocks):
        mbarrier.wait(empty.index(slot), phase)
        ready = full.index(slot)
        mbarrier.expect(ready, size)
        for group in gl.static_range(GROUPS):
            chunk = (tile + group) * blocks + k
            place = slot * GROUPS + group
            tma.async_copy_global_to_shared(w_desc, [chunk * 64, 0], ready, w_ring.index(place))
            tma.async_copy_global_to_shared(steps_desc, [chunk, 0], ready, steps_ring.index(place))
        tma.async_copy_global_to_shared(x_desc, [first, k * 128], ready, x_ring.index(slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1


@gluon.jit
def _multiply(
    rings,
    x_scale_ptr,
    first,
    blocks,
    stride,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    MMA: gl.constexpr,
):
    """w x^T [64,COLUMNS] in units of the rows: sums over 128 values, then over these."""
    x_ring, w_ring, steps_ring, full, empty = rings
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
    scale_ptrs = x_scale_ptr + first + column
    zero = gl.full([64, COLUMNS], 0.0, gl.float32, MMA)
    total = zero
    steps_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slot = 0
    phase = 0
    for k in range(blocks):
        mbarrier.wait(full.index(slot), phase)
        place = slot * GROUPS + GROUP
        steps = steps_ring.index(place)._reinterpret(gl.int32, [64], steps_layout)
        a = _decode(w_ring.index(place), steps, operand)
        x = x_ring.index(slot).permute((1, 0))
        part = warpgroup_mma(a, x, zero, use_acc=False, is_async=True)
        scale = gl.load(scale_ptrs + k * stride)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(slot), count=1)
        total += part * gl.expand_dims(scale, 0)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    return total


@gluon.jit
def _gate_up_group(
    rings,
    x_scale_ptr,
    unit_ptr,
    hidden_ptr,
    first,
    end,
    tile,
    row,
    D,
    I,  # noqa: E741
    stride,
    limit,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    total = _multiply(
        rings,
        x_scale_ptr,
        first,
        D // 128,
        stride,
        COLUMNS,
        STAGES,
        GROUPS,
        GROUP,
        mma,
    )
    unit_ptr += (tile + GROUP) * 64
    unit = gl.load(unit_ptr + gl.arange(0, 64, gl.SliceLayout(1, mma)))
    total *= gl.expand_dims(unit, 1)
    both = gl.permute(gl.reshape(total, [4, 2, 8, COLUMNS]), (0, 2, 3, 1))
    gate, up = gl.split(both)
    gate = gl.minimum(gate, limit)
    up = gl.minimum(gl.maximum(up, -limit), limit)
    hidden = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [32, COLUMNS])
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    hidden = gl.convert_layout(hidden, layout)
    place = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    i = (row + GROUP) * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
    target = hidden_ptr + gl.expand_dims(place.to(gl.int64) * I, 0) + gl.expand_dims(i, 1)
    gl.store(target, hidden, mask=gl.expand_dims(place < end, 0))


@gluon.jit
def _down_group(
    rings,
    x_scale_ptr,
    unit_ptr,
    order_ptr,
    weights_ptr,
    out_ptr,
    first,
    end,
    tile,
    row,
    D,
    I,  # noqa: E741
    stride,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    total = _multiply(
        rings,
        x_scale_ptr,
        first,
        I // 128,
        stride,
        COLUMNS,
        STAGES,
        GROUPS,
        GROUP,
        mma,
    )
    unit_ptr += (tile + GROUP) * 64
    unit = gl.load(unit_ptr + gl.arange(0, 64, gl.SliceLayout(1, mma)))
    total *= gl.expand_dims(unit, 1)
    column: gl.constexpr = gl.SliceLayout(0, mma)
    place = first + gl.arange(0, COLUMNS, column)
    pair = gl.load(order_ptr + place, mask=place < end, other=0)
    total *= gl.expand_dims(gl.load(weights_ptr + pair), 0)
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    total = gl.convert_layout(total.to(gl.bfloat16), layout)
    place = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pair = gl.load(order_ptr + place, mask=place < end, other=0).to(gl.int64)
    d = (row + GROUP) * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    target = out_ptr + gl.expand_dims(pair * D, 0) + gl.expand_dims(d, 1)
    gl.store(target, total, mask=gl.expand_dims(place < end, 0))


@gluon.jit
def _ring(desc, SIZE: gl.constexpr):
    shape: gl.constexpr = [SIZE, desc.block_type.shape[0], desc.block_type.shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def _rings(
    x_desc,
    w_desc,
    steps_desc,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    x_ring = _ring(x_desc, STAGES)
    w_ring = _ring(w_desc, STAGES * GROUPS)
    steps_ring = _ring(steps_desc, STAGES * GROUPS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return x_ring, w_ring, steps_ring, full, empty


@gluon.jit
def _gate_up_kernel(
    x_desc,
    x_scale_ptr,
    blocks_ptr,
    w_desc,
    steps_desc,
    unit_ptr,
    hidden_ptr,
    stride,
    D,
    I,  # noqa: E741
    limit,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """clamped SwiGLU of 32 rows of w1 and of w3 a group of warps, for a block of pairs."""
    entry = blocks_ptr + gl.program_id(1) * 3
    expert = gl.load(entry)
    if expert >= 0:
        first = gl.load(entry + 1)
        end = gl.load(entry + 2)
        row = gl.program_id(0) * GROUPS
        tile = expert * (I // 32) + row
        rings = _rings(x_desc, w_desc, steps_desc, STAGES, GROUPS)
        blocks = D // 128
        if GROUPS == 2:
            gl.warp_specialize(
                [
                    (
                        _gate_up_group,
                        (
                            rings,
                            x_scale_ptr,
                            unit_ptr,
                            hidden_ptr,
                            first,
                            end,
                            tile,
                            row,
                            D,
                            I,
                            stride,
                            limit,
                            COLUMNS,
                            STAGES,
                            GROUPS,
                            0,
                        ),
                    ),
                    (
                        _gate_up_group,
                        (
                            rings,
                            x_scale_ptr,
                            unit_ptr,
                            hidden_ptr,
                            first,
                            end,
                            tile,
                            row,
                            D,
                            I,
                            stride,
                            limit,
                            COLUMNS,
                            STAGES,
                            GROUPS,
                            1,
                        ),
                    ),
                    (
                        _load,
                        (x_desc, w_desc, steps_desc, rings, first, tile, blocks, STAGES, GROUPS),
                    ),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (
                        _gate_up_group,
                        (
                            rings,
                            x_scale_ptr,
                            unit_ptr,
                            hidden_ptr,
                            first,
                            end,
                            tile,
                            row,
                            D,
                            I,
                            stride,
                            limit,
                            COLUMNS,
                            STAGES,
                            GROUPS,
                            0,
                        ),
                    ),
                    (
                        _load,
                        (x_desc, w_desc, steps_desc, rings, first, tile, blocks, STAGES, GROUPS),
                    ),
                ],
                [1],
                [24],
            )


@gluon.jit
def _down_kernel(
    x_desc,
    x_scale_ptr,
    order_ptr,
    blocks_ptr,
    w_desc,
    steps_desc,
    unit_ptr,
    weights_ptr,
    out_ptr,
    stride,
    D,
    I,  # noqa: E741
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """out[pair] = weight * w2 hidden, 64 rows a group of warps, for a block of pairs."""
    entry = blocks_ptr + gl.program_id(1) * 3
    expert = gl.load(entry)
    if expert >= 0:
        first = gl.load(entry + 1)
        end = gl.load(entry + 2)
        row = gl.program_id(0) * GROUPS
        tile = expert * (D // 64) + row
        rings = _rings(x_desc, w_desc, steps_desc, STAGES, GROUPS)
        blocks = I // 128
        if GROUPS == 2:
            gl.warp_specialize(
                [
                    (
                        _down_group,
                        (
                            rings,
                            x_scale_ptr,
                            unit_ptr,
                            order_ptr,
                            weights_ptr,
                            out_ptr,
                            first,
                            end,
                            tile,
                            row,
                            D,
                            I,
                            stride,
                            COLUMNS,
                            STAGES,
                            GROUPS,
                            0,
                        ),
                    ),
                    (
                        _down_group,
                        (
                            rings,
                            x_scale_ptr,
                            unit_ptr,
                            order_ptr,
                            weights_ptr,
                            out_ptr,
                            first,
                            end,
                            tile,
                            row,
                            D,
                            I,
                            stride,
                            COLUMNS,
                            STAGES,
                            GROUPS,
                            1,
                        ),
                    ),
                    (
                        _load,
                        (x_desc, w_desc, steps_desc, rings, first, tile, blocks, STAGES, GROUPS),
                    ),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (
                        _down_group,
                        (
                            rings,
                            x_scale_ptr,
                            unit_ptr,
                            order_ptr,
                            weights_ptr,
                            out_ptr,
                            first,
                            end,
                            tile,
                            row,
                            D,
                            I,
                            stride,
                            COLUMNS,
                            STAGES,
                            GROUPS,
                            0,
                        ),
                    ),
                    (
                        _load,
                        (x_desc, w_desc, steps_desc, rings, first, tile, blocks, STAGES, GROUPS),
                    ),
                ],
                [1],
                [24],
            )


# --- Launch ---------------------------------------------------------------------------------------

# Registers a thread of the second group of warps; the first gets what is left, a little more.
REGISTERS = 232
BYTES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
NIBBLES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _descriptors(
    x: Tensor, w: Tensor, steps: Tensor, columns: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    return (
        TensorDescriptor.from_tensor(x, [columns, 128], BYTES),
        TensorDescriptor.from_tensor(w.view(-1, 64), [64, 64], NIBBLES),
        TensorDescriptor.from_tensor(steps.view(-1, 64), [1, 64], WORDS),
    )


def _options(columns: int, groups: int) -> dict[str, int]:
    """Without a limit a program of one group takes every register, and a multiprocessor one."""
    options = {"num_warps": 4, "REGISTERS": REGISTERS, "COLUMNS": columns, "GROUPS": groups}
    if groups == 1:
        options["maxnreg"] = 64 if columns <= 32 else 128
    return options


def gate_up(
    x: Tensor,
    x_scale: Tensor,
    blocks: Tensor,
    w13: Tensor,
    steps13: Tensor,
    unit13: Tensor,
    hidden: Tensor,
    limit: float,
    columns: int,
    groups: int,
    stages: int,
) -> None:
    """hidden float32 [P,I] of x E4M3 [P,D] and its scales [D/128,P or more]."""
    x_desc, w_desc, steps_desc = _descriptors(x, w13, steps13, columns)
    width, inner = x.shape[1], hidden.shape[1]
    _gate_up_kernel[(inner // (32 * groups), len(blocks))](
        x_desc,
        x_scale,
        blocks,
        w_desc,
        steps_desc,
        unit13,
        hidden,
        x_scale.stride(0),
        width,
        inner,
        limit,
        STAGES=stages,
        **_options(columns, groups),
    )


def down(
    hidden: Tensor,
    hidden_scale: Tensor,
    order: Tensor,
    blocks: Tensor,
    w2: Tensor,
    steps2: Tensor,
    unit2: Tensor,
    weights: Tensor,
    out: Tensor,
    columns: int,
    groups: int,
    stages: int,
) -> None:
    """out bfloat16 [P,D] of hidden E4M3 [P,I] and its scales [I/128,P or more]."""
    x_desc, w_desc, steps_desc = _descriptors(hidden, w2, steps2, columns)
    width, inner = out.shape[1], hidden.shape[1]
    _down_kernel[(width // (64 * groups), len(blocks))](
        x_desc,
        hidden_scale,
        order,
        blocks,
        w_desc,
        steps_desc,
        unit2,
        weights,
        out,
        hidden_scale.stride(0),
        width,
        inner,
        STAGES=stages,
        **_options(columns, groups),
    )
