"""mHC's second pass as Triton kernels: the gates from the GEMM's parts, and the block's input.

`mhc_triton.py` describes the passes. With many tokens, each thread computes the gates of one token.
With few tokens, one program per token computes the gates while another computes the block's input.

Legend: N tokens, D hidden, ROWS values of a part: GEMM results, the sum of squares, padding.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from finwhale.ops.launch.early_launch import start_next, wait_for_last
from finwhale.ops.mhc.residual_streams_triton import load_four


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _reciprocal(x, COMPILED: tl.constexpr):
    """1 / x for x between 2^-100 and 2^100, with an error within 2^-23."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _reciprocals(a, b, c, d, COMPILED: tl.constexpr):
    a, b = _reciprocal(a, COMPILED), _reciprocal(b, COMPILED)
    return a, b, _reciprocal(c, COMPILED), _reciprocal(d, COMPILED)


@triton.jit
def _step(old, eps, w, a, b, c, d):
    """Add the terms in the order in which the reciprocals w arrive, with one instruction each."""
    return eps * old + a * w[0] + b * w[1] + c * w[2] + d * w[3]


@triton.jit
def _sinkhorn(a, res_ptr, mask, eps, ITERS: tl.constexpr, COMPILED: tl.constexpr):
    """Sinkhorn with a variable for each of the 16 values, so that threads exchange no data.

    As in the reference, res_ij = a_ij / (u_i v_j); one half step changes only u, the other only v.
    """
    v0 = (a[0] + a[4]) + (a[8] + a[12]) + eps
    v1 = (a[1] + a[5]) + (a[9] + a[13]) + eps
    v2 = (a[2] + a[6]) + (a[10] + a[14]) + eps
    v3 = (a[3] + a[7]) + (a[11] + a[15]) + eps
    u0 = a[0] * 0.0 + 1.0
    u1 = u0
    u2 = u0
    u3 = u0
    for _ in tl.range(ITERS - 1):
        w = _reciprocals(v0, v1, v2, v3, COMPILED)
        u0 = _step(u0, eps, w, a[0], a[1], a[2], a[3])
        u1 = _step(u1, eps, w, a[4], a[5], a[6], a[7])
        u2 = _step(u2, eps, w, a[8], a[9], a[10], a[11])
        u3 = _step(u3, eps, w, a[12], a[13], a[14], a[15])
        w = _reciprocals(u0, u1, u2, u3, COMPILED)
        v0 = _step(v0, eps, w, a[0], a[4], a[8], a[12])
        v1 = _step(v1, eps, w, a[1], a[5], a[9], a[13])
        v2 = _step(v2, eps, w, a[2], a[6], a[10], a[14])
        v3 = _step(v3, eps, w, a[3], a[7], a[11], a[15])
    u, v = (u0, u1, u2, u3), (v0, v1, v2, v3)
    for i in tl.static_range(16):
        tl.store(res_ptr + i, a[i] / u[i // 4] / v[i % 4], mask=mask)


@triton.jit
def _mix(parts_ptr, scale_ptr, base_ptr, rstd, mask, N, M, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """Compute one mix of each token: sum the parts of row M, normalise, scale and shift."""
    total = tl.load(parts_ptr + M * N, mask=mask, other=0.0)
    for slot in tl.static_range(1, SLOTS):
        total += tl.load(parts_ptr + (slot * ROWS + M) * N, mask=mask, other=0.0)
    return total * rstd * tl.load(scale_ptr + M) + tl.load(base_ptr + M)


@triton.jit
def _mix_row(parts_ptr, scale_ptr, base_ptr, rstd, mask, N, M, eps, SLOTS: tl.constexpr, ROWS):
    """Mixes M to M + 3 -> softmax + eps."""
    mixes = ()
    for i in tl.static_range(4):
        mix = _mix(parts_ptr, scale_ptr, base_ptr, rstd, mask, N, M + i, SLOTS, ROWS)
        mixes += (mix,)  # type: ignore[assignment]
    a, b, c, d = mixes  # type: ignore[misc]
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    inverse = 1.0 / (a + b + c + d)
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


# Do not specialise on N, for the same reason as in streams_many_kernel.
@triton.jit(do_not_specialize=["N"])
def gates_kernel(
    parts_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    N,
    D,
    eps,
    rms_eps,
    ITERS: tl.constexpr,
    COMPILED: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the gates with one thread per token; parts [S,ROWS,N]."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = token < N
    parts = parts_ptr + token
    squares = tl.load(parts + 24 * N, mask=mask, other=0.0)
    for slot in tl.static_range(1, SLOTS):
        squares += tl.load(parts + (slot * ROWS + 24) * N, mask=mask, other=0.0)
    rstd = tl.rsqrt(squares / (4 * D) + rms_eps)
    for k in tl.static_range(4):
        pre = _mix(parts, scale_ptr, base_ptr, rstd, mask, N, k, SLOTS, ROWS)
        post = _mix(parts, scale_ptr, base_ptr, rstd, mask, N, 4 + k, SLOTS, ROWS)
        tl.store(pre_ptr + token * 4 + k, sigmoid(pre) + eps, mask=mask)
        tl.store(post_ptr + token * 4 + k, 2.0 * sigmoid(post), mask=mask)
    a = ()
    for i in tl.static_range(4):
        row = _mix_row(parts, scale_ptr, base_ptr, rstd, mask, N, 8 + 4 * i, eps, SLOTS, ROWS)
        a += row
    _sinkhorn(a, res_ptr + token * 16, mask, eps, ITERS, COMPILED)


@triton.jit
def pick(values, index, i: tl.constexpr):
    return tl.sum(tl.where(index == i, values, 0.0), axis=0)


@triton.jit
def sums_of_parts(parts, FIRST, rows, BLOCK_S: tl.constexpr, ROWS: tl.constexpr):
    """Load rows FIRST + rows of a token's parts: [BLOCK_S, rows].

    parts: their pointer, the stride of their rows and the number of slots.
    """
    parts_ptr, stride_r, slots = parts
    slot = tl.arange(0, BLOCK_S)
    source = parts_ptr + ((slot * ROWS + FIRST)[:, None] + rows[None, :]) * stride_r
    return tl.load(source, mask=(slot < slots)[:, None], other=0.0)


@triton.jit
def one_token_gates(
    parts,
    weights,
    outputs,
    D,
    eps,
    rms_eps,
    ITERS: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a token's post and residual gates. PDL: wait for the previous kernel.

    All loads come first, because a sum is a barrier that delays later loads. Those of weights come
    before the wait, because other kernels have filled L2 since the last step.
    """
    scale_ptr, base_ptr = weights
    post_ptr, res_ptr = outputs
    four = tl.arange(0, 4)
    index = tl.arange(0, 16)
    mixes_scale = tl.load(scale_ptr + 8 + index)
    mixes_base = tl.load(base_ptr + 8 + index)
    post_scale = tl.load(scale_ptr + 4 + four)
    post_base = tl.load(base_ptr + 4 + four)
    wait_for_last(PDL)
    mixes = sums_of_parts(parts, 8, index, BLOCK_S, ROWS)
    squares = sums_of_parts(parts, 24, tl.arange(0, 1), BLOCK_S, ROWS)
    post = sums_of_parts(parts, 4, four, BLOCK_S, ROWS)
    rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (4 * D) + rms_eps)
    post = tl.sum(post, axis=0) * rstd * post_scale + post_base
    mixes = tl.sum(mixes, axis=0) * rstd * mixes_scale + mixes_base
    tl.store(post_ptr + four, 2.0 * sigmoid(post))
    mixes = tl.reshape(mixes, [4, 4])
    a = tl.exp(mixes - tl.max(mixes, axis=1)[:, None])
    a = tl.reshape(a * (1.0 / tl.sum(a, axis=1))[:, None] + eps, [16])
    picked = ()
    for i in tl.static_range(16):
        picked += (pick(a, index, i),)  # type: ignore[assignment]
    _sinkhorn(picked, res_ptr, None, eps, ITERS, COMPILED)


@triton.jit
def block_input_kernel(
    streams_ptr,
    parts_ptr,
    pre_ptr,
    scale_ptr,
    base_ptr,
    norm_ptr,
    post_ptr,
    res_ptr,
    y_ptr,
    D,
    stride_n,
    stride_h,
    eps,
    rms_eps,
    stride_t,
    stride_r,
    slots,
    KIND: tl.constexpr,
    ITERS: tl.constexpr,
    COMPILED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a token's normalised block input from its residual streams and `pre`.

    KIND "block": compute pre from the parts; the second row of programs computes the other gates.
    "head": compute hc_head's gates from the parts. "given": read pre.
    """
    if KIND == "given":
        # Process tokens from the last to the first, because the last written ones are still in L2.
        token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    else:
        token = tl.program_id(0).to(tl.int64)
        parts_ptr += token * stride_t
    parts = parts_ptr, stride_r, slots
    if tl.program_id(1) == 1:
        start_next(PDL)
        weights, outputs = (scale_ptr, base_ptr), (post_ptr + token * 4, res_ptr + token * 16)
        # fmt: off
        one_token_gates(parts, weights, outputs, D, eps, rms_eps, ITERS, COMPILED, BLOCK_S, ROWS,
                         PDL)
        # fmt: on
    else:
        d = tl.arange(0, BLOCK_D)
        mask = d < D
        four = tl.arange(0, 4)
        norm = tl.load(norm_ptr + d, mask=mask, other=0.0)
        if KIND != "given":
            M: tl.constexpr = 24 if KIND == "block" else 4
            scale = tl.load(scale_ptr + four * (1 if KIND == "block" else 0))
            base = tl.load(base_ptr + four)
        start_next(PDL)
        wait_for_last(PDL)
        if KIND == "given":
            pre = tl.load(pre_ptr + token * 4 + four)
        else:
            pre = sums_of_parts(parts, 0, four, BLOCK_S, ROWS)
            squares = sums_of_parts(parts, M, tl.arange(0, 1), BLOCK_S, ROWS)
        source = streams_ptr + token * stride_n + d
        x = load_four(source, stride_h, mask)
        if KIND != "given":
            rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (4 * D) + rms_eps)
            pre = sigmoid(tl.sum(pre, axis=0) * rstd * scale + base) + eps
        y = pick(pre, four, 0) * x[0].to(tl.float32) + pick(pre, four, 1) * x[1].to(tl.float32)
        y += pick(pre, four, 2) * x[2].to(tl.float32) + pick(pre, four, 3) * x[3].to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y) / D + rms_eps) * norm
        tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)
