"""Sparse attention over packed rows for Hopper's warpgroup MMA, in Gluon: heads of 512, rope 64.

The algorithm, the numbering of keys and the plan are those of triton_decode.py (read it first), and
so is the kernel that combines parts. What is explicit here is where things lie and when they run:

- q [64,512] bfloat16 lies in shared memory, rows of keys in two buffers [BLOCK_K,512] beside it,
  each read as K and as V; two warpgroups hold the output [64,512] in registers, half of it each.
- While the tensor cores do q K^T of one tile, all threads turn the next tile's bytes, which they
  asked for a tile earlier, into bfloat16 and write them to the other buffer.

A token's bits depend on BLOCK_K and the number of splits, as there.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from finwhale.ops.attention.triton_decode import AttendPlan, Problem, combine

HEAD_DIM, ROPE = 512, 64
BLOCK_H = 64
NUM_WARPS = 8
UP = gl.constexpr(18446744073709551616.0)  # 2^64
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _dequantise(x, word, layout: gl.constexpr, GROUP0: gl.constexpr):
    """Four E4M3 bytes a word, x [K,X] int32 of groups GROUP0 .., as 2^-64 of their values.

    Returns [K,2X] int32, two bfloat16 a word.
    """
    X: gl.constexpr = x.shape[1]
    word = gl.convert_layout(word, gl.SliceLayout(1, layout), assert_trivial=True)
    group = GROUP0 + gl.arange(0, X, gl.SliceLayout(0, layout)) // 16
    exponent = (gl.expand_dims(word, 1) >> gl.expand_dims(8 * group, 0)).to(gl.int32) & 255
    factor = (exponent + 56) << 7
    factor = (factor << 16) | factor
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        shr.u32 d, b, 4;
        and.b32 c, c, 0x07f007f0;
        and.b32 d, d, 0x07f007f0;
        lop3.b32 a, a, 0x80008000, c, 0xea;
        lop3.b32 b, b, 0x80008000, d, 0xea;
        mul.rn.bf16x2 $0, a, $3;
        mul.rn.bf16x2 $1, b, $3;
        }
        """,
        "=r,=r,r,r",
        [x, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(low, high), [x.shape[0], 2 * X])


@gluon.jit
def _piece(row_ptr, valid, FIRST: gl.constexpr, X: gl.constexpr, layout: gl.constexpr):
    """X words from FIRST on of each row."""
    column = FIRST + gl.arange(0, X, gl.SliceLayout(0, layout))
    row_ptr = gl.convert_layout(row_ptr, gl.SliceLayout(1, layout), assert_trivial=True)
    valid = gl.convert_layout(valid, gl.SliceLayout(1, layout), assert_trivial=True)
    pointer = gl.expand_dims(row_ptr, 1) + gl.expand_dims(column, 0)
    return gl.load(pointer, mask=gl.expand_dims(valid, 1), other=0)


@gluon.jit
def _load_tile(
    tile,
    position,
    num_entries,
    window_ptr,
    window_pages_ptr,
    window_first,
    entry_ptr,
    entry_rows_ptr,
    entry_first,
    W: gl.constexpr,
    WINDOW_PAGE: gl.constexpr,
    ENTRY_PAGE: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WIDE: gl.constexpr,
    HALF: gl.constexpr,
    NARROW: gl.constexpr,
):
    """The bytes of a tile's rows: 256, 128 and 64 nope bytes, rope and scales."""
    key = tile * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(1, WIDE))
    valid = (key >= W - 1 - position) & (key < W + num_entries)
    if ENTRIES == 0 or tile < W // BLOCK_K:
        row = position - (W - 1) + key
        page = gl.load(
            window_pages_ptr + row // WINDOW_ROWS - window_first, mask=valid, other=0
        ).to(gl.int64)
        page_ptr = window_ptr + page * WINDOW_PAGE
        row_ptr = page_ptr + row % WINDOW_ROWS * 576
        word_ptr = page_ptr + WINDOW_ROWS * 576 + row % WINDOW_ROWS * 8
    else:
        row = key - W
        if ENTRIES == 1:
            row = gl.load(entry_rows_ptr + row, mask=valid, other=0)
            page = (row // ENTRY_ROWS).to(gl.int64)
        else:
            page = gl.load(
                entry_rows_ptr + row // ENTRY_ROWS - entry_first, mask=valid, other=0
            ).to(gl.int64)
        page_ptr = entry_ptr + page * ENTRY_PAGE
        row_ptr = page_ptr + row % ENTRY_ROWS * 576
        word_ptr = page_ptr + ENTRY_ROWS * 576 + row % ENTRY_ROWS * 8
    row_ptr = row_ptr.to(gl.pointer_type(gl.int32))
    word = gl.load(word_ptr.to(gl.pointer_type(gl.int64)), mask=valid, other=0)
    wide = _piece(row_ptr, valid, 0, 64, WIDE)
    half = _piece(row_ptr, valid, 64, 32, HALF)
    narrow = _piece(row_ptr, valid, 96, 16, NARROW)
    rope = _piece(row_ptr, valid, 112, 32, HALF)
    return wide, half, narrow, rope, word


@gluon.jit
def _store_first(rows, wide, word, WIDE: gl.constexpr):
    """The first half of a tile as bfloat16 in shared memory: rows [BLOCK_K,256] words."""
    rows.slice(0, 128, dim=1).store(_dequantise(wide, word, WIDE, 0))


@gluon.jit
def _store_rest(rows, half, narrow, rope, word, HALF: gl.constexpr, NARROW: gl.constexpr):
    rows.slice(128, 64, dim=1).store(_dequantise(half, word, HALF, 4))
    rows.slice(192, 32, dim=1).store(_dequantise(narrow, word, NARROW, 6))
    rows.slice(224, 32, dim=1).store(rope)


@gluon.jit
def _rotate(x, rotary_ptr, SIGN: gl.constexpr):
    """Rotate the last 64 columns of x [H,512]; the result in a layout of its own."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], 256, 2]))
    pair = gl.arange(0, 256, gl.SliceLayout(0, even.type.layout)) - 224
    cos = gl.expand_dims(gl.load(rotary_ptr + 2 * pair, mask=pair >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(rotary_ptr + 2 * pair + 1, mask=pair >= 0, other=0.0), 0) * SIGN
    return gl.reshape(gl.join(even * cos - odd * sin, odd * cos + even * sin), x.shape)


@gluon.jit
def _attend_kernel(
    q_ptr,
    rotary_ptr,
    positions_ptr,
    sequence_ptr,
    window_ptr,
    window_pages_ptr,
    window_first_ptr,
    entry_ptr,
    entry_rows_ptr,
    entry_first_ptr,
    sink_ptr,
    out_ptr,
    part_ptr,
    stats_ptr,
    A,
    eps,
    scale_log2,
    stride_qn,
    stride_qa,
    stride_on,
    stride_oa,
    stride_window,
    stride_entry,
    NUM_SLOTS,
    WINDOW_PAGE: gl.constexpr,
    ENTRY_PAGE: gl.constexpr,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    RATIO: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_S: gl.constexpr,
    PDL: gl.constexpr,
):
    H: gl.constexpr = 64
    C: gl.constexpr = 512
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    HALF: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [8, 1], [1, 0])
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK_K // 2, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]
    )
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SHARED_P: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_K, 16, rank=2)

    token = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1)
    head0 = gl.program_id(2) * H
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    position = gl.load(positions_ptr + token).to(gl.int32)
    sequence = gl.load(sequence_ptr + token).to(gl.int64)
    window_pages_ptr += sequence * stride_window
    window_first = gl.load(window_first_ptr + sequence)
    entry_first = 0
    num_entries = 0
    if ENTRIES == 1:
        entry_rows_ptr += token * stride_entry
        slots_layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        place = gl.arange(0, BLOCK_S, slots_layout)
        slots = gl.load(entry_rows_ptr + place, mask=place < NUM_SLOTS, other=-1)
        num_entries = gl.sum((slots >= 0).to(gl.int32), 0)
    if ENTRIES == 2:
        entry_rows_ptr += sequence * stride_entry
        entry_first = gl.load(entry_first_ptr + sequence)
        num_entries = (position + 1) // RATIO
    tiles = gl.cdiv(W + num_entries, BLOCK_K)
    if position < 0:
        tiles = 0
    share = gl.cdiv(tiles, SPLITS)
    begin = split * share
    end = gl.minimum(begin + share, tiles)

    stat_head = head0 + gl.arange(0, H, gl.SliceLayout(1, SCORES))
    stats = stats_ptr + (token * SPLITS + split) * 2 * A + stat_head
    is_stat = stat_head < A
    if SPLITS > 1 and begin >= end and split > 0:
        gl.store(stats, gl.full([H], -1e30, gl.float32, stat_head.type.layout), mask=is_stat)
        gl.store(stats + A, gl.full([H], 0.0, gl.float32, stat_head.type.layout), mask=is_stat)
        return

    wide, half, narrow, rope, word = _load_tile(
        begin, position, num_entries, window_ptr, window_pages_ptr, window_first, entry_ptr,
        entry_rows_ptr, entry_first, W, WINDOW_PAGE, ENTRY_PAGE, WINDOW_ROWS, ENTRY_ROWS, ENTRIES,
        BLOCK_K, WIDE, HALF, NARROW,
    )  # fmt: skip

    rotary_ptr += gl.maximum(position, 0).to(gl.int64) * 64
    head = head0 + gl.arange(0, H, gl.SliceLayout(1, HEADS))
    column = gl.arange(0, C, gl.SliceLayout(0, HEADS))
    q_ptr += token * stride_qn
    q_at = q_ptr + gl.expand_dims(head, 1) * stride_qa + gl.expand_dims(column, 0)
    q = gl.load(q_at, mask=gl.expand_dims(head < A, 1), other=0.0).to(gl.float32)
    rstd = gl.rsqrt(gl.sum(q * q, 1) / C + eps)
    q = gl.convert_layout(_rotate(q * gl.expand_dims(rstd, 1), rotary_ptr, 1.0), HEADS)
    lift = gl.expand_dims(gl.where(column < 448, UP, 1.0), 0)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [H, C], SHARED)
    q_shared.store((q * lift).to(gl.bfloat16))
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_K, C], SHARED)
    words = buffers._reinterpret(
        gl.int32, [2, BLOCK_K, C // 2], gl.NVMMASharedLayout(128, 32, rank=2)
    )
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [H, BLOCK_K], SHARED_P)
    _store_first(words.index(0), wide, word, WIDE)
    _store_rest(words.index(0), half, narrow, rope, word, HALF, NARROW)
    wide, half, narrow, rope, word = _load_tile(
        begin + 1, position, num_entries, window_ptr, window_pages_ptr, window_first, entry_ptr,
        entry_rows_ptr, entry_first, W, WINDOW_PAGE, ENTRY_PAGE, WINDOW_ROWS, ENTRY_ROWS, ENTRIES,
        BLOCK_K, WIDE, HALF, NARROW,
    )  # fmt: skip
    fence_async_shared()

    sink = gl.load(sink_ptr + stat_head, mask=is_stat, other=0.0) * LOG2_E
    maximum = sink
    if split > 0:
        maximum = gl.full([H], -1e30, gl.float32, stat_head.type.layout)
    sums = gl.full([H, BLOCK_K], 0.0, gl.float32, SCORES)
    out = gl.full([H, C], 0.0, gl.float32, OUT)
    s_column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    for tile in range(begin, end):
        rows = buffers.index((tile - begin) & 1)
        other = words.index((tile - begin + 1) & 1)
        scores = warpgroup_mma(
            q_shared,
            rows.permute((1, 0)),
            gl.full([H, BLOCK_K], 0.0, gl.float32, SCORES),
            use_acc=False,
            is_async=True,
        )
        if tile + 1 < end:
            _store_first(other, wide, word, WIDE)
        scores = warpgroup_mma_wait(0, deps=[scores])
        key = tile * BLOCK_K + s_column
        valid = (key >= W - 1 - position) & (key < W + num_entries)
        scores = gl.where(gl.expand_dims(valid, 0), scores * scale_log2, float("-inf"))
        higher = gl.maximum(maximum, gl.max(scores, 1))
        weight = gl.exp2(scores - gl.expand_dims(higher, 1))
        fade = gl.exp2(maximum - higher)
        maximum = higher
        sums = sums * gl.expand_dims(fade, 1) + weight
        p_shared.store(weight.to(gl.bfloat16))
        fade = gl.convert_layout(fade, gl.SliceLayout(1, OUT))
        out = out * gl.expand_dims(fade, 1)
        fence_async_shared()
        pending = warpgroup_mma(p_shared, rows, out, is_async=True)
        if tile + 1 < end:
            _store_rest(other, half, narrow, rope, word, HALF, NARROW)
            wide, half, narrow, rope, word = _load_tile(
                tile + 2, position, num_entries, window_ptr, window_pages_ptr, window_first,
                entry_ptr, entry_rows_ptr, entry_first, W, WINDOW_PAGE, ENTRY_PAGE, WINDOW_ROWS,
                ENTRY_ROWS, ENTRIES, BLOCK_K, WIDE, HALF, NARROW,
            )  # fmt: skip
            fence_async_shared()
        out = warpgroup_mma_wait(0, deps=[pending])

    total = gl.sum(sums, 1)
    if split == 0:
        total += gl.exp2(sink - maximum)
    out_head = head0 + gl.arange(0, H, gl.SliceLayout(1, OUT))
    out_column = gl.arange(0, C, gl.SliceLayout(0, OUT))
    out = out * gl.expand_dims(gl.where(out_column < 448, UP, 1.0), 0)
    if SPLITS == 1:
        share_of = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))
        out = out * gl.expand_dims(share_of, 1)
        out = gl.convert_layout(_rotate(out, rotary_ptr, -1.0).to(gl.bfloat16), HEADS)
        out_at = out_ptr + token * stride_on + gl.expand_dims(head, 1) * stride_oa
        gl.store(out_at + gl.expand_dims(column, 0), out, mask=gl.expand_dims(head < A, 1))
    else:
        part_at = part_ptr + ((token * SPLITS + split) * A + gl.expand_dims(out_head, 1)) * C
        is_head = gl.expand_dims(out_head < A, 1)
        gl.store(part_at + gl.expand_dims(out_column, 0), out, mask=is_head)
        gl.store(stats, maximum, mask=is_stat)
        gl.store(stats + A, total, mask=is_stat)


# --- Launch ---------------------------------------------------------------------------------------


def attend(p: Problem, plan: AttendPlan) -> None:
    """As triton_decode.attend, for heads of 512 with a rope of 64; block_k 32 or 64."""
    num_tokens, heads, _ = p.q.shape
    part, stats = p.workspace(plan.splits)
    _attend_kernel[(num_tokens, plan.splits, triton.cdiv(heads, BLOCK_H))](
        **p.arguments(part, stats),
        SPLITS=plan.splits,
        BLOCK_K=plan.block_k,
        num_warps=NUM_WARPS,
    )
    if plan.splits > 1:
        combine(p, plan.splits, part, stats)
