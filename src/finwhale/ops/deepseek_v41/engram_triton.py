"""Engram as Triton kernels: the last ids of each token, rows of a table, and the gate.

The table is too large for a GPU: it lies in pinned host memory, which the GPU reads through its own
addresses. `look_up` has a program for each row, so that many reads are in flight; a program hashes
the ids itself. A token reads 24 rows of 264 bytes in a layer: at 50 GB/s, 8192 tokens take at least
1 ms, and one token takes the latency of the host's memory.

`engram_gate` has a program for each token and residual stream. Bytes with bfloat16: 26 D per token
for H = 4, and 32 D of weights, from the L2 cache for all tokens but the first: at 4.0 TB/s, 8192
tokens of D = 5120 take at least 270 us.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.deepseek_v41 import HashTensors
from finwhale.ops.launch import check_contiguous
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import LaunchClasses
from finwhale.ops.paging import CacheRows, Tokens

BLOCK_N = 64  # tokens of a program that recalls ids
SCALE_GROUP = 32
LAUNCH_CLASSES = LaunchClasses()  # No launch depends on the number of tokens or the context.


@triton.jit(do_not_specialize=["num_tokens"])
def _recall_kernel(
    ids_ptr,
    pool_ptr,
    pages_ptr,
    first_ptr,
    positions_ptr,
    sequence_ptr,
    query_start_ptr,
    windows_begin_ptr,
    out_ptr,
    num_tokens,
    pad,
    stride_row,
    stride_pages,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    REPLAY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ids of this step come from its tokens, older ones from the pool, of which no row is both read
    and written.
    """
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = token < num_tokens
    position = tl.load(positions_ptr + token, mask=there, other=-1)
    b = tl.load(sequence_ptr + token, mask=there, other=0).to(tl.int64)
    begin = tl.load(query_start_ptr + b, mask=there, other=0)
    table_row_ptr = pages_ptr + b * stride_pages
    first_page = tl.load(first_ptr + b, mask=there, other=0)
    least = position * 0
    if REPLAY:
        least = tl.maximum(tl.load(windows_begin_ptr + b, mask=there, other=0), 0)
    wait_for_last(PDL)
    for s in tl.static_range(S):
        at = position - s
        in_step = (at >= 0) & (token - s >= begin)
        found = tl.load(ids_ptr + token - s, mask=in_step, other=pad)
        number = at // ROWS - first_page
        paged = (at >= 0) & (number >= 0) & (~in_step | (s == 0))
        page = tl.load(table_row_ptr + number, mask=paged, other=0).to(tl.int64)
        row_ptr = pool_ptr + (page * ROWS + at % ROWS) * stride_row
        if s == 0:
            tl.store(row_ptr, found.to(tl.float32), mask=paged & (page > 0))
        else:
            old = tl.load(row_ptr, mask=paged, other=0.0)
            found = tl.where(paged, old.to(tl.int64), found)
        tl.store(out_ptr + token * S + s, tl.where(at < least, pad, found), mask=there)


@triton.jit
def _look_up_kernel(
    ids_ptr,
    multipliers_ptr,
    sizes_ptr,
    starts_ptr,
    rows_ptr,
    scale_ptr,
    out_ptr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part) copies the row of a part that the token's last ids hash to."""
    start_next(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size, start = tl.load(sizes_ptr + part), tl.load(starts_ptr + part)
    wait_for_last(PDL)
    hashed = tl.load(ids_ptr + token * S) * tl.load(multipliers_ptr)
    for s in tl.static_range(1, S):
        product = tl.load(ids_ptr + token * S + s) * tl.load(multipliers_ptr + s)
        hashed = tl.where(s <= part // HEADS + 1, hashed ^ product, hashed)
    row = hashed % size + start
    group, column = tl.arange(0, K // GROUP), tl.arange(0, GROUP)
    at = group[:, None] * GROUP + column[None, :]
    values = tl.load(rows_ptr + row * K + at).to(tl.float32)
    if SCALED:
        exponent = tl.load(scale_ptr + row * (K // GROUP) + group).to(tl.int32)
        # The byte 0 is 2^-127, which is no normal number.
        bits = tl.where(exponent == 0, 0x400000, exponent << 23)
        values = values * bits.to(tl.float32, bitcast=True)[:, None]
    out = out_ptr + (token * tl.num_programs(1) + part) * K + at
    tl.store(out, values.to(out_ptr.dtype.element_ty))


@triton.jit
def _gate_kernel(
    streams_ptr,
    key_ptr,
    value_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    D,
    stride_n,
    stride_h,
    stride_kn,
    stride_kh,
    stride_v,
    share,
    eps,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    q = tl.load(q_weight_ptr + stream * D + d, mask=mask, other=0.0)
    k = tl.load(k_weight_ptr + stream * D + d, mask=mask, other=0.0)
    wait_for_last(PDL)
    source = streams_ptr + token * stride_n + stream * stride_h + d
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    key_row_ptr = key_ptr + token * stride_kn + stream * stride_kh
    key = tl.load(key_row_ptr + d, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + token * stride_v + d, mask=mask, other=0.0).to(tl.float32)
    score = tl.sum(x * q * k * key, axis=0) * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    score = score * tl.rsqrt(tl.sum(key * key, axis=0) / D + eps) * share
    root = tl.sqrt(tl.maximum(tl.abs(score), 1e-6))
    root = tl.where(score > 0, root, tl.where(score < 0, -root, 0.0))
    out = x + value / (1.0 + tl.exp(-root))
    out_row_ptr = out_ptr + (token * tl.num_programs(1) + stream) * D
    tl.store(out_row_ptr + d, out.to(out_ptr.dtype.element_ty), mask=mask)


# --- Launch ---------------------------------------------------------------------------------------


def recall_ids(
    ids_N: Tensor,
    size: int,
    pad: int,
    rows: CacheRows,
    tokens: Tokens,
    *,
    early_launch: bool = False,
) -> Tensor:
    """A padding token gets `pad`, and so does each id before a window begins."""
    begin = tokens.windows_begin
    table, num_tokens = rows.table, len(ids_N)
    if rows.pool.dtype != torch.float32 or rows.pool.shape[1] != 1 or ids_N.dtype != torch.int64:
        raise ValueError(f"needs float32 rows of one id, got {rows.pool.dtype} and {ids_N.dtype}")
    check_contiguous(ids=ids_N)
    out_NS = torch.empty((num_tokens, size), dtype=torch.int64, device=ids_N.device)
    if num_tokens:
        _recall_kernel[(triton.cdiv(num_tokens, BLOCK_N),)](
            *(ids_N, rows.pool, table.pages, table.first),
            *(tokens.positions, tokens.sequence, tokens.query_start),
            *(ids_N if begin is None else begin, out_NS),
            *(num_tokens, pad, rows.pool.stride(0), table.pages.stride(0)),
            S=size,
            ROWS=table.rows_per_page,
            REPLAY=begin is not None,
            BLOCK_N=BLOCK_N,
            num_warps=2,
            **launch_options(early_launch),
        )
    return out_NS


def look_up(
    ids_NS: Tensor,
    hashes: HashTensors,
    rows: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    early_launch: bool = False,
) -> Tensor:
    """See LookUp. The rows are in the GPU's memory, or pinned."""
    (num_tokens, size), (parts, heads), width = ids_NS.shape, hashes.sizes.shape, rows.shape[1]
    groups = width // SCALE_GROUP
    if groups * SCALE_GROUP != width or groups & (groups - 1) or parts + 1 != size:
        raise ValueError(f"rows have a power of two of 32 values, got {width}; {size} ids, {parts}")
    check_contiguous(ids=ids_NS, rows=rows, sizes=hashes.sizes, starts=hashes.starts)
    out = torch.empty((num_tokens, parts * heads, width), dtype=dtype, device=ids_NS.device)
    if num_tokens:
        _look_up_kernel[(num_tokens, parts * heads)](
            *(ids_NS, hashes.multipliers, hashes.sizes, hashes.starts),
            *(rows, rows if scale is None else scale, out),
            S=size,
            HEADS=heads,
            K=width,
            GROUP=SCALE_GROUP,
            SCALED=scale is not None,
            num_warps=1,
            **launch_options(early_launch),
        )
    return out


def engram_gate(
    residual_NHD: Tensor,
    key_NHD: Tensor,
    value_ND: Tensor,
    q_weight_HD: Tensor,
    k_weight_HD: Tensor,
    eps: float,
    *,
    early_launch: bool = False,
) -> Tensor:
    num_tokens, H, D = residual_NHD.shape
    strides = residual_NHD.stride(), key_NHD.stride(), value_ND.stride()
    if any(stride[-1] != 1 for stride in strides):
        raise ValueError(f"the values of a row must be contiguous, got strides {strides}")
    check_contiguous(q_weight=q_weight_HD, k_weight=k_weight_HD)
    out = torch.empty(residual_NHD.shape, dtype=residual_NHD.dtype, device=residual_NHD.device)
    block_d = triton.next_power_of_2(D)
    if num_tokens:
        _gate_kernel[(num_tokens, H)](
            *(residual_NHD, key_NHD, value_ND, q_weight_HD, k_weight_HD, out, D),
            *(*strides[0][:2], *strides[1][:2], strides[2][0], D**-0.5, eps),
            BLOCK_D=block_d,
            num_warps=min(16, max(1, block_d // 512)),
            **launch_options(early_launch),
        )
    return out
