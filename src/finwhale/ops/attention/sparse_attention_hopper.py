"""Sparse attention over packed rows for Hopper's warpgroup MMA, in Gluon: heads of 512, rope 64.

Read sparse_attention_triton.py first: this kernel has the same algorithm, numbering of keys and
plan, and shares its kernel that combines parts. This kernel controls the location of data itself:

- Four warps (the producers) find the rows, convert their bytes to bfloat16 and write them to one of
  two buffers [BLOCK_K,512] in shared memory, where they serve as K and as V. Two warpgroups (the
  consumers) prepare the query, which stays in shared memory, compute both GEMMs of every tile, and
  each keep half of the output [64,512] in registers.
- mbarriers pass a buffer from producers to consumers and back.

With 128 tokens a tile of 64 keys takes some 8000 cycles, of which both GEMMs need 2000. The rest is
mostly waiting for global loads, so the producers appear to limit the speed.

A token's bits depend on BLOCK_K and the shares, as in sparse_attention_triton.py.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from finwhale.ops.attention import Complete, Selected, Window, sparse_attention_triton
from finwhale.ops.attention.sparse_attention_triton import (
    AttendPlan,
    Problem,
    check_problem,
    combine,
    fixed_shares,
    max_keys,
    num_splits,
    shared_contexts,
    shared_tokens,
)
from finwhale.ops.launch.early_launch_hopper import start_early
from finwhale.ops.launch.sizes import ModelSizes, up_to
from finwhale.ops.paging import Tokens

HEAD_DIM, ROPE = 512, 64
BLOCK_H, BLOCK_K = 64, 64
NUM_WARPS = 8
FEW_TOKENS = 2  # up to this number of tokens, a program processes 16 heads
STEP, PRODUCER_WARPS, PRODUCER_REGISTERS = 32, 4, 104
UP = gl.constexpr(18446744073709551616.0)  # 2^64
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _log2(x):
    return x.bit_length() - 1


@gluon.jit
def _dequantise(x, scales, layout: gl.constexpr, GROUP0: gl.constexpr):
    """Convert words of four E4M3 bytes, x [K,X] int32, to their values times 2^-64.

    scales [K] int32: four exponent bytes; x begins at group GROUP0 of them. Returns [K,2X] int32,
    two bfloat16 a word.
    """
    X: gl.constexpr = x.shape[1]
    scales = gl.convert_layout(scales, gl.SliceLayout(1, layout), assert_trivial=True)
    group = GROUP0 + gl.arange(0, X, gl.SliceLayout(0, layout)) // 16
    exponent = (gl.expand_dims(scales, 1) >> gl.expand_dims(8 * group, 0)) & 255
    # 2^(byte - 127) * 2^120 * 2^-64 as a bfloat16, twice.
    factor = exponent * 0x00800080 + 56 * 0x00800080
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
def _load_rows(
    key0,
    position,
    num_entries,
    window_ptr,
    window_pages_ptr,
    window_first,
    entry_ptr,
    entry_rows_ptr,
    entry_first,
    stride_window_page,
    stride_entry_page,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    K: gl.constexpr,
    WIDE: gl.constexpr,
    HALF: gl.constexpr,
    NARROW: gl.constexpr,
):
    """The words of the rows of keys key0 ..: 256, 128 and 64 nope bytes, rope, scales."""
    WINDOW_LOG: gl.constexpr = _log2(WINDOW_ROWS)
    ENTRY_LOG: gl.constexpr = _log2(ENTRY_ROWS)
    key = key0 + gl.arange(0, K, gl.SliceLayout(1, WIDE))
    valid = (key >= W - 1 - position) & (key < W + num_entries)
    if ENTRIES == 0 or key0 < W:
        row = position - (W - 1) + key
        page = gl.load(window_pages_ptr + ((row >> WINDOW_LOG) - window_first), mask=valid, other=0)
        offset = row & (WINDOW_ROWS - 1)
        page_ptr = window_ptr + page.to(gl.int64) * stride_window_page
        row_ptr = page_ptr + offset * 576
        word_ptr = page_ptr + WINDOW_ROWS * 576 + offset * 8
    else:
        row = key - W
        if ENTRIES == 1:
            row = gl.load(entry_rows_ptr + row, mask=valid, other=0)
            page = row >> ENTRY_LOG
        else:
            place = (row >> ENTRY_LOG) - entry_first
            page = gl.load(entry_rows_ptr + place, mask=valid, other=0)
        offset = row & (ENTRY_ROWS - 1)
        page_ptr = entry_ptr + page.to(gl.int64) * stride_entry_page
        row_ptr = page_ptr + offset * 576
        word_ptr = page_ptr + ENTRY_ROWS * 576 + offset * 8
    row_ptr = row_ptr.to(gl.pointer_type(gl.int32))
    word = gl.load(word_ptr.to(gl.pointer_type(gl.int64)), mask=valid, other=0)
    low, high = word.to(gl.int32), (word >> 32).to(gl.int32)
    wide = _piece(row_ptr, valid, 0, 64, WIDE)
    half = _piece(row_ptr, valid, 64, 32, HALF)
    narrow = _piece(row_ptr, valid, 96, 16, NARROW)
    rope = _piece(row_ptr, valid, 112, 32, HALF)
    return wide, half, narrow, rope, low, high


@gluon.jit
def _store_rows(words, wide, half, narrow, rope, low, high, WIDE, HALF, NARROW):
    """The rows as bfloat16 in shared memory: words [K,256] int32."""
    words.slice(0, 128, dim=1).store(_dequantise(wide, low, WIDE, 0))
    words.slice(128, 64, dim=1).store(_dequantise(half, high, HALF, 0))
    words.slice(192, 32, dim=1).store(_dequantise(narrow, high, NARROW, 2))
    words.slice(224, 32, dim=1).store(rope)


@gluon.jit
def _rotate(x, rotary_ptr, SIGN: gl.constexpr):
    """Rotate the last 64 columns of x [H,512]; the result has another layout."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], 256, 2]))
    pair = gl.arange(0, 256, gl.SliceLayout(0, even.type.layout)) - 224
    cos = gl.expand_dims(gl.load(rotary_ptr + 2 * pair, mask=pair >= 0, other=1.0), 0)
    sin = gl.expand_dims(gl.load(rotary_ptr + 2 * pair + 1, mask=pair >= 0, other=0.0), 0) * SIGN
    return gl.reshape(gl.join(even * cos - odd * sin, odd * cos + even * sin), x.shape)


@gluon.jit
def _rope_words(q_ptr, rstd, head0, num_heads, stride_qa, rotary_ptr, PAIRS: gl.constexpr):
    """The rope part of a token's heads, times rstd [H,1] and rotated: [H,32] words of a pair."""
    head = gl.expand_dims(head0 + gl.arange(0, rstd.shape[0], gl.SliceLayout(1, PAIRS)), 1)
    pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, PAIRS)), 0)
    words = (q_ptr + head * stride_qa + 448).to(gl.pointer_type(gl.int32))
    word = gl.load(words + pair, mask=head < num_heads, other=0)
    even = (word << 16).to(gl.float32, bitcast=True) * rstd
    odd = (word & -65536).to(gl.float32, bitcast=True) * rstd
    cos, sin = gl.load(rotary_ptr + 2 * pair), gl.load(rotary_ptr + 2 * pair + 1)
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;",
        "=r,f,f",
        [odd * cos + even * sin, even * cos - odd * sin],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _round_heads(x):
    """x [H,512] bfloat16 -> (E4M3 of x / scale [H,512], scales [H,4]); see quantise_triton."""
    grouped = gl.reshape(x.to(gl.float32), [x.shape[0], x.shape[1] // 128, 128])
    amax = gl.maximum(gl.max(gl.abs(grouped), axis=2), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(gl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = gl.expand_dims((0x7F000000 - bits).to(gl.float32, bitcast=True), 2)
    rounded = gl.reshape((grouped * inverse).to(gl.float8e4nv), x.shape)
    return rounded, bits.to(gl.float32, bitcast=True)


@gluon.jit
def _produce(
    words,
    ready,
    free,
    begin,
    end,
    position,
    num_entries,
    window_ptr,
    window_pages_ptr,
    window_first,
    entry_ptr,
    entry_rows_ptr,
    entry_first,
    stride_window_page,
    stride_entry_page,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STEP: gl.constexpr,
):
    """The producers' work: load tiles begin .. end - 1 of rows, STEP rows at a time."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    HALF: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    STEPS: gl.constexpr = BLOCK_K // STEP
    wide, half, narrow, rope, low, high = _load_rows(
        begin * BLOCK_K, position, num_entries, window_ptr, window_pages_ptr, window_first,
        entry_ptr, entry_rows_ptr, entry_first, stride_window_page, stride_entry_page, W,
        WINDOW_ROWS, ENTRY_ROWS, ENTRIES, STEP, WIDE, HALF, NARROW,
    )  # fmt: skip
    for tile in range(begin, end):
        buffer = (tile - begin) & 1
        mbarrier.wait(free.index(buffer), ((tile - begin) >> 1 & 1) ^ 1)
        for step in gl.static_range(STEPS):
            rows = words.index(buffer).slice(step * STEP, STEP, dim=0)
            _store_rows(rows, wide, half, narrow, rope, low, high, WIDE, HALF, NARROW)
            wide, half, narrow, rope, low, high = _load_rows(
                tile * BLOCK_K + (step + 1) * STEP, position, num_entries, window_ptr,
                window_pages_ptr, window_first, entry_ptr, entry_rows_ptr, entry_first,
                stride_window_page, stride_entry_page, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, STEP,
                WIDE, HALF, NARROW,
            )  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(ready.index(buffer), count=1)


@gluon.jit
def _consume(
    q_shared,
    buffers,
    p_shared,
    ready,
    free,
    token,
    split,
    begin,
    end,
    head0,
    num_heads,
    position,
    num_entries,
    q_ptr,
    rotary_ptr,
    sink_ptr,
    out_ptr,
    scales_ptr,
    part_ptr,
    stats_ptr,
    A,
    eps,
    scale_log2,
    stride_qa,
    stride_oa,
    stride_ss,
    W: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROUND: gl.constexpr,
):
    """The consumers' work: the query, both GEMMs of every tile, and the output."""
    H: gl.constexpr = 64
    C: gl.constexpr = 512
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK_K // 2, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]
    )
    head = head0 + gl.arange(0, H, gl.SliceLayout(1, HEADS))
    column = gl.arange(0, C, gl.SliceLayout(0, HEADS))
    # The query: RMSNorm per head without weight, its nope part times 2^64, then rope.
    q_at = q_ptr + gl.expand_dims(head, 1) * stride_qa + gl.expand_dims(column, 0)
    q = gl.load(q_at, mask=gl.expand_dims(head < num_heads, 1), other=0.0).to(gl.float32)
    rstd = gl.rsqrt(gl.sum(q * q, 1) / C + eps)
    q_shared.store((q * gl.expand_dims(rstd * UP, 1)).to(gl.bfloat16))
    rstd = gl.expand_dims(gl.convert_layout(rstd, gl.SliceLayout(1, PAIRS)), 1)
    q_words = q_shared._reinterpret(gl.int32, [H, C // 2], gl.NVMMASharedLayout(128, 32, rank=2))
    q_words.slice(224, 32, dim=1).store(
        _rope_words(q_ptr, rstd, head0, num_heads, stride_qa, rotary_ptr, PAIRS)
    )
    fence_async_shared()

    stat_head = head0 + gl.arange(0, H, gl.SliceLayout(1, SCORES))
    is_stat = stat_head < num_heads
    sink = gl.load(sink_ptr + stat_head, mask=is_stat, other=0.0) * LOG2_E
    maximum = sink
    if split > 0:
        maximum = gl.full([H], -1e30, gl.float32, stat_head.type.layout)
    sums = gl.full([H, BLOCK_K], 0.0, gl.float32, SCORES)
    out = gl.full([H, C], 0.0, gl.float32, OUT)
    s_column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    for tile in range(begin, end):
        buffer = (tile - begin) & 1
        rows = buffers.index(buffer)
        mbarrier.wait(ready.index(buffer), (tile - begin) >> 1 & 1)
        scores = warpgroup_mma(
            q_shared,
            rows.permute((1, 0)),
            gl.full([H, BLOCK_K], 0.0, gl.float32, SCORES),
            use_acc=False,
            is_async=True,
        )
        key = tile * BLOCK_K + s_column
        valid = (key >= W - 1 - position) & (key < W + num_entries)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where(gl.expand_dims(valid, 0), scores * scale_log2, float("-inf"))
        higher = gl.maximum(maximum, gl.max(scores, 1))
        weight = gl.exp2(scores - gl.expand_dims(higher, 1))
        fade = gl.exp2(maximum - higher)
        maximum = higher
        p_shared.store(weight.to(gl.bfloat16))
        sums = sums * gl.expand_dims(fade, 1) + weight
        fade = gl.convert_layout(fade, gl.SliceLayout(1, OUT))
        out = out * gl.expand_dims(fade, 1)
        fence_async_shared()
        pending = warpgroup_mma(p_shared, rows, out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(free.index(buffer), count=1)

    total = gl.sum(sums, 1)
    if split == 0:
        total += gl.exp2(sink - maximum)
    if SPLITS == 1:
        lift = gl.where(gl.arange(0, C, gl.SliceLayout(0, OUT)) < 448, UP, 1.0)
        share_of = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT))
        out = out * gl.expand_dims(share_of, 1) * gl.expand_dims(lift, 0)
        q_shared.store(out.to(gl.bfloat16))
        out = q_shared.load(HEADS).to(gl.float32)
        out = gl.convert_layout(_rotate(out, rotary_ptr, -1.0).to(gl.bfloat16), HEADS)
        if ROUND:
            out, scales = _round_heads(out)
            group_layout: gl.constexpr = scales.type.layout
            scale_head = head0 + gl.arange(0, H, gl.SliceLayout(1, group_layout))
            group = gl.arange(0, C // 128, gl.SliceLayout(0, group_layout))
            scale = gl.expand_dims(scale_head, 1) * (C // 128) + gl.expand_dims(group, 0)
            is_scale = gl.expand_dims(scale_head < num_heads, 1)
            gl.store(scales_ptr + scale * stride_ss, scales, mask=is_scale)
            out = gl.convert_layout(out, HEADS)
        out_at = out_ptr + gl.expand_dims(head, 1) * stride_oa + gl.expand_dims(column, 0)
        gl.store(out_at, out, mask=gl.expand_dims(head < num_heads, 1))
    else:
        stats = stats_ptr + (token * SPLITS + split) * 2 * A + stat_head
        gl.store(stats, maximum, mask=is_stat)
        gl.store(stats + A, total, mask=is_stat)
        if begin < end or split == 0:
            out_head = gl.expand_dims(head0 + gl.arange(0, H, gl.SliceLayout(1, OUT)), 1)
            out_column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, OUT)), 0)
            part_at = part_ptr + ((token * SPLITS + split) * A + out_head) * C + out_column
            gl.store(part_at, out, mask=out_head < num_heads)


@gluon.jit(do_not_specialize=["stride_ss"])
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
    scales_ptr,
    part_ptr,
    stats_ptr,
    A,
    eps,
    scale_log2,
    stride_qn,
    stride_qa,
    stride_on,
    stride_oa,
    stride_sn,
    stride_ss,
    stride_window,
    stride_entry,
    stride_window_page,
    stride_entry_page,
    NUM_SLOTS,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    RATIO: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_S: gl.constexpr,
    ROUND: gl.constexpr,
    PDL: gl.constexpr,
    HEADS_EACH: gl.constexpr,
    FULL: gl.constexpr,  # whether every program has 64 heads
    SHARE: gl.constexpr,
    STEP: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    H: gl.constexpr = 64
    C: gl.constexpr = 512
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    SHARED_P: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_K, 16, rank=2)

    num_heads = 2**30 if FULL else gl.minimum(A, (gl.program_id(2) + 1) * HEADS_EACH)
    token = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1)
    head0 = gl.program_id(2) * HEADS_EACH
    start_early(PDL)
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
    share = SHARE if SHARE > 0 else gl.cdiv(tiles, SPLITS)
    begin = split * share
    end = gl.minimum(begin + share, tiles)

    rotary_ptr += gl.maximum(position, 0).to(gl.int64) * 64
    q_ptr += token * stride_qn
    out_ptr += token * stride_on
    scales_ptr += token * stride_sn

    q_shared = gl.allocate_shared_memory(gl.bfloat16, [H, C], SHARED)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_K, C], SHARED)
    words = buffers._reinterpret(gl.int32, [2, BLOCK_K, C // 2], WORDS)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [H, BLOCK_K], SHARED_P)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_shared, buffers, p_shared, ready, free, token, split, begin, end, head0,
                    num_heads, position, num_entries, q_ptr, rotary_ptr, sink_ptr, out_ptr,
                    scales_ptr, part_ptr, stats_ptr, A, eps, scale_log2, stride_qa, stride_oa,
                    stride_ss, W, SPLITS, BLOCK_K, ROUND,
                ),
            ),
            (
                _produce,
                (
                    words, ready, free, begin, end, position, num_entries, window_ptr,
                    window_pages_ptr, window_first, entry_ptr, entry_rows_ptr, entry_first,
                    stride_window_page, stride_entry_page, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES,
                    BLOCK_K, STEP,
                ),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


# --- Launch ---------------------------------------------------------------------------------------


def takes(p: Problem) -> bool:
    """Whether the kernel supports the sizes."""
    rows = [p.window.table.rows_per_page]
    if isinstance(p.entries, Selected):
        rows.append(p.entries.rows_per_page)
    elif p.entries is not None:
        rows.append(p.entries.table.rows_per_page)
    return (
        p.q.dtype == torch.bfloat16
        and (p.q.shape[2], p.rope) == (HEAD_DIM, ROPE)
        and p.q.shape[1] % BLOCK_H == 0
        and p.window.size % BLOCK_K == 0
        and all(r & (r - 1) == 0 for r in rows)
    )


def plan(num_tokens: int, heads: int, max_keys: int) -> AttendPlan:
    """For one or two tokens: a program has 16 heads and writes a quarter of a 64-head output."""
    block_h, block_k = (16, 32) if num_tokens <= FEW_TOKENS else (BLOCK_H, BLOCK_K)
    programs = num_tokens * triton.cdiv(heads, block_h)
    splits = num_splits(programs, triton.cdiv(max_keys, block_k))
    return AttendPlan(block_h=block_h, block_k=block_k, splits=splits, num_warps=NUM_WARPS)


def launch_tokens(model: ModelSizes, most: int) -> set[int]:
    """See ops/launch/sizes.py."""
    return up_to(most, shared_tokens(model, plan))


def launch_contexts(model: ModelSizes, num_tokens: int, longest: int) -> set[int]:
    """See ops/launch/sizes.py."""
    return shared_contexts(model, num_tokens, longest, plan)


def invariant_plan(p: Problem) -> AttendPlan:
    """Like AttendPlan.invariant."""
    share, splits = fixed_shares(p, BLOCK_K)
    return AttendPlan(
        block_h=BLOCK_H, block_k=BLOCK_K, splits=splits, num_warps=NUM_WARPS, share=share
    )


def attend(p: Problem, plan: AttendPlan) -> None:
    """Like sparse_attention_triton.attend, for heads of 512 with rope 64; block_k is 32 or 64."""
    num_tokens, heads, _ = p.q.shape
    part, stats = p.workspace(plan.splits)
    _attend_kernel[(num_tokens, plan.splits, triton.cdiv(heads, plan.block_h))](
        **p.arguments(part, stats),
        SPLITS=plan.splits,
        BLOCK_K=plan.block_k,
        HEADS_EACH=plan.block_h,
        FULL=heads % BLOCK_H == 0 and plan.block_h == BLOCK_H,
        SHARE=plan.share,
        STEP=STEP,
        PRODUCER_WARPS=PRODUCER_WARPS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=NUM_WARPS,
    )
    if plan.splits > 1:
        combine(p, plan.splits, part, stats)


def plan_for(p: Problem) -> AttendPlan:
    if p.invariant:
        return invariant_plan(p)
    num_tokens, heads, _ = p.q.shape
    return plan(num_tokens, heads, max_keys(p.tokens, p.window, p.entries))


def sparse_attention(
    q_NAC: Tensor,
    rotary_LR: Tensor,
    eps: float,
    tokens: Tokens,
    window: Window,
    entries: Selected | Complete | None,
    sink_A: Tensor,
    scale: float,
    out_NAC: Tensor,
    scales_NS: Tensor | None = None,
    *,
    invariant: bool = False,
) -> None:
    """Like sparse_attention_triton, whose kernels run for sizes that `takes` does not support."""
    problem = Problem(
        q=q_NAC,
        rotary=rotary_LR,
        eps=eps,
        tokens=tokens,
        window=window,
        entries=entries,
        sink=sink_A,
        scale=scale,
        out=out_NAC,
        scales=scales_NS,
        invariant=invariant,
        early_launch=True,
        inline_asm=True,
    )
    check_problem(problem)
    for part in problem.launches():
        if takes(part):
            attend(part, plan_for(part))
        else:
            sparse_attention_triton.attend(part, sparse_attention_triton.plan_for(part))
