"""The decoder of FP8 weights to bfloat16, and the rounding of activations, for Triton kernels.

A weight is E4M3 with a power-of-two scale for a block of 32x32. A value times its scale is exact in
bfloat16. The bits of a code, moved to where bfloat16 has exponent and mantissa, are the value times
2^-120, also of zeros and subnormal values. So one multiplication with a `factor`, a power of two,
gives the weight.

No helper reads a constant of a module: whether that were a part of a kernel's key would depend on
the order in which kernels are compiled (tests/ops/test_kernel_sources.py).

With ASM, the decoder takes 10 instructions for four values.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from finwhale.ops.linear.quantise_triton import round_e4m3


@triton.jit
def factor_of(scale, ASM: tl.constexpr):
    """The factors of values with float32 scales, which are powers of two.

    They are bfloat16 for the decoder with ASM, otherwise float32. Scales above 2^7 give infinity.
    """
    exponent = scale.to(tl.int32, bitcast=True) >> 23 & 0xFF
    field = tl.minimum(exponent + 120, 255)
    if ASM:
        return (field << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (field << 23).to(tl.float32, bitcast=True)


@triton.jit
def expand_e4m3(w, factor, ASM: tl.constexpr):
    """E4M3 bytes uint8 [R,C] times their factors [R,C], in bfloat16."""
    if ASM:
        # (b0, b1, b2, b3) -> bfloat16 pairs (b0, b1) and (b2, b3): a byte enters the upper half of
        # its 16 bits, and all but its sign moves down by 4.
        return tl.inline_asm_elementwise(
            """{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 c, a, 0x80008000, c, 0xea;
lop3.b32 d, b, 0x80008000, d, 0xea;
mul.rn.bf16x2 $0, c, $3;
mul.rn.bf16x2 $1, d, $4;
}""",
            "=r,=r,r,r,r",
            [w, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        w = w.to(tl.int32)
        bits = ((w & 0x7F) << 20) | ((w & 0x80) << 24)
        return (bits.to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)


@triton.jit
def round_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Round float32 x [ROWS,COLUMNS] to E4M3 with a power-of-two scale for 32 values of a row."""
    values, scale = round_e4m3(tl.reshape(x, [ROWS, COLUMNS // 32, 32]), 2)
    return tl.reshape(values.to(tl.float32) * scale[:, :, None], [ROWS, COLUMNS])
