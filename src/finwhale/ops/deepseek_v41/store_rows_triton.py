"""Rows of the cache as one Triton kernel: rope, rounding and packing (layout.py).

A program stores the row of one token, if the token completes one: a window row, an entry or an
index key. `prepare_qkv` normalises it before, and has a second program per token, which normalises
the query's latent. The divisions by the scales of entries are rounded to nearest, so that only the
rope may give other last bits than the reference: a GPU fuses its products and sums.

Bytes per token: 2 C (bfloat16) or 4 C (float32) for the values, 528, 288 or 68 for the record, and
4 R for the rotation. The floor for 8192 window rows at 4.39 TB/s is 3.4 us; for a few tokens, it is
the launch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention.rotary_triton import rotate_row, rotation
from finwhale.ops.deepseek_v41 import RowRounding
from finwhale.ops.deepseek_v41.layout import check_pool, check_widths, entry, index_key, window_row
from finwhale.ops.indexer.fp4_triton import scale_exponent
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.linear.quantise_triton import round_e4m3
from finwhale.ops.paging import CacheRows, Tokens

WINDOW, ENTRY, KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
VALUES_PER_WARP = 256
LEAST_WIDTH = 32  # one group


@triton.jit
def e2m1_codes(x):
    """The codes of the nearest e2m1 values of float32 x, |x| <= 6; ties to even codes."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x < 0.0).to(tl.int32) << 3)


@triton.jit
def rounded_row(row, C: tl.constexpr, FORM: tl.constexpr):
    """A record of row [C] float32: its bytes, [C] or [C/2], and its scales."""
    GROUP: tl.constexpr = 16 if FORM == ENTRY else 32
    grouped = tl.reshape(row, [C // GROUP, GROUP])
    if FORM == WINDOW:
        rounded, scale = round_e4m3(grouped, 1)
        values = tl.reshape(rounded, [C]).to(tl.uint8, bitcast=True)
        scales = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    else:
        amax = tl.max(tl.abs(grouped), axis=1)
        if FORM == ENTRY:
            # The least scale is the least E4M3 value, 2^-9.
            scale = tl.div_rn(tl.maximum(amax, 0.01171875), 6.0).to(tl.float8e4nv)
            scales = scale.to(tl.uint8, bitcast=True)
            scaled = tl.div_rn(
                grouped, tl.broadcast_to(scale.to(tl.float32)[:, None], grouped.shape)
            )
            scaled = tl.minimum(tl.maximum(scaled, -6.0), 6.0)
        else:
            exponent = scale_exponent(amax)
            scales = exponent.to(tl.uint8)
            scaled = grouped * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        low, high = tl.split(tl.reshape(e2m1_codes(scaled), [C // 2, 2]))
        values = (low | (high << 4)).to(tl.uint8)
    return values, scales


@triton.jit
def _normalised(x, weight, D, eps):
    values = x.to(tl.float32)
    return (values * tl.rsqrt(tl.sum(values * values) / D + eps) * weight).to(x.dtype)


@triton.jit
def _store_rows_kernel(
    values_ptr,
    pool_ptr,
    rotary_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    stride_values,
    stride_page,
    stride_pages,
    R,
    q_ptr,
    q_out_ptr,
    q_norm_ptr,
    norm_ptr,
    stride_q,
    Q,
    eps,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate, round and store a token's row of C values.

    BLOCK_Q: at least Q: normalise the row before, and the query's latent in program (token, 1); 0:
    the values are normalised.
    """
    GROUP: tl.constexpr = 16 if FORM == ENTRY else 32
    BYTES: tl.constexpr = C if FORM == WINDOW else C // 2
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    if BLOCK_Q:
        if tl.program_id(1) == 1:
            column = tl.arange(0, BLOCK_Q)
            weight = tl.load(q_norm_ptr + column, mask=column < Q, other=0.0)
            wait_for_last(PDL)
            q = tl.load(q_ptr + token * stride_q + column, mask=column < Q, other=0.0)
            q = _normalised(q, weight, Q, eps)
            tl.store(q_out_ptr + token * Q + column, q, mask=column < Q)
            return
        norm = tl.load(norm_ptr + tl.arange(0, C))
    position = tl.load(positions_ptr + token)
    if (position < 0) | ((position + 1) % RATIO != 0):
        wait_for_last(PDL)
        return
    sequence = tl.load(sequence_ptr + token).to(tl.int64)
    number = position // RATIO
    page_index = number // ROWS - tl.load(first_ptr + sequence)
    page = tl.load(pages_ptr + sequence * stride_pages + page_index).to(tl.int64)
    page_ptr, offset = pool_ptr + page * stride_page, number % ROWS
    cos, sin = rotation(rotary_ptr + number * RATIO * R, 0, C, R, C)
    wait_for_last(PDL)
    row = tl.load(values_ptr + token * stride_values + tl.arange(0, C))
    if BLOCK_Q:
        row = _normalised(row, norm, C, eps)
    row = row.to(tl.float32)
    values, scales = rounded_row(rotate_row(row, cos, sin, C), C, FORM)
    tl.store(page_ptr + offset * BYTES + tl.arange(0, BYTES), values)
    scale_ptr = page_ptr + ROWS * BYTES + offset * (C // GROUP)
    tl.store(scale_ptr + tl.arange(0, C // GROUP), scales)


# --- Launch ---------------------------------------------------------------------------------------


def store_rows(
    values_NC: Tensor,
    rows: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    ratio: int,
    rounding: RowRounding,
    *,
    early_launch: bool = False,
) -> None:
    """Supports only packed pools, which are always rounded. early_launch: see `launch_options`."""
    how = launch_options(early_launch)
    _launch(values_NC, rows, rotary_LR, tokens, ratio, rounding, None, how)


def prepare_qkv(
    latents: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor],
    eps: float,
    rows: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    rounding: RowRounding,
    *,
    early_launch: bool = False,
) -> Tensor:
    """Supports what `store_rows` does."""
    (q_NQ, kv_NC), out_NQ = latents, latents[0].new_empty(latents[0].shape)
    query = (q_NQ, out_NQ, *norms, q_NQ.stride(0), q_NQ.shape[1], eps)
    how = launch_options(early_launch)
    _launch(kv_NC, rows, rotary_LR, tokens, 1, rounding, query, how)
    return out_NQ


def _launch(
    values_NC: Tensor,
    rows: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    ratio: int,
    rounding: RowRounding,
    query: tuple[Any, ...] | None,
    how: dict[str, Any],
) -> None:
    """query: the kernel's arguments for `prepare_qkv`; None: the values are normalised."""
    if rounding == "none":
        raise ValueError("a packed pool's rows are rounded; rounding 'none' needs a dense pool")
    forms = {"e4m3": (WINDOW, window_row), "fp4": (ENTRY, entry), "key": (KEY, index_key)}
    (form, record), (num_tokens, width) = forms[rounding], values_NC.shape
    check_widths(values_NC, rotary_LR, LEAST_WIDTH)
    check_pool(rows, record(width))
    if num_tokens == 0:
        return
    table = rows.table
    _store_rows_kernel[(len(tokens.positions), 1 if query is None else 2)](
        *(values_NC, rows.pool, rotary_LR, tokens.positions, tokens.sequence),
        *(table.pages, table.first, values_NC.stride(0), rows.pool.stride(0)),
        *(table.pages.stride(0), 2 * rotary_LR.shape[1]),
        *(query or (*(values_NC,) * 4, 0, 0, 0.0)),
        C=width,
        ROWS=table.rows_per_page,
        RATIO=ratio,
        FORM=form.value,
        BLOCK_Q=0 if query is None else triton.next_power_of_2(query[0].shape[1]),
        num_warps=max(1, min(4, width // VALUES_PER_WARP)),
        **how,
    )
