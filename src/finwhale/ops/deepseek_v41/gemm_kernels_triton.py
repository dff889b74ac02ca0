"""The Triton kernels of DeepSeek-V4.1's linear layers; gemm_triton.py describes and launches them.

Its kernel for one token is V4's. Legend: N tokens, K input width, M output width, G groups.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from finwhale.ops.deepseek_v41.expand_triton import expand_e4m3, factor_of, round_columns
from finwhale.ops.launch.early_launch import start_next, wait_for_last
from finwhale.ops.linear.quantise_triton import clamped_swiglu, round_e4m3


@triton.jit
def round_kernel(
    x_ptr, y_ptr, K, stride_x, limit, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """y[n] = x[n] rounded to E4M3 by groups of 32, as bfloat16; a program has BLOCK columns.

    GATED: round the SwiGLU of x's halves.
    """
    start_next(PDL)
    wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = x_ptr + token * stride_x + k
    x = tl.load(source, mask=k < K, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + K, mask=k < K, other=0.0).to(tl.float32)
        x = clamped_swiglu(x, up, limit)
    y = round_columns(x[None, :], 1, BLOCK).to(tl.bfloat16)
    tl.store(y_ptr + token * K + k[None, :], y, mask=(k < K)[None, :])


@triton.jit
def expand_kernel(
    weight_ptr, scale_ptr, out_ptr, M, K, BLOCK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr
):
    """Expand 32 rows and BLOCK columns of the weight (bytes) [M, K] to bfloat16."""
    start_next(PDL)
    row = tl.program_id(1) * 32 + tl.arange(0, 32)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < M)[:, None] & (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    weight = tl.load(weight_ptr + at, mask=mask, other=0)
    group = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    scales = scale_ptr + tl.program_id(1).to(tl.int64) * (K // 32) + group
    scale = tl.load(scales, mask=group * 32 < K, other=1.0)
    factor = tl.broadcast_to(factor_of(scale, ASM)[:, None], [BLOCK // 32, 32])
    factor = tl.broadcast_to(tl.reshape(factor, [BLOCK])[None, :], [32, BLOCK])
    wait_for_last(PDL)
    tl.store(out_ptr + at, expand_e4m3(weight, factor, ASM), mask=mask)


@triton.jit
def _load_chunk(rows, at, end, MASK: tl.constexpr, POLICY: tl.constexpr):
    """64 columns from `at` on; with MASK, 0 from `end` on."""
    k = tl.arange(0, 64)
    source = rows[:, None] + (at + k)[None, :]
    if MASK:
        return tl.load(source, mask=(at + k < end)[None, :], other=0, eviction_policy=POLICY)
    else:
        return tl.load(source, eviction_policy=POLICY)


@triton.jit
def _load_pair(scales, at, last, MASK: tl.constexpr):
    """The two scales of each row for 64 columns."""
    low, high = at // 32, at // 32 + 1
    if MASK:
        # Columns past the last group have no weights, so any scale will do.
        low, high = tl.minimum(low, last), tl.minimum(high, last)
    return tl.load(scales + low), tl.load(scales + high)


@triton.jit(do_not_specialize=["N"])
def tile_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    N,
    M,
    K,
    stride_xn,
    stride_xg,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
    MASK: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_M rows of the weight (bytes) with all tokens, over CHUNKS * 64 columns.

    PARTS: write float32 parts [split, G, M, BLOCK_N]; otherwise out [N, G, M]. HELD, AHEAD: chunks
    of the weight and of the tokens that are loaded ahead. MASK: the last part has fewer columns.
    """
    start_next(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows and tokens past the last are copies of it, which are not stored.
    used_row = tl.minimum(row, M - 1)
    part = tl.program_id(1)
    g = tl.program_id(2)
    first = part * CHUNKS * 64
    weights = weight_ptr + (g.to(tl.int64) * M + used_row) * K
    scales = scale_ptr + (g * (M // 32) + used_row // 32) * (K // 32)
    last = K // 32 - 1
    held = ()
    pairs = ()
    for i in tl.static_range(HELD):
        held = held + (_load_chunk(weights, first + i * 64, K, MASK, "evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(HELD):
        pairs = pairs + (_load_pair(scales, first + i * 64, last, MASK),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_last(PDL)
    token = tl.arange(0, BLOCK_N)
    tokens = x_ptr + (tl.minimum(token, N - 1).to(tl.int64) * stride_xn + g * stride_xg)
    xs = ()
    for i in tl.static_range(AHEAD):
        xs = xs + (_load_chunk(tokens, first + i * 64, K, MASK, ""),)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(CHUNKS):
        if i + AHEAD < CHUNKS:
            xs = xs + (_load_chunk(tokens, first + (i + AHEAD) * 64, K, MASK, ""),)  # type: ignore[assignment]  # noqa: RUF005
        total = _add_product(total, held[i], pairs[i], xs[i], ASM)
        if i + HELD < CHUNKS:
            at = first + (i + HELD) * 64
            held = held + (_load_chunk(weights, at, K, MASK, "evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
            pairs = pairs + (_load_pair(scales, at, last, MASK),)  # type: ignore[assignment]  # noqa: RUF005
    # The order of the weight's rows (`_add_product`).
    total = tl.permute(tl.reshape(total, [BLOCK_M // 16, 2, 8, BLOCK_N]), (1, 0, 2, 3))
    total = tl.reshape(total, [BLOCK_M, BLOCK_N])
    if PARTS:
        line = ((part * tl.num_programs(2) + g).to(tl.int64) * M + row) * BLOCK_N
        tl.store(out_ptr + line[:, None] + token[None, :], total, mask=(row < M)[:, None])
    else:
        line = (token.to(tl.int64) * tl.num_programs(2) + g) * M
        mask = (row < M)[:, None] & (token < N)[None, :]
        value = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + line[None, :] + row[:, None], value, mask=mask)


@triton.jit
def _add_product(total, weight, pair, x, ASM: tl.constexpr):
    """total [rows,tokens] + 64 columns of the weight times the tokens x [tokens,64].

    A thread has loaded 16 adjacent columns of the weight, and tensor cores want four of them for
    each product of 16 columns. So the columns of a product are not adjacent, nor the rows of a
    tile: with this order, the weight's values stay in their threads.
    """
    low, high = pair
    ROWS: tl.constexpr = total.shape[0]
    TOKENS: tl.constexpr = total.shape[1]
    x = tl.permute(tl.reshape(x.to(tl.bfloat16), [TOKENS, 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    scale = tl.where((tl.arange(0, 64) < 32)[None, :], low[:, None], high[:, None])
    w = expand_e4m3(weight, factor_of(scale, ASM), ASM)
    w = tl.permute(tl.reshape(w, [2, ROWS // 16, 8, 4, 4, 2, 2]), (1, 0, 2, 4, 5, 3, 6))
    return tl.dot(tl.reshape(w, [ROWS, 64]), tl.trans(tl.reshape(x, [TOKENS, 64])), total)


@triton.jit
def _add_parts(source, mask, size, PARTS: tl.constexpr):
    """The sum of PARTS tensors, `size` values apart, in order."""
    parts = ()
    for i in tl.static_range(PARTS):
        at = source + tl.cast(size, tl.int64) * i
        parts = parts + (tl.load(at, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    total = parts[0]  # type: ignore[misc]
    for i in tl.static_range(1, PARTS):
        total += parts[i]
    return total


@triton.jit(do_not_specialize=["N"])
def sum_kernel(
    parts_ptr,
    out_ptr,
    N,
    M,
    padded,
    size,
    limit,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add float32 parts [PARTS, M or 2M, padded], each of `size` values: 32 columns of out [N, M].

    GATED: write the rounded SwiGLU of the two halves of the rows.
    """
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Parts have the columns of tokens past the last; a mask would divide their loads.
    is_row = (row < M)[:, None]
    source = parts_ptr + row.to(tl.int64)[:, None] * padded + token[None, :]
    total = _add_parts(source, is_row, size, PARTS)
    if GATED:
        total_up = _add_parts(source + tl.cast(M, tl.int64) * padded, is_row, size, PARTS)
        values, scale = round_e4m3(clamped_swiglu(total, total_up, limit), 0)
        total = values.to(tl.float32) * scale[None, :]
    target = out_ptr + token.to(tl.int64)[None, :] * M + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=is_row & (token < N)[None, :])
