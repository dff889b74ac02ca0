"""Attention's public kernels: the latents and the stored row, then attention itself.

`prepare_qkv` normalises the query's latent, and normalises, rotates, rounds and stores kv as a
packed row, in one launch; `sparse_attention` is in triton_decode.py.

Bytes a token with values of 2 bytes: 4 Q for the latent, 2 C + the row's bytes for kv. Floors of
8192 tokens at 4.39 TB/s, Flash (Q 1024, C 512): 8 + 3 us; those of a few tokens are the launch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP, Complete, Selected, Window
from finwhale.ops.attention.layout import num_groups, scale_bytes, value_bytes
from finwhale.ops.attention.triton_decode import (
    AttendPlan,
    Problem,
    attend,
    check_pool,
    max_keys,
)
from finwhale.ops.launch import early_launch
from finwhale.ops.linear import ACTIVATION_GROUP
from finwhale.ops.paging import PageTable, Tokens

if torch.version.hip is None:
    from finwhale.ops.attention import hopper

MAX_HEAD_DIM = 4096
VALUES_PER_WARP = 512
# Tokens whose shares are in memory at once: 0.7 GB with Flash's heads.
INVARIANT_TOKENS = 1024


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
def _prepare_qkv_kernel(
    q_ptr,
    q_norm_ptr,
    q_out_ptr,
    kv_ptr,
    kv_norm_ptr,
    rotary_ptr,
    positions_ptr,
    sequence_ptr,
    pool_ptr,
    pages_ptr,
    first_ptr,
    stride_q,
    stride_kv,
    stride_pages,
    Q,
    C,
    R,
    GROUPS,
    eps,
    PAGE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.program_id(1) == 1:
        place = tl.arange(0, BLOCK_Q)
        mask = place < Q
        q = tl.load(q_ptr + token * stride_q + place, mask=mask, other=0.0).to(tl.float32)
        norm = tl.load(q_norm_ptr + place, mask=mask, other=0.0)
        q = q * tl.rsqrt(tl.sum(q * q) / Q + eps) * norm
        tl.store(q_out_ptr + token * Q + place, q.to(q_out_ptr.dtype.element_ty), mask=mask)
        return

    position = tl.load(positions_ptr + token)
    if position < 0:
        return
    sequence = tl.load(sequence_ptr + token).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    mask = columns < C
    kv = tl.load(kv_ptr + token * stride_kv + columns, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(kv_norm_ptr + columns, mask=mask, other=0.0)
    place = position // ROWS - tl.load(first_ptr + sequence)
    page = tl.load(pages_ptr + sequence * stride_pages + place).to(tl.int64)
    row = kv * tl.rsqrt(tl.sum(kv * kv) / C + eps) * norm
    row = rotate(row[None, :], rotary_ptr + position * R, C, R, 1.0, 1, BLOCK_C)
    row = tl.reshape(row, [BLOCK_C])

    is_nope = columns < C - R
    nope = tl.reshape(tl.where(is_nope, row, 0.0), [BLOCK_C // GROUP, GROUP])
    amax = tl.maximum(tl.max(tl.abs(nope), axis=1), 1e-4)
    bits = ((amax * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    rounded = tl.reshape(nope * inverse[:, None], [BLOCK_C]).to(tl.float8e4nv)
    page_ptr = pool_ptr + page * PAGE_BYTES
    row_ptr = page_ptr + (position % ROWS) * VALUE_BYTES
    tl.store(row_ptr + columns, rounded.to(tl.uint8, bitcast=True), mask=is_nope)
    rope_ptr = (row_ptr + (C - R)).to(tl.pointer_type(tl.bfloat16)) - (C - R)
    tl.store(rope_ptr + columns, row.to(tl.bfloat16), mask=mask & (columns >= C - R))
    group = tl.arange(0, BLOCK_C // GROUP)
    scale_ptr = page_ptr + ROWS * VALUE_BYTES + (position % ROWS) * SCALE_BYTES
    tl.store(scale_ptr + group, (bits >> 23).to(tl.uint8), mask=group < GROUPS)


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


def prepare_qkv(
    q_lora_NQ: Tensor,
    q_norm_Q: Tensor,
    kv_NC: Tensor,
    kv_norm_C: Tensor,
    rotary_LR: Tensor,
    eps: float,
    round_nope: bool,
    tokens: Tokens,
    pool: Tensor,
    table: PageTable,
) -> Tensor:
    """Packed pools only, which are always rounded."""
    check_heads(kv_NC, rotary_LR)
    num_tokens, width = kv_NC.shape
    rope = 2 * rotary_LR.shape[1]
    check_pool(pool, table.rows_per_page, width, rope)
    if not round_nope:
        raise ValueError("a packed pool's rows are rounded; round_nope=False needs a dense pool")
    if q_lora_NQ.stride(1) != 1:
        raise ValueError(f"a latent's values must lie together, got {q_lora_NQ.stride()}")
    q_width = q_lora_NQ.shape[1]
    q_out_NQ = torch.empty_like(q_lora_NQ, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return q_out_NQ
    block_q = triton.next_power_of_2(q_width)
    block_c = max(NOPE_GROUP, triton.next_power_of_2(width))
    _prepare_qkv_kernel[(num_tokens, 2)](
        q_lora_NQ,
        q_norm_Q,
        q_out_NQ,
        kv_NC,
        kv_norm_C,
        rotary_LR,
        tokens.positions,
        tokens.sequence,
        pool,
        table.pages,
        table.first,
        q_lora_NQ.stride(0),
        kv_NC.stride(0),
        table.pages.stride(0),
        q_width,
        width,
        rope,
        num_groups(width, rope),
        eps,
        PAGE_BYTES=pool.stride(0),
        ROWS=table.rows_per_page,
        VALUE_BYTES=value_bytes(width, rope),
        SCALE_BYTES=scale_bytes(width, rope),
        GROUP=NOPE_GROUP,
        BLOCK_Q=block_q,
        BLOCK_C=block_c,
        num_warps=max(1, min(4, max(block_q, block_c) // VALUES_PER_WARP)),
        **early_launch(kv_NC),
    )
    return q_out_NQ


def sparse_attention(
    q_NAC: Tensor,
    rotary_LR: Tensor,
    eps: float,
    tokens: Tokens,
    window: Window,
    entries: Selected | Complete | None,
    sink_A: Tensor,
    scale: float,
    out_NAC: Tensor,
    scales_NS: Tensor | None = None,
    *,
    invariant: bool = False,
    portable: bool = False,
) -> None:
    """Packed pools only; scales with bfloat16 queries only.

    invariant: a token's bits do not depend on the step's other tokens.
    portable: no kernel that one vendor's GPUs alone can run.
    """
    check_heads(q_NAC, rotary_LR)
    check_heads(out_NAC, rotary_LR)
    num_tokens, heads, width = q_NAC.shape
    rope = 2 * rotary_LR.shape[1]
    check_pool(window.pool, window.table.rows_per_page, width, rope)
    if isinstance(entries, Selected):
        check_pool(entries.pool, entries.rows_per_page, width, rope)
    elif entries is not None:
        check_pool(entries.pool, entries.table.rows_per_page, width, rope)
    if scales_NS is not None and (q_NAC.dtype != torch.bfloat16 or width % ACTIVATION_GROUP):
        raise ValueError(
            f"only bfloat16 heads of a multiple of {ACTIVATION_GROUP} values are rounded, got "
            f"{q_NAC.dtype} of {width}"
        )
    if (out_NAC.dtype == torch.float8_e4m3fn) != (scales_NS is not None):
        raise ValueError(f"an output with scales is E4M3, and no other, got {out_NAC.dtype}")
    if num_tokens == 0:
        return
    problem = Problem(
        q=q_NAC,
        rotary=rotary_LR,
        eps=eps,
        tokens=tokens,
        window=window,
        entries=entries,
        sink=sink_A,
        scale=scale,
        out=out_NAC,
        scales=scales_NS,
        invariant=invariant,
    )
    if invariant:
        for part in problem.slices(INVARIANT_TOKENS):
            if not portable and hopper.takes(part):
                hopper.attend(part, hopper.invariant_plan(part))
            else:
                attend(part, AttendPlan.invariant(part))
        return
    keys = max_keys(tokens, window, entries)
    if not portable and hopper.takes(problem):
        hopper.attend(problem, hopper.plan(num_tokens, heads, keys))
    else:
        attend(problem, AttendPlan.of(num_tokens, heads, keys))
