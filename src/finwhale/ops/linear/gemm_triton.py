"""The Triton kernels of the linear layers; `linear_triton.py` chooses, describes and launches them.

- `row_kernel`: one or two tokens; a program computes whole rows of the weight, on CUDA cores.
- `tile_kernel`: several tokens on tensor cores; a program computes one tile of one part of K.
- `sum_kernel`: adds the parts of K in order, and applies SwiGLU.

Legend: N tokens, K input width, M output width, G groups.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from finwhale.ops.launch.early_launch import start_next, wait_for_last
from finwhale.ops.linear.quantise_triton import clamped_swiglu, round_e4m3


@triton.jit
def _load_rows(base, row, M, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load whole rows of the weight, in tensors of BLOCK_K columns.

    The rows are read once, so they should not displace other data from the L2 cache.
    """
    k = tl.arange(0, BLOCK_K)
    source = base + row.to(tl.int64)[:, None] * K + k[None, :]
    chunks = ()
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        mask = (row < M)[:, None]
        if K % BLOCK_K:
            mask = mask & (i * BLOCK_K + k < K)[None, :]
        at = source + i * BLOCK_K
        chunk = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
        chunks = chunks + (chunk,)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _load_scales(scales, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Load the scales of a row of the weight's blocks, in chunks like `_load_rows`."""
    groups = tl.arange(0, BLOCK_K // GROUP)
    chunks = ()
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        column = i * (BLOCK_K // GROUP) + groups
        chunks = chunks + (tl.load(scales + column, mask=column * GROUP < K, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _load_token(
    source,
    scales,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ROUND: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Load a token in chunks of BLOCK_K values, like `_load_rows`.

    ROUND: round it to E4M3. SCALED: multiply it by `scales`.
    """
    k = tl.arange(0, BLOCK_K)
    chunks = ()
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        x = tl.load(source + i * BLOCK_K + k, mask=i * BLOCK_K + k < K, other=0.0).to(tl.float32)
        if ROUND:
            quantised, factor = round_e4m3(tl.reshape(x, [BLOCK_K // GROUP, GROUP]), 1)
            if SCALED:
                factor = factor * scales[i]
            x = tl.reshape(quantised.to(tl.float32) * factor[:, None], [BLOCK_K])
        elif SCALED:
            grouped = tl.reshape(x, [BLOCK_K // GROUP, GROUP])
            x = tl.reshape(grouped * scales[i][:, None], [BLOCK_K])
        chunks = chunks + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _dot_rows(weights, tokens, n: tl.constexpr, CHUNKS: tl.constexpr):
    """The rows times the n-th token of CHUNKS chunks."""
    products = weights[0].to(tl.float32) * tokens[n * CHUNKS][None, :]
    for i in tl.static_range(1, CHUNKS):
        products += weights[i].to(tl.float32) * tokens[n * CHUNKS + i][None, :]
    return tl.sum(products, axis=1)


@triton.jit
def row_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    M,
    stride_xn,
    stride_xg,
    limit,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[n, g, m] of TOKENS tokens n for BLOCKS * BLOCK_M rows m; BLOCK_M divides GROUP.

    GATED: the SwiGLU of gate rows m and up rows M + m. SCALED: for one token. GROUP: values of a
    rounded input that share a scale, and the block of a weight.
    """
    tl.static_assert(TOKENS == 1 or not SCALED)
    start_next(PDL)
    first = tl.program_id(0) * BLOCKS * BLOCK_M
    g = tl.program_id(1)
    HALVES: tl.constexpr = 2 if GATED else 1
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    base = weight_ptr + tl.cast(g * HALVES, tl.int64) * M * K
    base_up = base + tl.cast(M, tl.int64) * K
    row = first + tl.arange(0, BLOCK_M)
    next_gate = _load_rows(base, row, M, K, BLOCK_K)
    if GATED:
        next_up = _load_rows(base_up, row, M, K, BLOCK_K)
    # The scales come from memory, too: later, their loads would wait behind other programs' rows.
    scales, scales_up = (), ()
    if SCALED:
        columns: tl.constexpr = (K + GROUP - 1) // GROUP
        at = scale_ptr + (g * HALVES * ((M + GROUP - 1) // GROUP) + first // GROUP) * columns
        scales = _load_scales(at, K, BLOCK_K, GROUP)
        if GATED:
            scales_up = _load_scales(at + M // GROUP * columns, K, BLOCK_K, GROUP)
    wait_for_last(PDL)
    source = x_ptr + g * stride_xg
    tokens = ()
    for n in tl.static_range(TOKENS):
        at = source + n * stride_xn
        tokens = tokens + _load_token(at, scales, K, BLOCK_K, GROUP, ROUND, SCALED)
    tokens_up = tokens
    if GATED and SCALED:
        tokens_up = _load_token(source, scales_up, K, BLOCK_K, GROUP, ROUND, SCALED)
    for block in tl.static_range(BLOCKS):
        gate = next_gate
        row = first + block * BLOCK_M + tl.arange(0, BLOCK_M)
        if GATED:
            up = next_up
        if block + 1 < BLOCKS:
            next_gate = _load_rows(base, row + BLOCK_M, M, K, BLOCK_K)
            if GATED:
                next_up = _load_rows(base_up, row + BLOCK_M, M, K, BLOCK_K)
        for n in tl.static_range(TOKENS):
            total = _dot_rows(gate, tokens, n, CHUNKS)
            if GATED:
                total = clamped_swiglu(total, _dot_rows(up, tokens_up, n, CHUNKS), limit)
            line = (n * tl.num_programs(1) + g) * M
            tl.store(out_ptr + line + row, total.to(out_ptr.dtype.element_ty), mask=row < M)


@triton.jit
def tile_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    N,
    M,
    K,
    stride_xn,
    stride_xg,
    stride_sn,
    stride_sg,
    stride_sk,
    steps,
    SCALED: tl.constexpr,
    ROUND: tl.constexpr,
    QUANTISED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of BLOCK_M rows of the weight and BLOCK_N tokens, over one part of K.

    PARTS: write float32 parts [split, G, M, N rounded up to BLOCK_N]; otherwise out [N, G, M].
    QUANTISED: x is E4M3 with scales. TOKENS_FIRST: tokens are the rows of the MMA.
    """
    tiles = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    g = tl.program_id(2)
    is_row = row < M
    is_token = token < N
    weights = weight_ptr + (g.to(tl.int64) * M + row)[:, None] * K
    start_next(PDL)
    wait_for_last(PDL)
    tokens = x_ptr + token.to(tl.int64)[:, None] * stride_xn + g * stride_xg
    columns = (K + 127) // 128
    block = tl.program_id(0) % tiles * BLOCK_M // 128
    scales = scale_ptr + (g * ((M + 127) // 128) + block) * columns
    token_scales = x_scale_ptr + token.to(tl.int64) * stride_sn + g * stride_sg
    if TOKENS_FIRST:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    last = tl.minimum((part + 1) * steps, tl.cdiv(K, BLOCK_K))
    for step in tl.range(part * steps, last, num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        is_k = (k < K)[None, :]
        weight = tl.load(weights + k[None, :], mask=is_row[:, None] & is_k, other=0.0)
        x = tl.load(tokens + k[None, :], mask=is_token[:, None] & is_k, other=0.0)
        if SCALED and not ROUND:
            # BLOCK_K is 128 here. E4M3 values are exact in bfloat16. The weight is the first
            # operand, because tensor cores read it from registers, where it is converted.
            factor = tl.load(scales + step)
            x = tl.trans(x.to(tl.bfloat16))
            total += tl.dot(weight.to(tl.bfloat16), x) * factor
        elif SCALED:
            # BLOCK_K is 128 here.
            factor = tl.load(scales + step)
            if QUANTISED:
                scale = tl.load(token_scales + step * stride_sk, mask=is_token, other=0.0)
            else:
                x, scale = round_e4m3(x.to(tl.float32), 1)
            if TOKENS_FIRST:
                total += tl.dot(x, tl.trans(weight)) * (scale * factor)[:, None]
            else:
                total += tl.dot(weight, tl.trans(x)) * (scale * factor)[None, :]
        else:
            if ROUND:
                grouped = tl.reshape(x.to(tl.float32), [BLOCK_N, BLOCK_K // 128, 128])
                rounded, scale = round_e4m3(grouped, 2)
                x = tl.reshape(rounded.to(tl.float32) * scale[:, :, None], [BLOCK_N, BLOCK_K])
            x = x.to(weight.dtype)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    if PARTS:
        if TOKENS_FIRST:
            total = tl.trans(total)
        padded = tl.cdiv(N, BLOCK_N) * BLOCK_N
        line = ((part * tl.num_programs(2) + g).to(tl.int64) * M + row) * padded
        tl.store(out_ptr + line[:, None] + token[None, :], total, mask=is_row[:, None])
    else:
        line = (token.to(tl.int64) * tl.num_programs(2) + g) * M
        value = total.to(out_ptr.dtype.element_ty)
        if not TOKENS_FIRST:
            value = tl.trans(value)
        mask = is_token[:, None] & is_row[None, :]
        tl.store(out_ptr + line[:, None] + row[None, :], value, mask=mask)


@triton.jit
def sum_kernel(
    parts_ptr,
    out_ptr,
    N,
    M,
    padded,
    size,
    stride_on,
    limit,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add float32 parts [PARTS, M or 2M, padded], each of `size` values, into out [N, M].

    GATED: apply SwiGLU to the two halves of the rows.
    """
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (token < N)[None, :]
    source = parts_ptr + row.to(tl.int64)[:, None] * padded + token[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = (tl.zeros([], tl.int64) + M) * padded
    for _ in tl.static_range(PARTS):
        total += tl.load(source, mask=mask, other=0.0)
        if GATED:
            total_up += tl.load(source + up, mask=mask, other=0.0)
        source += size
    if GATED:
        total = clamped_swiglu(total, total_up, limit)
    target = out_ptr + token.to(tl.int64)[None, :] * stride_on + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)
