"""What stands around sparse attention, as Triton kernels: query, window row, inverse rope.

Bytes a token, with values of 2 bytes, A heads of C values, R of them rope: `prepare_query` 4 A C,
`inverse_rope` 4 A R (it touches nothing else), `store_window` 4 C. Floors of 8192 tokens at 4.39
TB/s, Flash (A 64, C 512, R 64) and Pro (A 128), in microseconds: 245 and 489, 31 and 61, 4 and 4;
those of a few tokens are the launch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP

VALUES_PER_PROGRAM = 2048
MAX_HEAD_DIM = 4096


@triton.jit
def rotate(x, rotation_ptr, C, R, SIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rotate the interleaved pairs of the last R of C columns of x [ROWS, BLOCK_C], one token's."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK_C // 2, 2]))
    pair = tl.arange(0, BLOCK_C // 2) - (C - R) // 2
    is_rope = (pair >= 0) & (pair < R // 2)
    cos = tl.load(rotation_ptr + 2 * pair, mask=is_rope, other=1.0)[None, :]
    sin = SIGN * tl.load(rotation_ptr + 2 * pair + 1, mask=is_rope, other=0.0)[None, :]
    rotated_even = tl.where(is_rope[None, :], even * cos - odd * sin, even)
    rotated_odd = tl.where(is_rope[None, :], odd * cos + even * sin, odd)
    return tl.reshape(tl.join(rotated_even, rotated_odd), [ROWS, BLOCK_C])


@triton.jit
def round_e4m3(x):
    """x [groups, values] as rounding.round_e4m3, a group a row, without float8 instructions.

    A value with exponent e, at least -6, is rounded to a multiple of 2^(e-3) by adding 1.5 times
    2^(e+20), whose last bit is that, and taking it away again; a zero keeps its sign.
    """
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    scale_bits = ((bits + 0x7FFFFF) & 0x7F800000)[:, None]
    scale = scale_bits.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - scale_bits).to(tl.float32, bitcast=True)
    value = x * inverse
    value_bits = value.to(tl.int32, bitcast=True)
    exponent = tl.maximum(value_bits & 0x7F800000, (127 - 6) << 23)
    magic = (exponent + ((20 << 23) + 0x400000)).to(tl.float32, bitcast=True)
    rounded = ((value + magic) - magic).to(tl.int32, bitcast=True) | (value_bits & -0x80000000)
    return rounded.to(tl.float32, bitcast=True) * scale


@triton.jit
def _prepare_query_kernel(
    q_ptr,
    rotation_ptr,
    A,
    C,
    R,
    stride_n,
    stride_a,
    eps,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    columns = tl.arange(0, BLOCK_C)
    mask = (heads < A)[:, None] & (columns < C)[None, :]
    place = q_ptr + token * stride_n + heads[:, None] * stride_a + columns[None, :]
    q = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=1) / C + eps)[:, None]
    q = rotate(q, rotation_ptr + token * R, C, R, 1.0, BLOCK_A, BLOCK_C)
    tl.store(place, q.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inverse_rope_kernel(
    o_ptr,
    rotation_ptr,
    A,
    C,
    R,
    stride_n,
    stride_a,
    BLOCK_A: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    columns = tl.arange(0, BLOCK_R)
    mask = (heads < A)[:, None] & (columns < R)[None, :]
    place = o_ptr + token * stride_n + heads[:, None] * stride_a + (C - R) + columns[None, :]
    o = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    o = rotate(o, rotation_ptr + token * R, R, R, -1.0, BLOCK_A, BLOCK_R)
    tl.store(place, o.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_window_kernel(
    kv_ptr,
    norm_ptr,
    rotation_ptr,
    rows_ptr,
    slots_ptr,
    C,
    R,
    stride_kv,
    stride_rows,
    eps,
    ROUND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    columns = tl.arange(0, BLOCK_C)
    mask = columns < C
    kv = tl.load(kv_ptr + token * stride_kv + columns, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    row = kv * tl.rsqrt(tl.sum(kv * kv) / C + eps) * norm
    row = tl.reshape(
        rotate(row[None, :], rotation_ptr + token * R, C, R, 1.0, 1, BLOCK_C), [BLOCK_C]
    )
    if ROUND:
        is_nope = columns < C - R
        nope = tl.reshape(tl.where(is_nope, row, 0.0), [BLOCK_C // GROUP, GROUP])
        row = tl.where(is_nope, tl.reshape(round_e4m3(nope), [BLOCK_C]), row)
    tl.store(rows_ptr + slot * stride_rows + columns, row.to(rows_ptr.dtype.element_ty), mask=mask)


# --- Launch ---------------------------------------------------------------------------------------


def check_heads(heads_NAC: Tensor, rotation_NR: Tensor) -> None:
    width, rope = heads_NAC.shape[-1], 2 * rotation_NR.shape[1]
    if width % 2 or width > MAX_HEAD_DIM or rope > width:
        raise ValueError(
            f"a head must have an even number of values up to {MAX_HEAD_DIM}, its rope no more "
            f"than that: got {width} and {rope}"
        )
    if heads_NAC.stride(-1) != 1:
        raise ValueError(f"a head's values must lie together, got {heads_NAC.stride()}")
    if not rotation_NR.is_contiguous():
        raise ValueError(f"rotation must be contiguous, got strides {rotation_NR.stride()}")


def prepare_query(q_NAC: Tensor, rotation_NR: Tensor, eps: float) -> Tensor:
    """In place: returns q."""
    check_heads(q_NAC, rotation_NR)
    num_tokens, heads, width = q_NAC.shape
    if q_NAC.numel() == 0:
        return q_NAC
    block_c = triton.next_power_of_2(width)
    block_a = max(1, VALUES_PER_PROGRAM // block_c)
    _prepare_query_kernel[(num_tokens, triton.cdiv(heads, block_a))](
        q_NAC,
        rotation_NR,
        heads,
        width,
        2 * rotation_NR.shape[1],
        q_NAC.stride(0),
        q_NAC.stride(1),
        eps,
        BLOCK_A=block_a,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return q_NAC


def inverse_rope(o_NAC: Tensor, rotation_NR: Tensor) -> Tensor:
    """In place: returns o."""
    check_heads(o_NAC, rotation_NR)
    num_tokens, heads, width = o_NAC.shape
    rope = 2 * rotation_NR.shape[1]
    if o_NAC.numel() == 0 or rope == 0:
        return o_NAC
    block_r = triton.next_power_of_2(rope)
    block_a = max(1, VALUES_PER_PROGRAM // block_r)
    _inverse_rope_kernel[(num_tokens, triton.cdiv(heads, block_a))](
        o_NAC,
        rotation_NR,
        heads,
        width,
        rope,
        o_NAC.stride(0),
        o_NAC.stride(1),
        BLOCK_A=block_a,
        BLOCK_R=block_r,
        num_warps=4,
    )
    return o_NAC


def store_window(
    kv_NC: Tensor,
    norm_C: Tensor,
    rotation_NR: Tensor,
    eps: float,
    round_nope: bool,
    rows_PC: Tensor,
    slots_N: Tensor,
) -> None:
    check_heads(kv_NC, rotation_NR)
    check_heads(rows_PC, rotation_NR)
    num_tokens, width = kv_NC.shape
    if num_tokens == 0:
        return
    block_c = max(NOPE_GROUP, triton.next_power_of_2(width))
    _store_window_kernel[(num_tokens,)](
        kv_NC,
        norm_C,
        rotation_NR,
        rows_PC,
        slots_N,
        width,
        2 * rotation_NR.shape[1],
        kv_NC.stride(0),
        rows_PC.stride(0),
        eps,
        ROUND=round_nope,
        GROUP=NOPE_GROUP,
        BLOCK_C=block_c,
        num_warps=max(1, block_c // 512),
    )
