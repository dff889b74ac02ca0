"""mHC as Triton kernels, for H = 4 streams.

Two passes over the streams. The first applies the pending post step, writes the new streams, and
from the values as written takes the products with fn and the sum of squares, in parts over D. The
second adds the parts and makes the gates and the block's normalised input.

- Few tokens: `_streams_few_kernel`, BLOCK_D values of D a program, so that one token already
  occupies D / 32 programs, then `_block_input_kernel`, whose second row of programs runs the
  Sinkhorn iterations beside the block's input.
- Many tokens: `_streams_many_kernel`, D in SLICES parts; `_gates_kernel`, a token a thread;
  `_block_input_kernel`.

The products are those of float32: a bfloat16 stream times fn, which is exactly the sum of three
bfloat16 values, added up in float32, the small parts first. A row's bits depend neither on the
other rows nor, up to FEW_TOKENS and again beyond, on how many there are.

Legend: N tokens, H streams, D hidden, M rows of fn, S parts ("slots") of the products.

Bytes of `mhc_post_pre` with bf16 streams: 10 D values a token (x, residual, new streams, block
input), 8 D more for the second pass once the streams outgrow L2, and fn once, 16 M D bytes. At
4.39 TB/s that is at least, in microseconds for 1, 128, 8192 tokens (8192 with the second pass):
Flash (D 4096) 0.4, 2.7, 153 (214); Pro (D 7168) 0.7, 4.8, 268 (375).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight

NUM_STREAMS = 4
MAX_WIDTH = 16384
FEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """How the first pass is cut.

    Attributes:
        block_n, block_d: tokens and values of D that a program takes at a time.
        slots: parts of D with a program each, for each block of tokens.
    """

    block_n: int
    block_d: int
    slots: int
    num_warps: int


@triton.jit
def _settle(x, COMPILED: tl.constexpr):
    """x, in a form that the compiler cannot see through: else it computes the post step in the
    layout of a product's operand, where every value lies in several threads' registers.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [x],
            dtype=x.dtype,
            is_pure=False,
            pack=4 // (x.dtype.primitive_bitwidth // 8),
        )
    else:
        return x


@triton.jit
def _truncate(x):
    """The upper half of a float32: what bfloat16 can hold of it."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _times_fn(x, fn):
    """x fn^T. fn's three parts are exact, and so are their products with a bfloat16 x."""
    if x.dtype == tl.bfloat16:
        high = _truncate(fn)
        middle = _truncate(fn - high)
        low = fn - high - middle
        total = tl.dot(x, tl.trans(low.to(tl.bfloat16)))
        total = tl.dot(x, tl.trans(middle.to(tl.bfloat16)), total)
        return tl.dot(x, tl.trans(high.to(tl.bfloat16)), total)
    else:
        return tl.dot(x, tl.trans(fn), input_precision="ieee")


@triton.jit
def _streams_few_kernel(
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
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The four streams lie side by side in a tile: column c is stream c // BLOCK_D."""
    slot = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, 4 * BLOCK_D)
    d = slot * BLOCK_D + column % BLOCK_D
    k = column // BLOCK_D
    row = tl.arange(0, ROWS)
    if M > 0:
        fn_mask = (row < M)[:, None] & (d < D)[None, :]
        source = fn_ptr + row[:, None] * (4 * D) + (k * D + d)[None, :]
        fn = tl.load(source, mask=fn_mask, other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = (token < N)[:, None] & (d < D)[None, :]
    source = streams_ptr + token[:, None] * stride_n + d[None, :]
    if POST:
        res = res_ptr + token[:, None] * 16 + k[None, :]
        x0 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(source + stride_h, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(source + 2 * stride_h, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(source + 3 * stride_h, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        post = tl.load(post_ptr + token[:, None] * 4 + k[None, :], mask=mask, other=0.0)
        stream = tl.load(res, mask=mask, other=0.0) * x0
        stream += tl.load(res + 4, mask=mask, other=0.0) * x1
        stream += tl.load(res + 8, mask=mask, other=0.0) * x2
        stream += tl.load(res + 12, mask=mask, other=0.0) * x3
        stream += post * x
        written = stream.to(out_ptr.dtype.element_ty)
        target = out_ptr + (token * 4)[:, None] * D + (k * D + d)[None, :]
        tl.store(target, written, mask=mask)
    else:
        written = tl.load(source + k[None, :] * stride_h, mask=mask, other=0.0)
    if M > 0:
        stream = written.to(tl.float32)
        squares = tl.sum(stream * stream, axis=1)
        total = tl.where(
            row[None, :] == M, squares[:, None], _times_fn(_settle(written, COMPILED), fn)
        )
        target = parts_ptr + (token * tl.num_programs(0) + slot)[:, None] * ROWS + row[None, :]
        tl.store(target, total, mask=(token < N)[:, None])


@triton.jit
def _streams_many_kernel(
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
    steps,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    COMPILED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    slot = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    is_token = first + n < N
    row = tl.arange(0, ROWS)
    streams_ptr += first * stride_n
    out_ptr += first * (4 * D)
    x_ptr += first * D
    if POST:
        post = post_ptr + first * 4 + n * 4
        res = res_ptr + first * 16 + n * 16
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.range(steps, num_stages=1):
        d = (slot * steps + step) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = is_token[:, None] if EVEN else is_token[:, None] & (d < D)[None, :]
        source = streams_ptr + (n * stride_n)[:, None] + d[None, :]
        if POST:
            x0 = tl.load(source, mask=mask, other=0.0)
            x1 = tl.load(source + stride_h, mask=mask, other=0.0)
            x2 = tl.load(source + 2 * stride_h, mask=mask, other=0.0)
            x3 = tl.load(source + 3 * stride_h, mask=mask, other=0.0)
            x = tl.load(x_ptr + (n * D)[:, None] + d[None, :], mask=mask, other=0.0)
        for k in tl.range(4, num_stages=STAGES):
            if POST:
                r0 = tl.load(res + k, mask=is_token, other=0.0)
                r1 = tl.load(res + 4 + k, mask=is_token, other=0.0)
                r2 = tl.load(res + 8 + k, mask=is_token, other=0.0)
                r3 = tl.load(res + 12 + k, mask=is_token, other=0.0)
                p = tl.load(post + k, mask=is_token, other=0.0)
                stream = r0[:, None] * _settle(x0, COMPILED).to(tl.float32)
                stream += r1[:, None] * _settle(x1, COMPILED).to(tl.float32)
                stream += r2[:, None] * _settle(x2, COMPILED).to(tl.float32)
                stream += r3[:, None] * _settle(x3, COMPILED).to(tl.float32)
                stream += p[:, None] * _settle(x, COMPILED).to(tl.float32)
                written = stream.to(out_ptr.dtype.element_ty)
                target = out_ptr + (n * 4 * D + k * D)[:, None] + d[None, :]
                tl.store(target, written, mask=mask)
            else:
                written = tl.load(source + k * stride_h, mask=mask, other=0.0)
            if M > 0:
                stream = written.to(tl.float32)
                squares += tl.sum(stream * stream, axis=1)
                fn_mask = (row < M)[:, None] if EVEN else (row < M)[:, None] & (d < D)[None, :]
                columns = fn_ptr + (row * (4 * D) + k * D)[:, None] + d[None, :]
                total += _times_fn(
                    _settle(written, COMPILED), tl.load(columns, mask=fn_mask, other=0.0)
                )
    if M > 0:
        total = tl.where(row[None, :] == M, squares[:, None], total)
        target = ((first + n) * tl.num_programs(0) + slot) * ROWS
        tl.store(parts_ptr + target[:, None] + row[None, :], total, mask=is_token[:, None])


# --- The gates ------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _sum4(a, x, b, y, c, z, d, w):
    return (a * x + b * y) + (c * z + d * w)


@triton.jit
def _sinkhorn(
    a00,
    a01,
    a02,
    a03,
    a10,
    a11,
    a12,
    a13,
    a20,
    a21,
    a22,
    a23,
    a30,
    a31,
    a32,
    a33,
    res_ptr,
    mask,
    eps,
    ITERS: tl.constexpr,
):
    """Each of the 16 values is a variable, so that no iteration exchanges between threads.

    The reference's form: with m_ij = a_ij / (u_i v_j), a half step changes only u, then only v.
    """
    v0 = (a00 + a10) + (a20 + a30) + eps
    v1 = (a01 + a11) + (a21 + a31) + eps
    v2 = (a02 + a12) + (a22 + a32) + eps
    v3 = (a03 + a13) + (a23 + a33) + eps
    u0 = a00 * 0.0 + 1.0
    u1 = u0
    u2 = u0
    u3 = u0
    for _ in tl.range(ITERS - 1):
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
    _store_row(res_ptr, a00, a01, a02, a03, u0, v0, v1, v2, v3, mask)
    _store_row(res_ptr + 4, a10, a11, a12, a13, u1, v0, v1, v2, v3, mask)
    _store_row(res_ptr + 8, a20, a21, a22, a23, u2, v0, v1, v2, v3, mask)
    _store_row(res_ptr + 12, a30, a31, a32, a33, u3, v0, v1, v2, v3, mask)


@triton.jit
def _store_row(row_ptr, a, b, c, d, u, v0, v1, v2, v3, mask):
    tl.store(row_ptr, a / u / v0, mask=mask)
    tl.store(row_ptr + 1, b / u / v1, mask=mask)
    tl.store(row_ptr + 2, c / u / v2, mask=mask)
    tl.store(row_ptr + 3, d / u / v3, mask=mask)


@triton.jit
def _mix(parts_ptr, scale_ptr, base_ptr, rstd, mask, M, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """One mix of each token: row M's parts added up, normalised, scaled and shifted."""
    total = tl.load(parts_ptr + M, mask=mask, other=0.0)
    for slot in tl.static_range(1, SLOTS):
        total += tl.load(parts_ptr + slot * ROWS + M, mask=mask, other=0.0)
    return total * rstd * tl.load(scale_ptr + M) + tl.load(base_ptr + M)


@triton.jit
def _mix_row(parts_ptr, scale_ptr, base_ptr, rstd, mask, M, eps, SLOTS: tl.constexpr, ROWS):
    """Mixes M to M + 3 -> softmax + eps."""
    a = _mix(parts_ptr, scale_ptr, base_ptr, rstd, mask, M, SLOTS, ROWS)
    b = _mix(parts_ptr, scale_ptr, base_ptr, rstd, mask, M + 1, SLOTS, ROWS)
    c = _mix(parts_ptr, scale_ptr, base_ptr, rstd, mask, M + 2, SLOTS, ROWS)
    d = _mix(parts_ptr, scale_ptr, base_ptr, rstd, mask, M + 3, SLOTS, ROWS)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    c = tl.exp(c - top)
    d = tl.exp(d - top)
    inverse = 1.0 / (a + b + c + d)
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


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
    ITERS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A token a thread."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = token < N
    parts = parts_ptr + token * (SLOTS * ROWS)
    squares = tl.load(parts + 24, mask=mask, other=0.0)
    for slot in tl.static_range(1, SLOTS):
        squares += tl.load(parts + slot * ROWS + 24, mask=mask, other=0.0)
    rstd = tl.rsqrt(squares / (4 * D) + rms_eps)
    for k in tl.static_range(4):
        pre = _mix(parts, scale_ptr, base_ptr, rstd, mask, k, SLOTS, ROWS)
        post = _mix(parts, scale_ptr, base_ptr, rstd, mask, 4 + k, SLOTS, ROWS)
        tl.store(pre_ptr + token * 4 + k, _sigmoid(pre) + eps, mask=mask)
        tl.store(post_ptr + token * 4 + k, 2.0 * _sigmoid(post), mask=mask)
    a00, a01, a02, a03 = _mix_row(parts, scale_ptr, base_ptr, rstd, mask, 8, eps, SLOTS, ROWS)
    a10, a11, a12, a13 = _mix_row(parts, scale_ptr, base_ptr, rstd, mask, 12, eps, SLOTS, ROWS)
    a20, a21, a22, a23 = _mix_row(parts, scale_ptr, base_ptr, rstd, mask, 16, eps, SLOTS, ROWS)
    a30, a31, a32, a33 = _mix_row(parts, scale_ptr, base_ptr, rstd, mask, 20, eps, SLOTS, ROWS)
    _sinkhorn(
        a00,
        a01,
        a02,
        a03,
        a10,
        a11,
        a12,
        a13,
        a20,
        a21,
        a22,
        a23,
        a30,
        a31,
        a32,
        a33,
        res_ptr + token * 16,
        mask,
        eps,
        ITERS,
    )


@triton.jit
def _pick(values, place, i: tl.constexpr):
    return tl.sum(tl.where(place == i, values, 0.0), axis=0)


@triton.jit
def _rows_sum(parts_ptr, slots, FIRST, rows, BLOCK_S: tl.constexpr, ROWS: tl.constexpr):
    """Rows FIRST + rows, each added up over its parts."""
    slot = tl.arange(0, BLOCK_S)
    source = parts_ptr + (slot * ROWS + FIRST)[:, None] + rows[None, :]
    return tl.sum(tl.load(source, mask=(slot < slots)[:, None], other=0.0), axis=0)


@triton.jit
def _rstd(parts_ptr, slots, D, rms_eps, M, BLOCK_S: tl.constexpr, ROWS: tl.constexpr):
    slot = tl.arange(0, BLOCK_S)
    squares = tl.load(parts_ptr + slot * ROWS + M, mask=slot < slots, other=0.0)
    return tl.rsqrt(tl.sum(squares) / (4 * D) + rms_eps)


@triton.jit
def _one_token_gates(
    parts_ptr,
    scale_ptr,
    base_ptr,
    post_ptr,
    res_ptr,
    D,
    eps,
    rms_eps,
    slots,
    ITERS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
):
    four = tl.arange(0, 4)
    place = tl.arange(0, 16)
    post = _rows_sum(parts_ptr, slots, 4, four, BLOCK_S, ROWS)
    mixes = _rows_sum(parts_ptr, slots, 8, place, BLOCK_S, ROWS)
    rstd = _rstd(parts_ptr, slots, D, rms_eps, 24, BLOCK_S, ROWS)
    post = post * rstd * tl.load(scale_ptr + 4 + four) + tl.load(base_ptr + 4 + four)
    tl.store(post_ptr + four, 2.0 * _sigmoid(post))
    mixes = mixes * rstd * tl.load(scale_ptr + 8 + place) + tl.load(base_ptr + 8 + place)
    mixes = tl.reshape(mixes, [4, 4])
    a = tl.exp(mixes - tl.max(mixes, axis=1)[:, None])
    a = tl.reshape(a * (1.0 / tl.sum(a, axis=1))[:, None] + eps, [16])
    _sinkhorn(
        _pick(a, place, 0),
        _pick(a, place, 1),
        _pick(a, place, 2),
        _pick(a, place, 3),
        _pick(a, place, 4),
        _pick(a, place, 5),
        _pick(a, place, 6),
        _pick(a, place, 7),
        _pick(a, place, 8),
        _pick(a, place, 9),
        _pick(a, place, 10),
        _pick(a, place, 11),
        _pick(a, place, 12),
        _pick(a, place, 13),
        _pick(a, place, 14),
        _pick(a, place, 15),
        res_ptr,
        None,
        eps,
        ITERS,
    )


@triton.jit
def _block_input_kernel(
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
    slots,
    KIND: tl.constexpr,
    ITERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """KIND "block": pre from the parts, the other gates by the second row of programs; "head":
    hc_head's gates from the parts; "given": pre is read.
    """
    if KIND == "given":
        # From the last token backwards: what was written last is still in L2.
        token = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    else:
        token = tl.program_id(0).to(tl.int64)
        parts_ptr += token * slots * ROWS
    if tl.program_id(1) == 1:
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        _one_token_gates(
            parts_ptr,
            scale_ptr,
            base_ptr,
            post_ptr + token * 4,
            res_ptr + token * 16,
            D,
            eps,
            rms_eps,
            slots,
            ITERS,
            BLOCK_S,
            ROWS,
        )
    else:
        d = tl.arange(0, BLOCK_D)
        mask = d < D
        four = tl.arange(0, 4)
        norm = tl.load(norm_ptr + d, mask=mask, other=0.0)
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        source = streams_ptr + token * stride_n + d
        x0 = tl.load(source, mask=mask, other=0.0)
        x1 = tl.load(source + stride_h, mask=mask, other=0.0)
        x2 = tl.load(source + 2 * stride_h, mask=mask, other=0.0)
        x3 = tl.load(source + 3 * stride_h, mask=mask, other=0.0)
        if KIND == "given":
            pre = tl.load(pre_ptr + token * 4 + four)
        else:
            M: tl.constexpr = 24 if KIND == "block" else 4
            SCALE_STRIDE: tl.constexpr = 1 if KIND == "block" else 0
            pre = _rows_sum(parts_ptr, slots, 0, four, BLOCK_S, ROWS)
            pre *= _rstd(parts_ptr, slots, D, rms_eps, M, BLOCK_S, ROWS)
            pre = pre * tl.load(scale_ptr + four * SCALE_STRIDE) + tl.load(base_ptr + four)
            pre = _sigmoid(pre) + eps
        y = _pick(pre, four, 0) * x0.to(tl.float32) + _pick(pre, four, 1) * x1.to(tl.float32)
        y += _pick(pre, four, 2) * x2.to(tl.float32) + _pick(pre, four, 3) * x3.to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y) / D + rms_eps) * norm
        tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)


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


def _dependent(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch: a kernel's start overlaps the end of the one before."""
    return {"launch_pdl": True} if PDL and device.type != "cpu" else {}


_COMPILED = torch.version.hip is None and not triton.knobs.runtime.interpret
PDL = False
STAGES = 1
MAXNREG = 128  # two programs of 256 threads a multiprocessor
MANY = Plan(block_n=64, block_d=64, slots=8, num_warps=8)
FEW = Plan(block_n=16, block_d=32, slots=0, num_warps=4)
FINISH_WARPS = 4


def _num_slots(num_tokens: int, width: int) -> int:
    return triton.cdiv(width, FEW.block_d) if num_tokens <= FEW_TOKENS else MANY.slots


def _run_streams(
    streams_NHD: Tensor,
    post: tuple[Tensor, Tensor, Tensor] | None,
    fn: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The streams after the post step (x, post, res), if there is one, and the products' parts
    [N,S,ROWS] float32: M products, then the sum of squares.
    """
    _check_streams(streams_NHD)
    num_tokens, _, width = streams_NHD.shape
    out_NHD, x, post_mix, res_mix = streams_NHD, streams_NHD, streams_NHD, streams_NHD
    if post is not None:
        x, post_mix, res_mix = post
        _check_contiguous(x=x, post=post_mix, res=res_mix)
        out_NHD = torch.empty(streams_NHD.shape, dtype=streams_NHD.dtype, device=streams_NHD.device)
    slots = _num_slots(num_tokens, width)
    parts, num_rows, rows = out_NHD, 0, 16
    if fn is not None:
        _check_contiguous(fn=fn)
        num_rows = fn.shape[0]
        rows = triton.next_power_of_2(max(16, num_rows + 1))
        parts = torch.empty((num_tokens, slots, rows), dtype=torch.float32, device=out_NHD.device)
    if num_tokens == 0:
        return out_NHD, parts
    tensors = (x, post_mix, res_mix, streams_NHD, out_NHD, out_NHD if fn is None else fn, parts)
    sizes = (num_tokens, width, streams_NHD.stride(0), streams_NHD.stride(1))
    constants = {"M": num_rows, "ROWS": rows, "POST": post is not None, "COMPILED": _COMPILED}
    if num_tokens <= FEW_TOKENS:
        options = _dependent(streams_NHD.device)
        _streams_few_kernel[(slots, triton.cdiv(num_tokens, FEW.block_n))](
            *tensors,
            *sizes,
            **constants,
            BLOCK_N=FEW.block_n,
            BLOCK_D=FEW.block_d,
            DEPENDENT=bool(options),
            num_warps=FEW.num_warps,
            **options,
        )
        return out_NHD, parts
    steps = triton.cdiv(triton.cdiv(width, MANY.block_d), slots)
    _streams_many_kernel[(slots, triton.cdiv(num_tokens, MANY.block_n))](
        *tensors,
        *sizes,
        steps,
        **constants,
        EVEN=steps * slots * MANY.block_d == width,
        BLOCK_N=MANY.block_n,
        BLOCK_D=MANY.block_d,
        STAGES=STAGES,
        **({"maxnreg": MAXNREG} if MAXNREG else {}),
        num_warps=MANY.num_warps,
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
    _, slots, rows = parts.shape
    pre, kind = y_ND, "head" if is_head else "block"
    options = _dependent(device) if num_tokens <= FEW_TOKENS else {}
    block_d = triton.next_power_of_2(width)
    num_warps = FINISH_WARPS
    if num_tokens > FEW_TOKENS:
        num_warps = min(16, max(1, block_d // 512))
    if num_tokens > FEW_TOKENS and not is_head:
        kind = "given"
        pre = torch.empty((num_tokens, streams), dtype=torch.float32, device=device)
        _gates_kernel[(triton.cdiv(num_tokens, 32),)](
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
            ITERS=params.num_iters,
            SLOTS=slots,
            ROWS=rows,
            BLOCK_N=32,
            num_warps=1,
        )
    _block_input_kernel[(num_tokens, 2 if kind == "block" else 1)](
        streams_NHD,
        parts,
        pre,
        w.scale,
        w.base,
        w.norm,
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
        ROWS=rows,
        BLOCK_S=triton.next_power_of_2(slots),
        BLOCK_D=block_d,
        DEPENDENT=bool(options),
        num_warps=num_warps,
        **options,
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
