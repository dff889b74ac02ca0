"""mHC as Triton kernels, for H = 4 streams.

1. `_streams_kernel`, over blocks of tokens and of D: applies the pending post step, writes the new
   streams, and from the values as written takes the products with fn and the sum of squares.
2. `_block_input_kernel`, a token a program: adds the products' parts, computes the gates and the
   Sinkhorn iterations, then the pre-weighted sum of the streams and its RMSNorm. With many tokens
   the gates have a kernel of their own, `_gates_kernel`, where every thread has its own token.

A row's bits never depend on the other rows or on how many there are: parts cover BLOCK_D values of
D whatever N is, and are added in one order, first GROUP
neighbours, then the groups in pairs.

Legend: N tokens, H streams, D hidden, M rows of fn, S parts ("slots") of the products.

Bytes of `mhc_post_pre` with bf16 streams: 10 D values a token (x, residual, new streams, block
input), 8 D more for the second pass once the streams outgrow L2, and fn once, 16 M D bytes. At
4.39 TB/s that is at least, in microseconds for 1, 128, 8192 tokens (8192 with the second pass):
Flash (D 4096) 0.4, 2.7, 153 (214); Pro (D 7168) 0.7, 4.8, 268 (375).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight

NUM_STREAMS = 4
MAX_WIDTH = 16384
BLOCK_D = 32
GROUP = 8
BLOCK_GATES = 16
PADDED_ROWS = tl.constexpr(32)
# Up to here a part has a slot of its own, so that one token already occupies D / 32 programs;
# beyond, a program adds GROUP parts itself.
FEW_TOKENS = 256


@triton.jit
def _dot_fn(values, fn, total, PRECISION: tl.constexpr):
    """total + values fn^T. "split": values are exact in tf32, and fn is the sum of two tf32."""
    if PRECISION == "split":
        high = (fn.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        total = tl.dot(values, tl.trans(fn - high), total, input_precision="tf32")
        return tl.dot(values, tl.trans(high), total, input_precision="tf32")
    else:
        return tl.dot(values, tl.trans(fn), total, input_precision=PRECISION)


@triton.jit
def _streams_kernel(
    x_ptr,
    post_ptr,
    res_ptr,
    streams_ptr,
    out_ptr,
    fn_ptr,
    parts_ptr,
    N,
    D,
    stride_n,
    stride_h,
    M: tl.constexpr,
    POST: tl.constexpr,
    DOTS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.program_id(1)
    rows = tl.arange(0, PADDED_ROWS)
    is_token = token < N
    total = tl.zeros([BLOCK_N, PADDED_ROWS], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    for part in tl.range(GROUP):
        d = (slot * GROUP + part) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = is_token[:, None] & (d < D)[None, :]
        source = streams_ptr + token[:, None] * stride_n + d[None, :]
        x0 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(source + stride_h, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(source + 2 * stride_h, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(source + 3 * stride_h, mask=mask, other=0.0).to(tl.float32)
        old = (x0, x1, x2, x3)
        if POST:
            x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=mask, other=0.0)
            x = x.to(tl.float32)
        dots = tl.zeros([BLOCK_N, PADDED_ROWS], tl.float32)
        square = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for k in tl.static_range(4):
            if POST:
                column = res_ptr + token * 16 + k
                stream = tl.load(column, mask=is_token, other=0.0)[:, None] * x0
                stream += tl.load(column + 4, mask=is_token, other=0.0)[:, None] * x1
                stream += tl.load(column + 8, mask=is_token, other=0.0)[:, None] * x2
                stream += tl.load(column + 12, mask=is_token, other=0.0)[:, None] * x3
                stream += tl.load(post_ptr + token * 4 + k, mask=is_token, other=0.0)[:, None] * x
                written = stream.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + (token * 4 + k)[:, None] * D + d[None, :], written, mask=mask)
                stream = written.to(tl.float32)
            else:
                stream = old[k]
            if DOTS:
                fn = tl.load(
                    fn_ptr + rows[:, None] * (4 * D) + k * D + d[None, :],
                    mask=(rows < M)[:, None] & (d < D)[None, :],
                    other=0.0,
                )
                dots = _dot_fn(stream, fn, dots, PRECISION)
                square += stream * stream
        if DOTS:
            total += dots
            squares += tl.sum(square, axis=1)
    if DOTS:
        total = tl.where(rows[None, :] == M, squares[:, None], total)
        target = parts_ptr + (token * tl.num_programs(1) + slot)[:, None] * PADDED_ROWS
        tl.store(target + rows[None, :], total, mask=is_token[:, None])


@triton.jit
def _mixes(
    parts_ptr,
    scale_ptr,
    base_ptr,
    token,
    is_token,
    D,
    rms_eps,
    slots,
    M: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    LEVELS: tl.constexpr,
    SLOTS_PER_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_N, 32]: the products, normalised, scaled and shifted."""
    rows = tl.arange(0, PADDED_ROWS)
    GROUPS: tl.constexpr = 1 << LEVELS
    slot = tl.arange(0, GROUPS)[None, None, :] * SLOTS_PER_GROUP
    source = parts_ptr + (token * slots)[:, None, None] * PADDED_ROWS + rows[None, :, None]
    total = tl.zeros([BLOCK_N, PADDED_ROWS, GROUPS], tl.float32)
    for i in tl.static_range(SLOTS_PER_GROUP):
        mask = is_token[:, None, None] & (slot + i < slots)
        total += tl.load(source + (slot + i) * PADDED_ROWS, mask=mask, other=0.0)
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(total, [BLOCK_N, PADDED_ROWS, GROUPS >> (level + 1), 2])
        even, odd = tl.split(pairs)
        total = even + odd
    total = tl.reshape(total, [BLOCK_N, PADDED_ROWS])
    squares = tl.sum(tl.where(rows[None, :] == M, total, 0.0), axis=1)
    rstd = tl.rsqrt(squares / (4 * D) + rms_eps)
    scale = tl.load(scale_ptr + rows * SCALE_STRIDE, mask=rows < M, other=0.0)
    base = tl.load(base_ptr + rows, mask=rows < M, other=0.0)
    return total * rstd[:, None] * scale[None, :] + base[None, :]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _columns(mixes, BLOCK_N: tl.constexpr):
    """[BLOCK_N, 32] seen as [BLOCK_N, 8, 4] -> its four columns [BLOCK_N, 8]."""
    even, odd = tl.split(tl.reshape(mixes, [BLOCK_N, 8, 2, 2]))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _first_rows(column, BLOCK_N: tl.constexpr):
    """[BLOCK_N, 8] -> its first six values, [BLOCK_N] each."""
    even, odd = tl.split(tl.reshape(column, [BLOCK_N, 2, 2, 2]))
    r04, r26 = tl.split(even)
    r15, r37 = tl.split(odd)
    r0, r4 = tl.split(r04)
    r1, r5 = tl.split(r15)
    r2, _ = tl.split(r26)
    r3, _ = tl.split(r37)
    return r0, r1, r2, r3, r4, r5


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    inverse = 1.0 / (a + b + c + d)
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _sum4(a, x, b, y, c, z, d, w):
    return (a * x + b * y) + (c * z + d * w)


@triton.jit
def _gates(
    mixes, post_ptr, res_ptr, token, is_token, eps, ITERS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Writes post and res; returns pre. Each of the 24 mixes is a value [BLOCK_N] of its own, so
    that Sinkhorn needs no exchange between threads. Its form is that of the reference: with u and v
    such that m_ij = a_ij / (u_i v_j), an iteration changes only u, then only v.
    """
    c0, c1, c2, c3 = _columns(mixes, BLOCK_N)
    p0, q0, a00, a10, a20, a30 = _first_rows(c0, BLOCK_N)
    p1, q1, a01, a11, a21, a31 = _first_rows(c1, BLOCK_N)
    p2, q2, a02, a12, a22, a32 = _first_rows(c2, BLOCK_N)
    p3, q3, a03, a13, a23, a33 = _first_rows(c3, BLOCK_N)

    post = post_ptr + token * 4
    tl.store(post, 2.0 * _sigmoid(q0), mask=is_token)
    tl.store(post + 1, 2.0 * _sigmoid(q1), mask=is_token)
    tl.store(post + 2, 2.0 * _sigmoid(q2), mask=is_token)
    tl.store(post + 3, 2.0 * _sigmoid(q3), mask=is_token)

    a00, a01, a02, a03 = _softmax(a00, a01, a02, a03, eps)
    a10, a11, a12, a13 = _softmax(a10, a11, a12, a13, eps)
    a20, a21, a22, a23 = _softmax(a20, a21, a22, a23, eps)
    a30, a31, a32, a33 = _softmax(a30, a31, a32, a33, eps)
    v0 = (a00 + a10) + (a20 + a30) + eps
    v1 = (a01 + a11) + (a21 + a31) + eps
    v2 = (a02 + a12) + (a22 + a32) + eps
    v3 = (a03 + a13) + (a23 + a33) + eps
    u0 = tl.full([BLOCK_N], 1.0, tl.float32)
    u1 = u0
    u2 = u0
    u3 = u0
    for _ in range(ITERS - 1):
        w0 = 1.0 / v0
        w1 = 1.0 / v1
        w2 = 1.0 / v2
        w3 = 1.0 / v3
        u0 = _sum4(a00, w0, a01, w1, a02, w2, a03, w3) + eps * u0
        u1 = _sum4(a10, w0, a11, w1, a12, w2, a13, w3) + eps * u1
        u2 = _sum4(a20, w0, a21, w1, a22, w2, a23, w3) + eps * u2
        u3 = _sum4(a30, w0, a31, w1, a32, w2, a33, w3) + eps * u3
        w0 = 1.0 / u0
        w1 = 1.0 / u1
        w2 = 1.0 / u2
        w3 = 1.0 / u3
        v0 = _sum4(a00, w0, a10, w1, a20, w2, a30, w3) + eps * v0
        v1 = _sum4(a01, w0, a11, w1, a21, w2, a31, w3) + eps * v1
        v2 = _sum4(a02, w0, a12, w1, a22, w2, a32, w3) + eps * v2
        v3 = _sum4(a03, w0, a13, w1, a23, w2, a33, w3) + eps * v3
    _store_row(res_ptr + token * 16, a00, a01, a02, a03, u0, v0, v1, v2, v3, is_token)
    _store_row(res_ptr + token * 16 + 4, a10, a11, a12, a13, u1, v0, v1, v2, v3, is_token)
    _store_row(res_ptr + token * 16 + 8, a20, a21, a22, a23, u2, v0, v1, v2, v3, is_token)
    _store_row(res_ptr + token * 16 + 12, a30, a31, a32, a33, u3, v0, v1, v2, v3, is_token)
    return _sigmoid(p0) + eps, _sigmoid(p1) + eps, _sigmoid(p2) + eps, _sigmoid(p3) + eps


@triton.jit
def _store_row(row_ptr, a, b, c, d, u, v0, v1, v2, v3, mask):
    tl.store(row_ptr, a / u / v0, mask=mask)
    tl.store(row_ptr + 1, b / u / v1, mask=mask)
    tl.store(row_ptr + 2, c / u / v2, mask=mask)
    tl.store(row_ptr + 3, d / u / v3, mask=mask)


@triton.jit
def _gates_kernel(
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
    slots,
    ITERS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token = token < N
    mixes = _mixes(
        parts_ptr,
        scale_ptr,
        base_ptr,
        token,
        is_token,
        D,
        rms_eps,
        slots,
        M=24,
        SCALE_STRIDE=1,
        LEVELS=LEVELS,
        SLOTS_PER_GROUP=1,
        BLOCK_N=BLOCK_N,
    )
    g0, g1, g2, g3 = _gates(mixes, post_ptr, res_ptr, token, is_token, eps, ITERS, BLOCK_N)
    pre = pre_ptr + token * 4
    tl.store(pre, g0, mask=is_token)
    tl.store(pre + 1, g1, mask=is_token)
    tl.store(pre + 2, g2, mask=is_token)
    tl.store(pre + 3, g3, mask=is_token)


@triton.jit
def _block_input_kernel(
    streams_ptr,
    parts_ptr,
    scale_ptr,
    base_ptr,
    norm_ptr,
    pre_ptr,
    post_ptr,
    res_ptr,
    y_ptr,
    D,
    stride_n,
    stride_h,
    eps,
    rms_eps,
    slots,
    KIND: tl.constexpr,
    ITERS: tl.constexpr,
    LEVELS: tl.constexpr,
    SLOTS_PER_GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """KIND "block": gates from the parts; "head": hc_head's gates; "given": pre is read."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    every = token >= 0
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    source = streams_ptr + tl.program_id(0).to(tl.int64) * stride_n + d
    # Asked for before the gates, whose chain of dependent steps hides the wait.
    x0 = tl.load(source, mask=mask, other=0.0)
    x1 = tl.load(source + stride_h, mask=mask, other=0.0)
    x2 = tl.load(source + 2 * stride_h, mask=mask, other=0.0)
    x3 = tl.load(source + 3 * stride_h, mask=mask, other=0.0)
    norm = tl.load(norm_ptr + d, mask=mask, other=0.0)
    if KIND == "given":
        g0 = tl.load(pre_ptr + token * 4)
        g1 = tl.load(pre_ptr + token * 4 + 1)
        g2 = tl.load(pre_ptr + token * 4 + 2)
        g3 = tl.load(pre_ptr + token * 4 + 3)
    else:
        mixes = _mixes(
            parts_ptr,
            scale_ptr,
            base_ptr,
            token,
            every,
            D,
            rms_eps,
            slots,
            M=24 if KIND == "block" else 4,
            SCALE_STRIDE=1 if KIND == "block" else 0,
            LEVELS=LEVELS,
            SLOTS_PER_GROUP=SLOTS_PER_GROUP,
            BLOCK_N=1,
        )
        if KIND == "block":
            g0, g1, g2, g3 = _gates(mixes, post_ptr, res_ptr, token, every, eps, ITERS, 1)
        else:
            c0, c1, c2, c3 = _columns(_sigmoid(mixes) + eps, 1)
            g0, _, _, _, _, _ = _first_rows(c0, 1)
            g1, _, _, _, _, _ = _first_rows(c1, 1)
            g2, _, _, _, _, _ = _first_rows(c2, 1)
            g3, _, _, _, _, _ = _first_rows(c3, 1)
    y = g0 * x0.to(tl.float32) + g1 * x1.to(tl.float32)
    y += g2 * x2.to(tl.float32) + g3 * x3.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(y * y) / D + rms_eps)
    y = y * rstd * norm
    target = y_ptr + tl.program_id(0).to(tl.int64) * D + d
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=mask)


# --- Launch ---------------------------------------------------------------------------------------


def _check_streams(streams_NHD: Tensor) -> None:
    _, streams, width = streams_NHD.shape
    if streams != NUM_STREAMS:
        raise ValueError(f"these mHC kernels take {NUM_STREAMS} streams, got {streams}")
    if width > MAX_WIDTH:
        raise ValueError(f"these mHC kernels take a width of at most {MAX_WIDTH}, got {width}")
    if streams_NHD.stride(2) != 1:
        raise ValueError(f"a stream's values must lie together, got {streams_NHD.stride()}")


def _check_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _precision(dtype: torch.dtype) -> Literal["split", "tf32x3", "ieee"]:
    if torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "split"


def _run_streams(
    streams_NHD: Tensor,
    post: tuple[Tensor, Tensor, Tensor] | None,
    fn: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The streams after the post step (x, post, res), if there is one, and the products' parts."""
    _check_streams(streams_NHD)
    num_tokens, _, width = streams_NHD.shape
    out_NHD, x, post_mix, res_mix = streams_NHD, streams_NHD, streams_NHD, streams_NHD
    if post is not None:
        x, post_mix, res_mix = post
        _check_contiguous(x=x, post=post_mix, res=res_mix)
        out_NHD = torch.empty(streams_NHD.shape, dtype=streams_NHD.dtype, device=streams_NHD.device)
    few = num_tokens <= FEW_TOKENS
    group = 1 if few else GROUP
    slots = triton.cdiv(width, BLOCK_D * group)
    parts = out_NHD
    if fn is not None:
        _check_contiguous(fn=fn)
        shape = (num_tokens, slots, PADDED_ROWS.value)
        parts = torch.empty(shape, dtype=torch.float32, device=streams_NHD.device)
    if num_tokens:
        block_n = 16 if few else 32
        _streams_kernel[(triton.cdiv(num_tokens, block_n), slots)](
            x,
            post_mix,
            res_mix,
            streams_NHD,
            out_NHD,
            out_NHD if fn is None else fn,
            parts,
            num_tokens,
            width,
            streams_NHD.stride(0),
            streams_NHD.stride(1),
            M=0 if fn is None else fn.shape[0],
            POST=post is not None,
            DOTS=fn is not None,
            PRECISION=_precision(streams_NHD.dtype),
            GROUP=group,
            BLOCK_N=block_n,
            BLOCK_D=BLOCK_D,
            num_warps=4 if few or streams_NHD.dtype != torch.float32 else 8,
        )
    return out_NHD, parts


def _run_block_input(
    streams_NHD: Tensor, parts: Tensor, w: MhcWeight | HcHeadWeight, params: MhcParams
) -> tuple[Tensor, Tensor, Tensor]:
    """(block input, post, res); for hc_head the last two stay unwritten."""
    num_tokens, streams, width = streams_NHD.shape
    device = streams_NHD.device
    _check_contiguous(scale=w.scale, base=w.base, norm=w.norm)
    y_ND = torch.empty((num_tokens, width), dtype=streams_NHD.dtype, device=device)
    is_head = isinstance(w, HcHeadWeight)
    post, res = y_ND, y_ND
    if not is_head:
        post = torch.empty((num_tokens, streams), dtype=torch.float32, device=device)
        res = torch.empty((num_tokens, streams, streams), dtype=torch.float32, device=device)
    if num_tokens == 0:
        return y_ND, post, res
    few = num_tokens <= FEW_TOKENS
    pre, kind, slots = y_ND, "head" if is_head else "block", parts.shape[1]
    slots_per_group = GROUP if few else 1
    levels = (triton.cdiv(slots, slots_per_group) - 1).bit_length()
    if not few and not is_head:
        kind = "given"
        pre = torch.empty((num_tokens, streams), dtype=torch.float32, device=device)
        _gates_kernel[(triton.cdiv(num_tokens, BLOCK_GATES),)](
            parts,
            w.scale,
            w.base,
            pre,
            post,
            res,
            num_tokens,
            width,
            params.eps,
            params.rms_eps,
            slots,
            ITERS=params.num_iters,
            LEVELS=levels,
            BLOCK_N=BLOCK_GATES,
            num_warps=8,
        )
    block_d = triton.next_power_of_2(width)
    _block_input_kernel[(num_tokens,)](
        streams_NHD,
        parts,
        w.scale,
        w.base,
        w.norm,
        pre,
        post,
        res,
        y_ND,
        width,
        streams_NHD.stride(0),
        streams_NHD.stride(1),
        params.eps,
        params.rms_eps,
        slots,
        KIND=kind,
        ITERS=params.num_iters,
        LEVELS=levels,
        SLOTS_PER_GROUP=slots_per_group,
        BLOCK_D=block_d,
        num_warps=min(16, max(1, block_d // 512)),
    )
    return y_ND, post, res


def mhc_pre(residual_NHD: Tensor, w: MhcWeight, params: MhcParams) -> tuple[Tensor, Tensor, Tensor]:
    streams, parts = _run_streams(residual_NHD, None, w.fn)
    return _run_block_input(streams, parts, w, params)


def mhc_post(x_ND: Tensor, post_NH: Tensor, res_NHH: Tensor, residual_NHD: Tensor) -> Tensor:
    return _run_streams(residual_NHD, (x_ND, post_NH, res_NHH), None)[0]


def mhc_post_pre(
    x_ND: Tensor,
    post_NH: Tensor,
    res_NHH: Tensor,
    residual_NHD: Tensor,
    w: MhcWeight,
    params: MhcParams,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams, parts = _run_streams(residual_NHD, (x_ND, post_NH, res_NHH), w.fn)
    return *_run_block_input(streams, parts, w, params), streams


def hc_head(streams_NHD: Tensor, w: HcHeadWeight, params: MhcParams) -> Tensor:
    streams, parts = _run_streams(streams_NHD, None, w.fn)
    return _run_block_input(streams, parts, w, params)[0]
