"""Rotary embedding in Triton kernels: the last R of C columns, in interleaved pairs.

`rotation` is a function of its own, so that a kernel can load it before it waits for the kernel
before it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def rotation(rotary_ptr, FIRST, C, R, X: tl.constexpr):
    """Load the cosines and sines [X/2] of X columns from FIRST on; 1 and 0 before the last R."""
    pair = tl.arange(0, X // 2) + (FIRST - (C - R)) // 2
    is_rope = (pair >= 0) & (pair < R // 2)
    cos = tl.load(rotary_ptr + 2 * pair, mask=is_rope, other=1.0)
    return cos, tl.load(rotary_ptr + 2 * pair + 1, mask=is_rope, other=0.0)


@triton.jit
def rotate_row(x, cos, sin, X: tl.constexpr):
    """Rotate x [X]."""
    even, odd = tl.split(tl.reshape(x, [X // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [X])
