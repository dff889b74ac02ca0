"""Preparation of query and kv before attention, as one Triton kernel.

Each token has two programs. One normalises the query's latent. The other normalises, rotates and
rounds kv, and stores it as a packed row of the cache. Both read their input once and keep it in
registers. `store_window_rows` launches only the other one.

Bytes per token with 2-byte values: 4 Q for the latent, 2 C plus the bytes of the row for kv. The
floors for 8192 tokens of Flash (Q 1024, C 512) at 4.39 TB/s are 8 and 3 us; the floor for a few
tokens is the launch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP, RowForm
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.attention.rotary_triton import rotate_row, rotation
from finwhale.ops.attention.sparse_attention_triton import check_heads, check_pool
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import LaunchClasses, up_to
from finwhale.ops.linear.quantise_triton import round_e4m3
from finwhale.ops.paging import CacheRows, Tokens

VALUES_PER_WARP = 512
# Up to this many tokens, the next kernel loads its weights while it waits. With more tokens, it
# would only take the room of the compressors' kernels on a side stream.
NEXT_FIRST_TOKENS = 8


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
    stride_page,
    Q,
    C,
    R,
    GROUPS,
    eps,
    ROWS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NEXT_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, 1) normalises the query's latent, program (token, 0) prepares kv.

    NEXT_FIRST: let the next kernel start before this one waits for the previous kernel.
    """
    token = tl.program_id(0).to(tl.int64)
    start_next(PDL and NEXT_FIRST)
    if tl.program_id(1) == 1:
        q_columns = tl.arange(0, BLOCK_Q)
        mask = q_columns < Q
        norm = tl.load(q_norm_ptr + q_columns, mask=mask, other=0.0)
        wait_for_last(PDL)
        start_next(PDL and not NEXT_FIRST)
        q = tl.load(q_ptr + token * stride_q + q_columns, mask=mask, other=0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q) / Q + eps) * norm
        tl.store(q_out_ptr + token * Q + q_columns, q.to(q_out_ptr.dtype.element_ty), mask=mask)
        return

    position = tl.load(positions_ptr + token)
    sequence = tl.load(sequence_ptr + token).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    mask = columns < C
    norm = tl.load(kv_norm_ptr + columns, mask=mask, other=0.0)
    page_index = position // ROWS - tl.load(first_ptr + sequence)
    page_at = pages_ptr + sequence * stride_pages + page_index
    page = tl.load(page_at, mask=position >= 0, other=0).to(tl.int64)
    cos, sin = rotation(rotary_ptr + tl.maximum(position, 0) * R, 0, C, R, BLOCK_C)
    wait_for_last(PDL)
    start_next(PDL and not NEXT_FIRST)
    if position < 0:
        return
    kv = tl.load(kv_ptr + token * stride_kv + columns, mask=mask, other=0.0).to(tl.float32)
    row = kv * tl.rsqrt(tl.sum(kv * kv) / C + eps) * norm
    is_nope = columns < C - R
    row = tl.where(is_nope, row, rotate_row(row, cos, sin, BLOCK_C))

    nope = tl.reshape(tl.where(is_nope, row, 0.0), [BLOCK_C // GROUP, GROUP])
    rounded, scale = round_e4m3(nope, 1)
    rounded = tl.reshape(rounded, [BLOCK_C])
    page_ptr = pool_ptr + page * stride_page
    row_ptr = page_ptr + (position % ROWS) * VALUE_BYTES
    tl.store(row_ptr + columns, rounded.to(tl.uint8, bitcast=True), mask=is_nope)
    rope_ptr = (row_ptr + (C - R)).to(tl.pointer_type(tl.bfloat16)) - (C - R)
    tl.store(rope_ptr + columns, row.to(tl.bfloat16), mask=mask & (columns >= C - R))
    group = tl.arange(0, BLOCK_C // GROUP)
    scale_ptr = page_ptr + ROWS * VALUE_BYTES + (position % ROWS) * SCALE_BYTES
    exponent = scale.to(tl.int32, bitcast=True) >> 23
    tl.store(scale_ptr + group, exponent.to(tl.uint8), mask=group < GROUPS)


LAUNCH_CLASSES = LaunchClasses(tokens=lambda model, most: up_to(most, {NEXT_FIRST_TOKENS}))


def _launch(
    query: tuple[Tensor, Tensor, Tensor] | None,
    kv_NC: Tensor,
    form: RowForm,
    tokens: Tokens,
    window: CacheRows,
    early_launch: bool,
) -> None:
    """Run the kernel. query: the latent, its norm and the result; None: there is no query."""
    check_heads(kv_NC, form.rotary)
    num_tokens, width = kv_NC.shape
    rope, table = 2 * form.rotary.shape[1], window.table
    check_pool(window, width, rope)
    if not form.round_nope:
        raise ValueError("a packed pool's rows are rounded; round_nope=False needs a dense pool")
    q_NQ, q_norm_Q, q_out_NQ = query or (kv_NC, form.norm, kv_NC)
    if q_NQ.stride(1) != 1:
        raise ValueError(f"a latent's values must be contiguous, got strides {q_NQ.stride()}")
    if num_tokens == 0:
        return
    record = RopeRow(width, rope)
    block_q = triton.next_power_of_2(q_NQ.shape[1])
    block_c = max(NOPE_GROUP, triton.next_power_of_2(width))
    _prepare_qkv_kernel[(num_tokens, 1 if query is None else 2)](
        *(q_NQ, q_norm_Q, q_out_NQ, kv_NC, form.norm, form.rotary),
        *(tokens.positions, tokens.sequence, window.pool, table.pages, table.first),
        *(q_NQ.stride(0), kv_NC.stride(0), table.pages.stride(0), window.pool.stride(0)),
        *(q_NQ.shape[1], width, rope, record.num_groups, form.eps),
        ROWS=table.rows_per_page,
        VALUE_BYTES=record.value_bytes,
        SCALE_BYTES=record.scale_bytes,
        GROUP=NOPE_GROUP,
        BLOCK_Q=block_q,
        BLOCK_C=block_c,
        NEXT_FIRST=num_tokens <= NEXT_FIRST_TOKENS,
        num_warps=max(1, min(4, max(block_q, block_c) // VALUES_PER_WARP)),
        **launch_options(early_launch),
    )


def store_window_rows(
    kv_NC: Tensor, form: RowForm, tokens: Tokens, window: CacheRows, *, early_launch: bool = False
) -> None:
    """Supports only packed pools, which are always rounded. early_launch: see `launch_options`."""
    _launch(None, kv_NC, form, tokens, window, early_launch)


def prepare_qkv(
    q_lora_NQ: Tensor,
    q_norm_Q: Tensor,
    kv_NC: Tensor,
    form: RowForm,
    tokens: Tokens,
    window: CacheRows,
    *,
    early_launch: bool = False,
) -> Tensor:
    """Like `store_window_rows`, with the query's latent in the same launch."""
    q_out_NQ = torch.empty_like(q_lora_NQ, memory_format=torch.contiguous_format)
    query = q_lora_NQ, q_norm_Q, q_out_NQ
    _launch(query, kv_NC, form, tokens, window, early_launch)
    return q_out_NQ
