"""Rounding of index queries and keys to FP4 in Triton kernels (rounding.scaled_fp4).

Several kernels share these functions, so the functions read no constants of this module: Triton
would make such a constant part of the cache key of only the kernel that it compiles first.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def scale_exponent(amax):
    """The exponent byte of a group's scale: amax / 6 rounded up to a power of two."""
    bits = tl.maximum(amax, 6.0 * 2.0**-126).to(tl.int32, bitcast=True)
    # Round up to 1.5 * 2^e, which is 6 * 2^(e-2).
    return ((bits + 0x3FFFFF) >> 23) - 2


@triton.jit
def round_to_scale(x, exponent):
    """Round x to e2m1 * 2^(exponent - 127), whose range must contain x; |x| < 2^100.

    A value with exponent e is rounded to a multiple of 2^(e-1), or of half the scale if that is
    larger. Adding and subtracting 1.5 * 2^(e+22) rounds this way, with ties to even.
    """
    step = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, exponent << 23)
    magic = (step + ((22 << 23) + 0x400000)).to(tl.float32, bitcast=True)
    return (x + magic) - magic
