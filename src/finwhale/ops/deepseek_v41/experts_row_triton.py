"""DeepSeek-V4.1's routed experts for one token: two launches, without an order of the pairs.

A program has some rows of one pair's matrix, in the layout of experts_hopper.py, and all of K. Its
warps are WM groups of M8 * 8 rows times WK parts of K. Tensor cores multiply; on CUDA cores,
converting every weight to float32 would take longer than loading it. A product wants the token in
eight columns. Instead of eight copies, these hold the token's blocks of up to eight segments of a
part: each thread loads and rounds other values. So the product of a segment's weights has one
column of use, which `_add_segment` keeps. The order of a product's columns is that of the threads'
words: neither weights nor the token move between threads.

A program requests AHEAD segments of weights first. Down does so before gate and up has ended, which
stores its hidden values in float32, as they are. A token's bits differ from those of more tokens.

Legend: M rows and K columns of a matrix, D hidden, I intermediate width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.deepseek_v41.gemm_triton import DEFAULT, GemmOptions
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.linear.quantise_triton import clamped_swiglu, round_e4m3
from finwhale.ops.moe import ExpertWeight


@triton.constexpr_function
def decoder():
    """PTX: eight codes of a word ($4) times a factor ($5) as four pairs of bfloat16.

    Both halves of a word have the sign and the magnitude of their first three codes at the same
    distance as in bfloat16: at 15 and 8-6, 12 and 5-3, 9 and 2-0. The fourth code fills the gaps:
    its exponent is at 14-13, its mantissa at 11, its sign at 10. The magnitude's bits as those of a
    bfloat16 are the value times 2^-126.
    """
    return """{
.reg .b32 a, b, c, d, e;
and.b32 a, $4, 0x81c081c0;
shl.b32 b, $4, 3;
shl.b32 c, $4, 6;
shr.u32 d, $4, 6;
and.b32 b, b, 0x81c081c0;
and.b32 c, c, 0x81c081c0;
and.b32 d, d, 0x01800180;
shr.u32 e, $4, 5;
lop3.b32 d, e, 0x00400040, d, 0xea;
shl.b32 e, $4, 5;
lop3.b32 d, e, 0x80008000, d, 0xea;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}"""


@triton.jit
def _value(magnitude, sign, factor):
    bits = (magnitude & 7) << 22 | (sign & 1) << 31
    return (bits.to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)


@triton.jit
def _decoded(half, factor, ASM: tl.constexpr):
    """The four codes of half words, int16, times a factor's field."""
    if ASM:
        return tl.inline_asm_elementwise(
            decoder(),
            "=&r,=&r,=&r,=&r,r,r,r",
            [half, factor * 0x00800080],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        w, factor = half.to(tl.int32), (factor << 23).to(tl.float32, bitcast=True)
        a, b, c = _value(w >> 6, w >> 15, factor), _value(w >> 3, w >> 12, factor), w >> 9
        return a, b, _value(w, c, factor), _value(w >> 12 & 6 | w >> 11 & 1, w >> 10, factor)


@triton.jit
def _pointers(
    codes_ptr, factors_ptr, expert, M: tl.constexpr, K: tl.constexpr, SIZES: tl.constexpr
):
    """Of the warps' first blocks: to half words [rows * 4, ..], 4 threads a row, and to factors."""
    M8, WM, WK, BLOCKS, COLUMNS = SIZES
    i = tl.arange(0, M8 * WM * WK * 32)
    row = tl.program_id(0) * (WM * M8 * 8) + i // (WK * 32) % WM * (M8 * 8)
    row += i // (WM * WK * 32) * 8 + i // 4 % 8
    row = row // 64 * (K // COLUMNS * 64) + row % 64 + i // 32 % WK * (BLOCKS * 64)
    half = i % 4 * (COLUMNS // 16)
    codes = (row * (COLUMNS // 4) + half)[:, None] + tl.arange(0, COLUMNS // 16)[None, :]
    factors = row * (COLUMNS // 32) + half // 8
    return codes_ptr + expert * (M * K // 4) + codes, factors_ptr + expert * (M * K // 32) + factors


@triton.jit
def _load_blocks(w, first, COUNT: tl.constexpr, SIZES: tl.constexpr):
    blocks = ()
    for i in tl.static_range(COUNT):
        block = min(first + i, SIZES[3] - 1)
        codes = tl.load(w[0] + block * (SIZES[4] * 16), eviction_policy="evict_first")
        factors = tl.load(w[1] + block * (SIZES[4] * 2), eviction_policy="evict_first")
        blocks = blocks + ((codes, factors.to(tl.int32)),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def _load_token(x_ptr, SIZES: tl.constexpr):
    """Block j of all segments, rounded, for each j."""
    _, WM, WK, BLOCKS, COLUMNS = SIZES
    SIZE: tl.constexpr = (BLOCKS + 7) // 8
    G: tl.constexpr = COLUMNS // 32
    T: tl.constexpr = 128 // COLUMNS  # threads of a group
    i = tl.arange(0, WM * WK * 128)
    at = i // (WM * WK * 32) * 8 + i % 4 // T * 32 + i % T * (8 // T)
    blocks = ()
    for j in tl.static_range(SIZE):
        block = tl.minimum(i // 4 % 8 * SIZE + j, BLOCKS - 1) + i // 32 % WK * BLOCKS
        source = x_ptr + ((block * COLUMNS + at)[:, None] + tl.arange(0, 8 // T)[None, :])
        x = tl.reshape(tl.load(source).to(tl.float32), [4, WM * WK, 8, G, T, 8 // T])
        x = tl.reshape(tl.permute(x, (1, 2, 3, 0, 4, 5)), [WM * WK, 8, G, 32])
        values, scale = round_e4m3(x, 3)
        x = (values.to(tl.float32) * scale[:, :, :, None]).to(tl.bfloat16)
        blocks = blocks + (tl.reshape(x, [WM * WK, 8, G, 2, 2, T, 4 // T, 2]),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def _add_segment(result, s, held, x, COUNT: tl.constexpr, LOOP: tl.constexpr, ASM: tl.constexpr):
    """result [warps,rows,8] + COUNT blocks of segment s, in column s."""
    WARPS: tl.constexpr = result.shape[0]
    ROWS: tl.constexpr = result.shape[1]
    total = tl.zeros([WARPS, ROWS, 8], tl.float32)
    for i in tl.static_range(COUNT):
        codes, factors = held[i]
        a, b, c, d = _decoded(codes, tl.broadcast_to(factors[:, None], codes.shape), ASM)
        w = tl.join(tl.join(a, b), tl.join(c, d))
        # (eight rows, warp, row, thread, word, half, lower and upper bit of the eight columns)
        w = tl.reshape(w, [ROWS // 8, WARPS, 8, 4, codes.shape[1] // 2, 2, 2, 2])
        # Triton wants 4 or 8 adjacent columns in a thread: it takes half the bits of the narrowest
        # load that it finds, and finds none of a loop.
        if LOOP:
            w = tl.permute(w, (1, 0, 2, 4, 7, 3, 6, 5))
            column = tl.permute(x[i], (0, 6, 3, 2, 5, 4, 7, 1))
        else:
            w = tl.permute(w, (1, 0, 2, 4, 3, 7, 6, 5))
            column = tl.permute(x[i], (0, 6, 2, 5, 3, 4, 7, 1))
        w = tl.reshape(w, [WARPS, ROWS, codes.shape[1] * 16])
        total = tl.dot(w, tl.reshape(column, [WARPS, codes.shape[1] * 16, 8]), total)
    return result + tl.where((tl.arange(0, 8) == s)[None, None, :], total, 0.0)


@triton.jit
def _multiply(w, held, x_ptr, AHEAD: tl.constexpr, ASM: tl.constexpr, SIZES: tl.constexpr):
    """The rows times the rounded token: [WM * M8 * 8]."""
    M8, WM, WK, BLOCKS, _ = SIZES
    SIZE: tl.constexpr = (BLOCKS + 7) // 8
    SEGMENTS: tl.constexpr = (BLOCKS + SIZE - 1) // SIZE
    ROUNDS: tl.constexpr = SEGMENTS // AHEAD - 1
    FIRST: tl.constexpr = ROUNDS * AHEAD if ROUNDS > 1 else 0  # after the loop
    LOADED: tl.constexpr = FIRST + AHEAD if ROUNDS > 1 else 0  # in the loop, or before it
    x = _load_token(x_ptr, SIZES)
    result = tl.zeros([WM * WK, M8 * 8, 8], tl.float32)
    if ROUNDS > 1:
        for s in tl.range(FIRST, num_stages=1, loop_unroll_factor=AHEAD):
            result = _add_segment(result, s, held, x, SIZE, True, ASM)
            held = held[SIZE:] + _load_blocks(w, (s + AHEAD) * SIZE, SIZE, SIZES)
    for s in tl.static_range(FIRST, SEGMENTS - 1):
        result = _add_segment(result, s, held, x, SIZE, s < LOADED, ASM)
        held = held[SIZE:]
        if s + AHEAD < SEGMENTS:
            held = held + _load_blocks(w, (s + AHEAD) * SIZE, SIZE, SIZES)
    LAST: tl.constexpr = SEGMENTS - 1
    result = _add_segment(result, LAST, held, x, BLOCKS - LAST * SIZE, LAST < LOADED, ASM)
    result = tl.sum(tl.sum(tl.reshape(result, [WM, WK, M8 * 8, 8]), 3), 1)
    return tl.reshape(result, [WM * M8 * 8])


@triton.jit
def experts_row_kernel(
    x_ptr,
    ids_ptr,
    codes_ptr,
    factors_ptr,
    expert_scale_ptr,
    weights_ptr,
    out_ptr,
    limit,
    M: tl.constexpr,
    K: tl.constexpr,
    M8: tl.constexpr,
    WM: tl.constexpr,
    WK: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = w2 x[pair], or with GATED, the weight * the clamped SwiGLU of w1 x and w3 x."""
    if GATED:  # wait first: the next kernel reads `ids` before its own wait
        wait_for_last(PDL)
    start_next(PDL)
    SIZES: tl.constexpr = (M8, WM, WK, K // COLUMNS // WK, COLUMNS)
    ROWS: tl.constexpr = WM * M8 * 8
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair, cache_modifier=".cg").to(tl.int64)
    if expert >= 0:
        w = _pointers(codes_ptr, factors_ptr, expert, M, K, SIZES)
        held = _load_blocks(w, 0, AHEAD * ((SIZES[3] + 7) // 8), SIZES)
        if GATED:
            scale = tl.load(expert_scale_ptr + expert * 2)
            weight = tl.load(weights_ptr + pair)
            # Otherwise the assembler (ptxas) would load and round the token first.
            tl.debug_barrier()
            total = _multiply(w, held, x_ptr, AHEAD, ASM, SIZES) * scale
            total = tl.permute(tl.reshape(total, [ROWS // 16, 2, 8]), (0, 2, 1))
            gate, up = tl.split(total)
            value = tl.reshape(clamped_swiglu(gate, up, limit) * weight, [ROWS // 2])
            at = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            tl.store(out_ptr + pair * (M // 2) + at, value)
        else:
            scale = tl.load(expert_scale_ptr + expert * 2 + 1)
            wait_for_last(PDL)
            total = _multiply(w, held, x_ptr + pair * K, AHEAD, ASM, SIZES) * scale
            at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
            tl.store(out_ptr + pair * M + at, total.to(tl.bfloat16))
    elif not GATED:
        wait_for_last(PDL)


# M8, WM, the most parts WK, and the most blocks that a warp loads ahead.
GATE_UP = (2, 1, 4, 6)
DOWN = (2, 4, 1, 10)


def launch(
    x_ND: Tensor,
    weights_NK: Tensor,
    ids_NK: Tensor,
    w: ExpertWeight,
    expert_scale: Tensor,
    limit: float,
    each_NKD: Tensor,
    options: GemmOptions = DEFAULT,
    cuts: tuple[tuple[int, int, int, int], ...] = (GATE_UP, DOWN),
) -> None:
    """The outputs of one token's pairs; `cuts` is for gate and up, and for down."""
    num_pairs = ids_NK.numel()
    hidden = x_ND.new_empty((num_pairs, w.w2.shape[2] * 2), dtype=torch.float32)
    for weight, scale, x, out, (m8, wm, wk, most) in (
        (w.w13, w.scale13, x_ND, hidden, cuts[0]),
        (w.w2, w.scale2, hidden, each_NKD, cuts[1]),
    ):
        M, K = weight.shape[1], weight.shape[2] * 2
        columns = min(64, K & -K)
        wk = math.gcd(wk, K // columns)
        blocks = K // columns // wk
        size = triton.cdiv(blocks, 8)
        sizes = {"M": M, "K": K, "M8": m8, "WM": wm, "WK": wk, "COLUMNS": columns}
        experts_row_kernel[(M // (wm * m8 * 8), num_pairs)](
            *(x, ids_NK, weight.view(torch.int16), scale, expert_scale, weights_NK, out, limit),
            **sizes,
            AHEAD=max(1, min(most // size, triton.cdiv(blocks, size))),
            GATED=out is hidden,
            ASM=options.inline_asm,
            num_warps=wm * wk,
            **launch_options(options.early_launch),
        )
