"""Functions of the experts' kernels for Hopper GPUs: decoder, ring buffers, SwiGLU, in Gluon.

experts_layout.py describes the layout of the weights.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NIBBLES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
# Starting a program of the down GEMM costs as much as about four blocks of weights. So with a short
# I, a program takes up to MAX_STEPS steps, as long as it loads at most DOWN_BLOCKS blocks for each
# step that it takes when one rank holds all of I.
DOWN_BLOCKS = 16
MAX_STEPS = 8


@gluon.jit
def _decode_group(w, first, second):
    """Decode w uint8 [64,32]; first and second [64,1] are the table shifts of the two halves."""
    # This function reads no constants of the module: with one, Triton's cache key of a kernel would
    # depend on which kernel used the function first.
    # $2: eight codes; $3, $7: the table of the first four; $11, $15: of the second four. Because of
    # pack=4, each 32-bit argument occurs four times in a row.
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
    """Concatenate two [64,WIDTH/2] to [64,WIDTH]."""
    both = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [64, WIDTH])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def decode(w_tile, exponent_bits_tile, LAYOUT: gl.constexpr):
    """Decode 128 values of 64 rows to E4M3, as the tensor cores' left operand."""
    w = gl.permute(gl.reshape(w_tile.load(LAYOUT), [64, 2, 32]), (0, 2, 1))
    left, right = gl.split(w)
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
    exponent_bits = gl.expand_dims(exponent_bits_tile.load(gl.SliceLayout(1, LAYOUT)), 1)
    a, c = _decode_group(left, exponent_bits & 0xFF, (exponent_bits >> 16) & 0xFF)
    b, d = _decode_group(right, (exponent_bits >> 8) & 0xFF, (exponent_bits >> 24) & 0xFF)
    values = _beside(_beside(a, b, 64, LAYOUT), _beside(c, d, 64, LAYOUT), 128, LAYOUT)
    return values.to(gl.float8e4nv, bitcast=True)


@gluon.constexpr_function
def mma(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])


@gluon.jit
def swiglu(total, limit):
    """The clamped SwiGLU [32,C] of [64,C], whose rows alternate: eight of w1, eight of w3."""
    columns: gl.constexpr = total.shape[1]
    both = gl.permute(gl.reshape(total, [4, 2, 8, columns]), (0, 2, 3, 1))
    gate, up = gl.split(both)
    gate = gl.minimum(gate, limit)
    up = gl.minimum(gl.maximum(up, -limit), limit)
    return gl.reshape(gate / (1.0 + _exp_of_minus(gate)) * up, [32, columns])


@gluon.jit
def _exp_of_minus(x):
    """exp(-x), or 0 if that is below 2^-126.

    1 + exp(-x) is the same, and `gl.exp` takes four more instructions. The end of a program runs
    once, so fetching its instructions takes longer than running them.
    """
    asm: gl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    x = x * -1.4426950408889634
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def to_odd(x):
    """Round float32 x to bfloat16 "to odd": set the last bit if any dropped bit was set.

    Rounding the result to E4M3, which has four bits less, equals rounding x itself. No x crosses
    the boundary between two scales, because a boundary is 448 times a power of two, which bfloat16
    represents. test_rounding_to_odd.py checks the smallest amax and 1/448 rounded to float32.
    """
    bits = x.to(gl.int32, bitcast=True)
    bits = (bits | ((bits & 0xFFFF) + 0xFFFF)) >> 16
    return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def ring(desc, SIZE: gl.constexpr, HEIGHT: gl.constexpr):
    shape: gl.constexpr = [SIZE, HEIGHT, desc.block_type.shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) barriers of a ring that one warp fills and READERS groups of warps read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    fence_async_shared()  # make the initialised barriers visible to TMA
    return full, empty


@gluon.jit
def after(slot, phase, STAGES: gl.constexpr):
    """The ring's next slot, and its phase."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def release(empty, slot):
    """Let the ring's slot be filled again.

    Loads from the slot may still wait behind loads of other warps. Without the fence, the TMA copy
    that refills this slot overtook some of them on an H200, in rare cases.
    """
    fence_async_shared()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def power_of_two(amax, TOP: gl.constexpr):
    """The least power of two that is not less than amax / TOP, and its inverse."""
    bits = ((amax * (1.0 / TOP)).to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(gl.float32, bitcast=True), (0x7F000000 - bits).to(gl.float32, bitcast=True)


def weight_descriptors(
    w: Tensor, exponent_bits: Tensor, blocks: int = 1
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of tiled weights and their exponent bits.

    Args:
        blocks: number of adjacent blocks, each of 64 rows and 128 columns, in a box.
    """
    return (
        TensorDescriptor.from_tensor(w.view(-1, 64), [64 * blocks, 64], NIBBLES),
        TensorDescriptor.from_tensor(exponent_bits.view(-1, 64), [blocks, 64], WORDS),
    )


def down_steps(steps: int, inner: int) -> int:
    """Steps of a program through the rows of w2: more for a short I, as on one of several ranks.

    Args:
        steps: number of steps when one rank holds all of I.
        inner: this rank's I.
    """
    most, blocks = steps * DOWN_BLOCKS, inner // 128
    while 2 * steps <= MAX_STEPS and 2 * steps * blocks <= most:
        steps *= 2
    return steps
