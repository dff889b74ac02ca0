"""Decoders of FP8 and FP4 weights to bfloat16, and the rounding of activations, for Triton kernels.

A weight is E4M3 with a power-of-two scale for a block of 32x32, or e2m1 with one for each 32 values
of a row. A value times its scale is exact in bfloat16. The bits of a code, moved to where bfloat16
has exponent and mantissa, are the value times 2^-120 (E4M3) or 2^-126 (e2m1), also of zeros and
subnormal values. So one multiplication with a `factor`, a power of two, gives the weight.

No helper reads a constant of a module: whether that were a part of a kernel's key would depend on
the order in which kernels are compiled (tests/ops/test_kernel_sources.py).

With ASM, a decoder takes 10 instructions for four E4M3 values, and 15 for eight e2m1 values.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from finwhale.ops.linear.quantise_triton import round_e4m3


@triton.jit
def factor_of(exponent, BIAS: tl.constexpr, ASM: tl.constexpr):
    """The factor of values with the scale 2^(exponent - 127).

    It is bfloat16 for the decoders with ASM, otherwise float32. Scales above 2^(127 - BIAS) give
    infinity.
    """
    field = tl.minimum(exponent + BIAS, 255)
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
def expand_e2m1(w, factor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """The values of e2m1 codes, as bytes [ROWS,COLUMNS], times their factors [ROWS,COLUMNS].

    Returns the first halves and the second halves of the groups, in bfloat16.
    """
    if ASM:
        # Eight e2m1 codes -> the pairs (0, 1), (2, 3), (16, 17) and (18, 19) of a group, if they
        # are those of its first word. Both halves of the word have the sign and the magnitude of
        # their first three codes at the same distance as in bfloat16: at 15 and 8-6, 12 and 5-3, 9
        # and 2-0. The fourth code fills the gaps: its exponent is at 14-13, its mantissa at 11, its
        # sign at 10.
        # A result depends on all bytes of its word, so a thread must hold whole words in order. It
        # does, as it loads them; with is_pure, Triton might move the instructions behind a change
        # of layout.
        return tl.inline_asm_elementwise(
            """{
.reg .b32 a, b, c, d, e;
and.b32 a, $4, 0x81c081c0;
shl.b32 b, $4, 3;
shl.b32 c, $4, 6;
shr.u32 d, $4, 6;
and.b32 b, b, 0x81c081c0;
and.b32 c, c, 0x81c081c0;
and.b32 d, d, 0x01800180;
shr.u32 e, $4, 5;
lop3.b32 d, e, 0x00400040, d, 0xea;
shl.b32 e, $4, 5;
lop3.b32 d, e, 0x80008000, d, 0xea;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $6;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $6;
}""",
            "=r,=r,=r,=r,r,r,r",
            [w, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=False,
            pack=4,
        )
    else:
        i = tl.arange(0, 4)[None, None, :]
        bytes = tl.reshape(w.to(tl.int32), [ROWS, COLUMNS // 4, 4])
        word = tl.sum(bytes << 8 * i, axis=2)[:, :, None] >> i % 2 * 16
        fourth = ((word >> 6) & 0x180) | ((word >> 5) & 0x40) | ((word << 5) & 0x8000)
        first = tl.where(i < 2, word, word << 3) & 0x81C0
        second = tl.where(i < 2, (word << 6) & 0x81C0, fourth)
        first = tl.reshape(first << 16, [ROWS, COLUMNS]).to(tl.float32, bitcast=True)
        second = tl.reshape(second << 16, [ROWS, COLUMNS]).to(tl.float32, bitcast=True)
        return (first * factor).to(tl.bfloat16), (second * factor).to(tl.bfloat16)


@triton.jit
def round_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Round float32 x [ROWS,COLUMNS] to E4M3 with a power-of-two scale for 32 values of a row."""
    values, scale = round_e4m3(tl.reshape(x, [ROWS, COLUMNS // 32, 32]), 2)
    return tl.reshape(values.to(tl.float32) * scale[:, :, None], [ROWS, COLUMNS])


@triton.jit
def swiglu_rows(total, weights, limit, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """The rounded hidden values bfloat16 [BLOCK,COLUMNS] of float32 [2 BLOCK,COLUMNS].

    The rows alternate, eight of w1 and eight of w3, so that a thread holds both. A scale is that of
    32 rows of a column. weights: [COLUMNS], which multiply before the rounding.
    """
    both = tl.reshape(total, [BLOCK // 8, 2, 8, COLUMNS])
    gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    hidden = gate / (1.0 + tl.exp(-gate)) * up * weights[None, None, :]
    values, scale = round_e4m3(tl.reshape(hidden, [BLOCK // 32, 32, COLUMNS]), 1)
    hidden = values.to(tl.float32) * scale[:, None, :]
    return tl.reshape(hidden, [BLOCK, COLUMNS]).to(tl.bfloat16)
