"""The indexer's queries as a Triton kernel: rope, Hadamard rotation and rounding to FP4.

A program has one token. In a decode of few tokens the kernel runs while the compressors compute the
last inputs of the scores.

A rounded query is stored as E4M3. The exponents of its groups' scales move into its values,
relative to the largest one, which becomes a factor of the head. This is exact, except that a group
underflows if its scale is less than 2^-12 of its head's largest scale. It changes a product with a
key by less than 2^-13 of the largest one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.indexer import RATIO, IndexQueries
from finwhale.ops.indexer.fp4_triton import round_to_scale, scale_exponent
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.paging import Tokens
from finwhale.ops.rounding import FP4_GROUP

# Rows of the GEMM that rotates a query: fewer rows would use an instruction of another shape, and
# sums could differ in their last bits.
MIN_HEADS = 64
GROUP = tl.constexpr(FP4_GROUP)
# E4M3 holds values times 2^TOP relative to the largest scale: the largest e2m1 value, 6, is 384.
TOP = tl.constexpr(6)


@triton.jit
def _signs(C: tl.constexpr):
    """The Hadamard matrix of C <= 128 without its factor, in bfloat16.

    The entry at (i, j) is negative if i and j have an odd number of common bits. A thread's rows
    are known at compile time, so an entry differs from the one above it by one bit only.
    """
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    signs = 0x3F80 + tl.zeros([C, C], tl.int32)
    for i in tl.static_range(7):
        signs ^= ((row >> (6 - i)) & 1) * ((column << (9 + i)) & 0x8000)
    return signs.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_angles(rotary_ptr, position, C: tl.constexpr, R: tl.constexpr):
    """Cosines and sines [1, C/2] of a position's pairs of columns; 1 and 0 before the rope."""
    column = tl.arange(0, C)
    # Cosines in even columns, sines in odd ones.
    rope = column - (C - R)
    angle_ptr = rotary_ptr + tl.maximum(position, 0) * R + rope
    angles = tl.load(angle_ptr, mask=rope >= 0, other=0.0)
    angles = tl.where(rope < 0, (1 - column % 2).to(tl.float32), angles)
    return tl.split(tl.reshape(angles, [1, C // 2, 2]))


@triton.jit
def rotate_heads(q, cos, sin):
    """Rotate heads q [I, C]; in the dtype of q."""
    dtype: tl.constexpr = q.dtype
    even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]).to(tl.float32))
    even, odd = (even * cos - odd * sin).to(dtype), (odd * cos + even * sin).to(dtype)
    return tl.reshape(tl.join(even, odd), q.shape)


@triton.jit
def _prepare_queries_kernel(
    q_ptr,
    rotary_ptr,
    positions_ptr,
    out_ptr,
    factors_ptr,
    topk,
    I,  # noqa: E741
    stride_qn,
    stride_qi,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prepare the queries of one token, unless it sees at most topk entries.

    out [N,I,C]: E4M3 bytes, with columns in the order of `_unpacked` in select_entries_triton.py.
    factors [N,I]: half of the heads' factors.
    """
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    column = tl.arange(0, C)
    cos, sin = load_angles(rotary_ptr, position, C, R)
    signs = _signs(C).to(q_ptr.dtype.element_ty)
    wait_for_last(PDL)
    if (position + 1) // RATIO <= topk:
        return

    head = tl.arange(0, BLOCK_I)
    there = head < I
    row_ptr = q_ptr + token * stride_qn + head[:, None] * stride_qi
    q = tl.load(row_ptr + column[None, :], mask=there[:, None], other=0.0)
    rotated = tl.dot(rotate_heads(q, cos, sin), signs, input_precision="ieee") * SHARE

    x = tl.reshape(rotated, [BLOCK_I, C // GROUP, GROUP])
    exponent = scale_exponent(tl.max(tl.abs(x), axis=2))
    # The lower bound makes the powers of two below normal numbers.
    largest = tl.maximum(tl.max(exponent, axis=1), TOP + 2)
    factor = ((254 - (largest - TOP)) << 23).to(tl.float32, bitcast=True)[:, None, None]
    x = round_to_scale(x, exponent[:, :, None]) * factor
    if ASM:
        x = tl.reshape(x, [BLOCK_I, C // GROUP, GROUP // 8, 2, 4])
        x = tl.permute(x, [0, 1, 3, 2, 4])
    x = tl.reshape(x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), [BLOCK_I, C])
    tl.store(out_ptr + (token * I + head[:, None]) * C + column[None, :], x, mask=there[:, None])
    half = ((largest - TOP - 1) << 23).to(tl.float32, bitcast=True)
    tl.store(factors_ptr + token * I + head, half, mask=there)


def check_heads(q_NIC: Tensor, rope: int) -> None:
    width = q_NIC.shape[2]
    if width not in (32, 64, 128) or rope > width or q_NIC.stride(2) != 1:
        raise ValueError(
            f"index heads must have 32, 64 or 128 contiguous values, rope at most all of them: "
            f"got {tuple(q_NIC.shape)}, strides {q_NIC.stride()}, rope {rope}"
        )


def block_heads(heads: int) -> int:
    """Heads of a program, with those that pad them."""
    padded: int = triton.next_power_of_2(heads)
    return max(MIN_HEADS, padded)


def prepare_index_queries(
    q_NIC: Tensor,
    rotary_LR: Tensor,
    tokens: Tokens,
    topk: int,
    round_query: bool,
    *,
    inline_asm: bool = False,
    early_launch: bool = False,
) -> IndexQueries:
    """Prepare queries for select_entries_triton.py: E4M3 bytes [N,I,C] and factors [N,I] float32.

    The memory of tokens that see at most topk entries stays uninitialised.

    inline_asm: as in `select_entries`; it determines the order of the columns.
    early_launch: the kernel launches early (ops/launch/early_launch.py).
    """
    num_tokens, heads, width = q_NIC.shape
    rope = 2 * rotary_LR.shape[1]
    if not round_query:
        raise ValueError("these kernels score rounded queries, got round_query False")
    check_heads(q_NIC, rope)
    if num_tokens == 0 or tokens.max_len // RATIO <= topk:
        return IndexQueries(q_NIC)
    values = torch.empty((num_tokens, heads, width), dtype=torch.uint8, device=q_NIC.device)
    factors = torch.empty((num_tokens, heads), dtype=torch.float32, device=q_NIC.device)
    _prepare_queries_kernel[(num_tokens,)](
        *(q_NIC, rotary_LR, tokens.positions, values, factors),
        *(topk, heads, q_NIC.stride(0), q_NIC.stride(1)),
        RATIO=RATIO,
        C=width,
        R=rope,
        SHARE=width**-0.5,
        BLOCK_I=block_heads(heads),
        ASM=inline_asm,
        num_warps=4,
        **launch_options(early_launch),
    )
    return IndexQueries(values, factors)
