"""Sparse attention over packed rows as Triton kernels, in one pass over the keys.

A program processes one token, BLOCK_H heads and a share of the token's keys, with online softmax.
It normalises and rotates the query. For every tile of BLOCK_K keys it finds the rows through the
page table, converts E4M3 to bfloat16 in registers, and uses the tile both as K and as V. With many
tokens, the share is all keys, and the program also rotates the output back. With few tokens, the
keys are split into several shares, and `_combine_kernel` adds the parts in order (no atomics).

The kernels number the keys: first the window (always W keys), then the entries. They read all
lengths on the device; the grid depends only on the number of tokens and on host bounds.

The kernels scale the nope part of a row by 2^-64. An E4M3 byte whose bits are shifted into a
bfloat16 is its value times 2^-120, so one multiplication by a bfloat16 power of two applies the
scale of any row. The nope parts of the query and of the output are multiplied by 2^64, exactly.

A token's bits depend on the plan (BLOCK_K and the shares), and therefore on the number of tokens in
its step, unless the problem is `invariant`. They do not depend on the values of other tokens.

With ROUND, the kernel that writes the output also rounds it for the grouped projection.

Bytes per token: 584 per key, and 4 A C for query and output (3 A C if the output is rounded).
Operations: 4 A C per key. The floors for 640 keys of Flash at 4.39 TB/s and 0.79 PFLOP/s are
0.1 us for 1 token, and 2.7 and 3.4 us for 32.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention import AllEntries, TopkEntries, Window
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.attention.rotary_triton import rotation
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import LaunchClasses, ModelSizes, last_of_classes, up_to
from finwhale.ops.linear import KERNEL_GROUP
from finwhale.ops.linear.quantise_triton import round_e4m3
from finwhale.ops.paging import CacheRows, StepCache, Tokens

MAX_PROGRAMS, MAX_SPLITS = 128, 20
MANY_KEYS = 2**31  # more keys than any step has
# Least number of keys of a share, if shares must not depend on the step.
FIXED_KEYS = 128
LOG2_E = 1.4426950408889634
NO_ENTRIES, SELECTED, COMPLETE = 0, 1, 2
# Columns of one program of the kernel that combines parts.
COMBINE_COLUMNS = 256
MAX_HEAD_DIM = 4096
# The most tokens of an invariant launch, because all their parts are in memory: 0.7 GB for Flash.
INVARIANT_TOKENS = 1024
# The fewest slots of selected entries that a kernel loads: with fewer than the 32 threads of a
# warp, the Hopper kernel spills registers.
FEWEST_SLOTS = 32
FEW_TOKENS = 8  # up to this number of tokens, a program processes 16 heads


@triton.jit
def _rotated(x, cos, sin, SIGN: tl.constexpr, H: tl.constexpr, X: tl.constexpr):
    """Rotate the interleaved pairs of x [H,X]."""
    even, odd = tl.split(tl.reshape(x, [H, X // 2, 2]))
    cos, sin = cos[None, :], SIGN * sin[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [H, X])


@triton.jit
def _rope_tail(x, rotary_ptr, FIRST, C, R, SIGN: tl.constexpr, H: tl.constexpr, X: tl.constexpr):
    """Rotate the columns from C - R on of x [H,X], which has columns FIRST .. of heads of C."""
    cos, sin = rotation(rotary_ptr, FIRST, C, R, X)
    return _rotated(x, cos, sin, SIGN, H, X)


@triton.jit
def round_heads(x, H: tl.constexpr, X: tl.constexpr):
    """x [H,X] in bfloat16 -> (E4M3 of x / scale [H,X], scales [H,X/128]); see quantise_triton."""
    grouped = tl.reshape(x.to(tl.bfloat16).to(tl.float32), [H, X // 128, 128])
    rounded, scale = round_e4m3(grouped, 2)
    return tl.reshape(rounded, [H, X]), scale


@triton.jit
def dequantise(x, word, GROUP0: tl.constexpr, K: tl.constexpr, X: tl.constexpr, ASM: tl.constexpr):
    """Convert E4M3 bytes x [K,X] to bfloat16: their values times 2^-64.

    word [K] int64: the exponent bytes of each row; x begins at group GROUP0.
    """
    G: tl.constexpr = (X + 63) // 64
    SIZE: tl.constexpr = X // G
    group = GROUP0 + tl.arange(0, G)
    # 2^(byte - 127) * 2^120 * 2^-64, as the bits of a bfloat16.
    exponent = (word[:, None] >> (8 * group)[None, :]).to(tl.int32) & 255
    factor = ((exponent + 56) << 7)[:, :, None]
    x = tl.reshape(x, [K, G, SIZE])
    if ASM:
        factor = (factor << 16) | factor
        x, factor = tl.broadcast(x, factor)
        y = tl.inline_asm_elementwise(
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
            "=r,=r,r,r,r,r,r",
            [x, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        bits = x.to(tl.int32)
        value = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True)
        y = (value * (factor << 16).to(tl.float32, bitcast=True)).to(tl.bfloat16)
    return tl.reshape(y, [K, X])


@triton.jit
def load_rows(
    row_ptr,
    word,
    valid,
    FIRST: tl.constexpr,
    NOPE: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    X: tl.constexpr,
    ASM: tl.constexpr,
):
    """Load columns FIRST .. FIRST + X - 1 of K packed rows at row_ptr [K]: bfloat16 [K,X]."""
    column = FIRST + tl.arange(0, X)
    if FIRST + X <= NOPE:
        x = tl.load(row_ptr[:, None] + column[None, :], mask=valid[:, None], other=0)
        return dequantise(x, word, FIRST // 64, K, X, ASM)
    if FIRST < NOPE:
        is_nope = valid[:, None] & (column < NOPE)[None, :]
        x = tl.load(row_ptr[:, None] + column[None, :], mask=is_nope, other=0)
        y = dequantise(x, word, FIRST // 64, K, X, ASM)
    else:
        y = tl.zeros([K, X], tl.bfloat16)
    rope_ptr = (row_ptr + NOPE).to(tl.pointer_type(tl.bfloat16))
    is_rope = valid[:, None] & ((column >= NOPE) & (column < C))[None, :]
    rope = tl.load(rope_ptr[:, None] + (column - NOPE)[None, :], mask=is_rope, other=0.0)
    return tl.where((column >= NOPE)[None, :], rope, y)


@triton.jit(do_not_specialize=["stride_ss"])
def _attend_kernel(
    q_ptr,
    rotary_ptr,
    positions_ptr,
    sequence_ptr,
    window_ptr,
    window_pages_ptr,
    window_first_ptr,
    entry_ptr,
    entry_rows_ptr,  # slots of the selected entries, or the pages of complete ones
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
    W: tl.constexpr,
    WINDOW_ROWS: tl.constexpr,
    ENTRY_ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    RATIO: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROUND: tl.constexpr,
    SHARE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention of a token's BLOCK_H heads over a share of its keys.

    Heads and rows are in two tiles of columns: FIRST nope columns (may be 0), and REST with rope.
    """
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    NOPE: tl.constexpr = C - R
    WINDOW_TILES: tl.constexpr = (W + BLOCK_K - 1) // BLOCK_K
    start_next(PDL)
    wait_for_last(PDL)
    position = tl.load(positions_ptr + token).to(tl.int32)
    sequence = tl.load(sequence_ptr + token).to(tl.int64)
    window_pages_ptr += sequence * stride_window
    window_first = tl.load(window_first_ptr + sequence)
    entry_first = 0
    if ENTRIES == 2:
        entry_rows_ptr += sequence * stride_entry
        entry_first = tl.load(entry_first_ptr + sequence)
    else:
        entry_rows_ptr += token * stride_entry

    num_entries = 0
    if ENTRIES == 1:
        slot_index = tl.arange(0, BLOCK_S)
        slots = tl.load(entry_rows_ptr + slot_index, mask=slot_index < NUM_SLOTS, other=-1)
        num_entries = tl.sum((slots >= 0).to(tl.int32))
    if ENTRIES == 2:
        num_entries = (position + 1) // RATIO
    tiles = WINDOW_TILES + tl.cdiv(num_entries, BLOCK_K)
    tiles = tl.where(position >= 0, tiles, 0)
    share = SHARE if SHARE > 0 else tl.cdiv(tiles, SPLITS)
    begin = split * share
    end = tl.minimum(begin + share, tiles)

    is_head = head < A
    stats = stats_ptr + (token * SPLITS + split) * 2 * A + head
    if SPLITS > 1 and begin >= end and split > 0:
        tl.store(stats, tl.full([BLOCK_H], -1e30, tl.float32), mask=is_head)
        tl.store(stats + A, tl.zeros([BLOCK_H], tl.float32), mask=is_head)
        return

    # Prepare the query: RMSNorm per head without weight, then rope; the nope part times 2^64.
    column = FIRST + tl.arange(0, REST)
    q_row = q_ptr + token * stride_qn + head[:, None] * stride_qa
    rest_mask = is_head[:, None] & (column < C)[None, :]
    q_rest = tl.load(q_row + column[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    squares = tl.sum(q_rest * q_rest, axis=1)
    if FIRST > 0:
        first_column = tl.arange(0, FIRST)
        q_first = tl.load(q_row + first_column[None, :], mask=is_head[:, None], other=0.0)
        q_first = q_first.to(tl.float32)
        squares += tl.sum(q_first * q_first, axis=1)
        rstd = tl.rsqrt(squares / C + eps)
        q_first = (q_first * (rstd * 18446744073709551616.0)[:, None]).to(tl.bfloat16)
    else:
        rstd = tl.rsqrt(squares / C + eps)
    lift = tl.where(column < NOPE, 18446744073709551616.0, 1.0)[None, :]
    rotary = rotary_ptr + tl.maximum(position, 0).to(tl.int64) * R
    q_rest = _rope_tail(q_rest * rstd[:, None], rotary, FIRST, C, R, 1.0, BLOCK_H, REST)
    q_rest = (q_rest * lift).to(tl.bfloat16)

    # The sink counts as one more key of split 0, which adds nothing to the output.
    sink = tl.load(sink_ptr + head, mask=is_head, other=0.0) * 1.4426950408889634
    maximum = tl.where(split == 0, sink, -1e30)
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([BLOCK_H], tl.float32)
    out_rest = tl.zeros([BLOCK_H, REST], tl.float32)
    if FIRST > 0:
        out_first = tl.zeros([BLOCK_H, FIRST], tl.float32)

    for tile in range(begin, end):
        in_window = tile < WINDOW_TILES
        key = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        row = position - (W - 1) + key
        valid = in_window & (row >= 0) & (key < W)
        page = tl.load(
            window_pages_ptr + row // WINDOW_ROWS - window_first, mask=valid, other=0
        ).to(tl.int64)
        offset = row % WINDOW_ROWS
        page_at = page * stride_window_page
        scale_at = WINDOW_ROWS * VALUE_BYTES
        if ENTRIES > 0:
            row = key - WINDOW_TILES * BLOCK_K
            visible = (row >= 0) & (row < num_entries)
            if ENTRIES == 1:
                slot = tl.load(entry_rows_ptr + row, mask=visible, other=0)
                visible = visible & (slot >= 0)
                page = (slot // ENTRY_ROWS).to(tl.int64)
                entry_offset = slot % ENTRY_ROWS
            else:
                entry_offset = row % ENTRY_ROWS
                page = tl.load(
                    entry_rows_ptr + row // ENTRY_ROWS - entry_first, mask=visible, other=0
                ).to(tl.int64)
            valid = valid | visible
            offset = tl.where(in_window, offset, entry_offset)
            page_at = tl.where(in_window, page_at, page * stride_entry_page)
            scale_at = tl.where(in_window, scale_at, ENTRY_ROWS * VALUE_BYTES)
            pool_ptr = tl.where(in_window, window_ptr, entry_ptr)
        else:
            pool_ptr = window_ptr
        page_ptr = pool_ptr + page_at
        row_ptr = page_ptr + offset * VALUE_BYTES
        word_ptr = (page_ptr + scale_at + offset * SCALE_BYTES).to(tl.pointer_type(tl.int64))
        word = tl.load(word_ptr, mask=valid, other=0)
        rest = load_rows(row_ptr, word, valid, FIRST, NOPE, C, BLOCK_K, REST, ASM)
        scores = tl.dot(q_rest, tl.trans(rest))
        if FIRST > 0:
            first = load_rows(row_ptr, word, valid, 0, NOPE, C, BLOCK_K, FIRST, ASM)
            scores = tl.dot(q_first, tl.trans(first), scores)
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weight = tl.exp2(scores - higher[:, None])
        # Rescale the total and the output to the new maximum (online softmax).
        fade = tl.exp2(maximum - higher)
        maximum = higher
        total = total * fade + tl.sum(weight, axis=1)
        weight = weight.to(tl.bfloat16)
        out_rest = tl.dot(weight, rest, out_rest * fade[:, None])
        if FIRST > 0:
            out_first = tl.dot(weight, first, out_first * fade[:, None])

    if SPLITS == 1:
        out_rest = out_rest * lift / total[:, None]
        out_rest = _rope_tail(out_rest, rotary, FIRST, C, R, -1.0, BLOCK_H, REST)
        out = out_ptr + token * stride_on + head[:, None] * stride_oa
        if ROUND:
            out_rest, scales = round_heads(out_rest, BLOCK_H, REST)
            group = FIRST // 128 + tl.arange(0, REST // 128)
            scales_ptr += token * stride_sn + head[:, None] * (C // 128) * stride_ss
            scales_mask = is_head[:, None] & (group < C // 128)[None, :]
            tl.store(scales_ptr + group[None, :] * stride_ss, scales, mask=scales_mask)
    else:
        out = part_ptr + ((token * SPLITS + split) * A + head[:, None]) * C
        tl.store(stats, maximum, mask=is_head)
        tl.store(stats + A, total, mask=is_head)
    tl.store(out + column[None, :], out_rest.to(out.dtype.element_ty), mask=rest_mask)
    if FIRST > 0:
        if SPLITS == 1:
            out_first = out_first * 18446744073709551616.0 / total[:, None]
            if ROUND:
                out_first, scales = round_heads(out_first, BLOCK_H, FIRST)
                group = tl.arange(0, FIRST // 128)[None, :]
                tl.store(scales_ptr + group * stride_ss, scales, mask=is_head[:, None])
        out_first = out_first.to(out.dtype.element_ty)
        tl.store(out + first_column[None, :], out_first, mask=is_head[:, None])


@triton.jit(do_not_specialize=["stride_ss"])
def _combine_kernel(
    part_ptr,
    stats_ptr,
    positions_ptr,
    rotary_ptr,
    out_ptr,
    scales_ptr,
    A,
    stride_on,
    stride_oa,
    stride_sn,
    stride_ss,
    C: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROUND: tl.constexpr,
    EVERY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the weighted parts of BLOCK_C columns of a token's head, and rotate the sum back.

    EVERY: most shares have keys.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = column < C
    start_next(PDL)
    position = tl.maximum(tl.load(positions_ptr + token), 0)
    first = tl.program_id(2) * BLOCK_C
    cos, sin = rotation(rotary_ptr + position * R, first, C, R, BLOCK_C)
    wait_for_last(PDL)
    split = tl.arange(0, ALL_SPLITS)
    stats_ptr += token * SPLITS * 2 * A + head
    maximum = tl.load(stats_ptr + split * 2 * A, mask=split < SPLITS, other=-1e30)
    total = tl.load(stats_ptr + split * 2 * A + A, mask=split < SPLITS, other=0.0)
    maxima = ()
    parts = ()
    part_ptr += (token * SPLITS * A + head) * C + column
    for s in tl.static_range(SPLITS):
        maxima += (tl.load(stats_ptr + s * 2 * A),)  # type: ignore[assignment]
        if EVERY:
            # Load parts without a mask from `maxima`, so that these loads do not wait for it.
            parts += (tl.load(part_ptr + s * A * C, mask=mask, other=0.0),)  # type: ignore[assignment]
    highest = tl.max(maximum)
    total = tl.sum(total * tl.exp2(maximum - highest))
    out = tl.zeros([BLOCK_C], tl.float32)
    for s in tl.static_range(SPLITS):
        # A share without keys has written no part.
        if EVERY:
            part = tl.where(maxima[s] > -1e29, parts[s], 0.0)
        else:
            width = tl.where(maxima[s] > -1e29, C, 0)
            part = tl.load(part_ptr + s * A * C, mask=column < width, other=0.0)
        out += part * tl.exp2(maxima[s] - highest)
    out = out / total
    out = tl.where(column < C - R, out * 18446744073709551616.0, out)
    out = tl.reshape(out, [1, BLOCK_C])
    out = _rotated(out, cos, sin, -1.0, 1, BLOCK_C)
    if ROUND:
        out, scales = round_heads(out, 1, BLOCK_C)
        group = (first // 128 + tl.arange(0, BLOCK_C // 128))[None, :]
        scales_ptr += token * stride_sn + (head * (C // 128) + group) * stride_ss
        tl.store(scales_ptr, scales, mask=group < C // 128)
    out = tl.reshape(out, [BLOCK_C])
    target_ptr = out_ptr + token * stride_on + head * stride_oa + column
    tl.store(target_ptr, out.to(out_ptr.dtype.element_ty), mask=mask)


# (tokens, heads, invariant) -> (heads and keys of a tile, warps).
Tiles = Callable[[int, int, bool], tuple[int, int, int]]


def tiles(num_tokens: int, heads: int, invariant: bool) -> tuple[int, int, int]:
    many = heads >= 64 and num_tokens > FEW_TOKENS and not invariant
    return (64, 64, 8) if many else (16, 32, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendPlan:
    """Tile sizes and shares for a problem.

    Attributes:
        block_h, block_k: heads and keys of a tile.
        splits: number of shares of a token's keys.
        share: tiles of a share; 0: all shares are equal.
    """

    block_h: int
    block_k: int
    splits: int
    num_warps: int
    share: int = 0

    @classmethod
    def of(cls, tiles: Tiles, num_tokens: int, heads: int, max_keys: int) -> "AttendPlan":
        """The plan for num_tokens with at most max_keys keys each (a host bound)."""
        block_h, block_k, num_warps = tiles(num_tokens, heads, False)
        programs = num_tokens * triton.cdiv(heads, block_h)
        splits = num_splits(programs, triton.cdiv(max_keys, block_k))
        return cls(block_h=block_h, block_k=block_k, splits=splits, num_warps=num_warps)


def num_splits(programs: int, tiles: int) -> int:
    """Number of programs that share the tiles of one token.

    `programs` is the size of the grid without a split. With a split, the grid has at most
    MAX_PROGRAMS programs, because a second wave would cost more than it gains. MAX_PROGRAMS is less
    than the number of multiprocessors, because some of them still run the previous kernel.
    """
    return max(1, min(tiles, MAX_PROGRAMS // programs, MAX_SPLITS))


def launch_classes(tiles_of: Callable[[ModelSizes], Tiles], *last: int) -> LaunchClasses:
    """The launch classes of kernels whose tiles depend on a model's sizes.

    last: numbers of tokens after which something else changes.
    """

    def plan(model: ModelSizes, num_tokens: int) -> AttendPlan:
        return AttendPlan.of(tiles_of(model), num_tokens, model.num_heads, MANY_KEYS)

    def tokens(model: ModelSizes, most: int) -> set[int]:
        return up_to(most, {*last_of_classes(lambda n: plan(model, n), MAX_PROGRAMS + 1), *last})

    def contexts(model: ModelSizes, num_tokens: int, longest: int) -> set[int]:
        most = plan(model, num_tokens)
        keys = [tile * most.block_k for tile in range(1, most.splits)]
        entries = (0, *(count - model.window for count in keys if count > model.window))
        ends = ((count + 1) * r - 1 for r in model.complete_ratios for count in entries)
        return up_to(longest, ends)

    return LaunchClasses(tokens=tokens, contexts=contexts)


LAUNCH_CLASSES = launch_classes(lambda model: tiles)


def fixed_shares(p: "AttentionProblem", block_k: int) -> tuple[int, int]:
    """(tiles of a share, number of shares) for the longest sequence of the model.

    Two compilations of a kernel may give different bits, so not even the number of shares may
    depend on the step.
    """
    if p.entries is None:
        return triton.cdiv(p.window.size, block_k), 1
    if isinstance(p.entries, TopkEntries):
        most = p.entries.slots.shape[1]
    else:
        most = p.rotary.shape[0] // p.entries.ratio
    tiles = triton.cdiv(p.window.size + most, block_k)
    share = max(FIXED_KEYS // block_k, triton.cdiv(tiles, MAX_SPLITS))
    return share, triton.cdiv(tiles, share)


def _columns(head_dim: int, rope: int) -> tuple[int, int]:
    """(FIRST, REST): half the columns each if the first half has no rope; otherwise (0, all)."""
    half = head_dim // 2
    if head_dim >= 256 and half & (half - 1) == 0 and rope <= half:
        return half, half
    return 0, triton.next_power_of_2(head_dim)


def max_keys(tokens: Tokens, window: Window, entries: TopkEntries | AllEntries | None) -> int:
    """An upper bound, known on the host, of the keys that a token of the step sees."""
    if entries is None:
        return window.size
    if isinstance(entries, TopkEntries):
        return window.size + entries.slots.shape[1]
    return window.size + tokens.max_len // entries.ratio


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The arguments of `sparse_attention`, with values that every kernel derives from them.

    Attributes:
        invariant: the bits of a token do not depend on the other tokens of the step.
        early_launch: launch kernels early (`launch_options`).
        inline_asm: dequantise rows with PTX instructions of sm90 and later.
    """

    q: Tensor
    rotary: Tensor
    eps: float | None
    tokens: Tokens
    window: Window
    entries: TopkEntries | AllEntries | None
    sink: Tensor
    scale: float
    out: Tensor
    scales: Tensor | None = None
    invariant: bool = False
    early_launch: bool = False
    inline_asm: bool = False

    @property
    def rope(self) -> int:
        return 2 * self.rotary.shape[1]

    @property
    def kind(self) -> int:
        if isinstance(self.entries, TopkEntries) and self.entries.slots.shape[1]:
            return SELECTED
        if isinstance(self.entries, AllEntries):
            seen = self.tokens.max_len >= self.entries.ratio
            return COMPLETE if seen or self.invariant else NO_ENTRIES
        return NO_ENTRIES

    def launches(self) -> Iterator["AttentionProblem"]:
        """Yield the problems to launch, one after the other; none if the step has no tokens.

        A batch-invariant problem is split into parts of INVARIANT_TOKENS tokens.
        """
        num_tokens = self.q.shape[0]
        if num_tokens and not self.invariant:
            yield self
            return
        for start in range(0, num_tokens, INVARIANT_TOKENS):
            part = slice(start, start + INVARIANT_TOKENS)
            tokens = replace(
                self.tokens,
                positions=self.tokens.positions[part],
                sequence=self.tokens.sequence[part],
                cache=StepCache(),
            )
            entries = self.entries
            if isinstance(entries, TopkEntries):
                entries = replace(entries, slots=entries.slots[part])
            yield replace(
                self,
                q=self.q[part],
                tokens=tokens,
                entries=entries,
                out=self.out[part],
                scales=None if self.scales is None else self.scales[part],
            )

    def workspace(self, splits: int) -> tuple[Tensor, Tensor]:
        """Allocate parts [N,S,A,C] and their (maximum, sum) [N,S,2,A], float32; S is `splits`."""
        if splits == 1:
            return self.sink, self.sink
        num_tokens, heads, width = self.q.shape
        shapes = (num_tokens, splits, heads, width), (num_tokens, splits, 2, heads)
        device = self.q.device
        part, stats = (torch.empty(s, dtype=torch.float32, device=device) for s in shapes)
        return part, stats

    def output(self) -> dict[str, Any]:
        """Kernel arguments describing the output tensor."""
        scales = self.sink[:, None] if self.scales is None else self.scales
        return {
            "out_ptr": self.out,
            "scales_ptr": scales,
            "stride_on": self.out.stride(0),
            "stride_oa": self.out.stride(1),
            "stride_sn": scales.stride(0),
            "stride_ss": scales.stride(1),
            "ROUND": self.scales is not None,
        }

    def arguments(self, part: Tensor, stats: Tensor) -> dict[str, Any]:
        """Arguments that the Triton and Hopper attention kernels have in common."""
        window, entries, q = self.window.rows, self.entries, self.q
        pool, rows, first, rows_per_page = window.pool, window.table.pages, window.table.first, 1
        num_slots, ratio = 0, 1
        if entries is not None and self.kind != NO_ENTRIES:
            pool, table = entries.rows.pool, entries.rows.table
            rows_per_page = table.rows_per_page
            if isinstance(entries, TopkEntries):
                rows, num_slots = entries.slots, entries.slots.shape[1]
            else:
                rows, first, ratio = table.pages, table.first, entries.ratio
        return {
            "q_ptr": q,
            "rotary_ptr": self.rotary,
            "positions_ptr": self.tokens.positions,
            "sequence_ptr": self.tokens.sequence,
            "window_ptr": window.pool,
            "window_pages_ptr": window.table.pages,
            "window_first_ptr": window.table.first,
            "entry_ptr": pool,
            "entry_rows_ptr": rows,
            "entry_first_ptr": first,
            "sink_ptr": self.sink,
            "part_ptr": part,
            "stats_ptr": stats,
            "A": q.shape[1],
            "eps": self.eps,
            "scale_log2": self.scale * LOG2_E,
            "stride_qn": q.stride(0),
            "stride_qa": q.stride(1),
            "stride_window": window.table.pages.stride(0),
            "stride_entry": rows.stride(0),
            "stride_window_page": window.pool.stride(0),
            "stride_entry_page": pool.stride(0),
            "NUM_SLOTS": num_slots,
            "W": self.window.size,
            "WINDOW_ROWS": window.table.rows_per_page,
            "ENTRY_ROWS": rows_per_page,
            "ENTRIES": self.kind,
            "RATIO": ratio,
            "BLOCK_S": triton.next_power_of_2(max(FEWEST_SLOTS, num_slots)) if num_slots else 1,
            **self.output(),
            **launch_options(self.early_launch),
        }


def plan_for(p: AttentionProblem, tiles: Tiles = tiles) -> AttendPlan:
    """The plan of a step, or if `p` is invariant, the same plan for every step of a model."""
    num_tokens, heads, _ = p.q.shape
    if not p.invariant:
        return AttendPlan.of(tiles, num_tokens, heads, max_keys(p.tokens, p.window, p.entries))
    block_h, block_k, num_warps = tiles(num_tokens, heads, True)
    share, splits = fixed_shares(p, block_k)
    return AttendPlan(
        block_h=block_h, block_k=block_k, splits=splits, num_warps=num_warps, share=share
    )


def attend(p: AttentionProblem, plan: AttendPlan) -> None:
    """Launch the kernels of a problem by a given plan."""
    num_tokens, heads, width = p.q.shape
    record = RopeRow(width, p.rope)
    first, rest = _columns(width, p.rope)
    part, stats = p.workspace(plan.splits)
    _attend_kernel[(num_tokens, plan.splits, triton.cdiv(heads, plan.block_h))](
        **p.arguments(part, stats),
        VALUE_BYTES=record.value_bytes,
        SCALE_BYTES=record.scale_bytes,
        C=width,
        R=p.rope,
        FIRST=first,
        REST=rest,
        SPLITS=plan.splits,
        BLOCK_H=plan.block_h,
        BLOCK_K=plan.block_k,
        SHARE=plan.share,
        ASM=p.inline_asm,
        num_warps=plan.num_warps,
    )
    if plan.splits > 1:
        combine(p, plan.splits, part, stats)


def combine(p: AttentionProblem, splits: int, part: Tensor, stats: Tensor) -> None:
    num_tokens, heads, width = p.q.shape
    block_c = min(COMBINE_COLUMNS, triton.next_power_of_2(width))
    _combine_kernel[(num_tokens, heads, triton.cdiv(width, block_c))](
        part_ptr=part,
        stats_ptr=stats,
        positions_ptr=p.tokens.positions,
        rotary_ptr=p.rotary,
        A=heads,
        C=width,
        R=p.rope,
        SPLITS=splits,
        ALL_SPLITS=triton.next_power_of_2(splits),
        BLOCK_C=block_c,
        EVERY=not p.invariant,  # otherwise a short sequence has keys in few of a fixed number
        num_warps=4,
        **p.output(),
        **launch_options(p.early_launch),
    )


def check_pool(rows: CacheRows, head_dim: int, rope: int) -> None:
    """Raise ValueError unless the pool is packed, with pages of the layout's size."""
    pool, rows_per_page = rows.pool, rows.table.rows_per_page
    wanted = RopeRow(head_dim, rope).page_bytes(rows_per_page)
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != wanted:
        raise ValueError(
            f"a packed pool must be uint8 [num_pages, {wanted}] for {rows_per_page} rows a page "
            f"of head_dim {head_dim} and rope {rope}, got {pool.dtype} {list(pool.shape)}"
        )
    if pool.stride(1) != 1 or pool.stride(0) % 16:
        raise ValueError(f"a pool's pages must begin at multiples of 16, got {pool.stride()}")


def check_problem(p: AttentionProblem) -> None:
    """Raise ValueError for a problem that no kernel supports."""
    if p.eps is None:
        raise ValueError("these kernels normalise every head, so they need eps")
    if p.tokens.windows_begin is not None:
        raise ValueError("the windows of these kernels begin at position 0")
    check_heads(p.q, p.rotary)
    check_heads(p.out, p.rotary)
    width = p.q.shape[2]
    check_pool(p.window.rows, width, p.rope)
    if p.entries is not None:
        check_pool(p.entries.rows, width, p.rope)
    if p.scales is not None and (p.q.dtype != torch.bfloat16 or width % KERNEL_GROUP):
        raise ValueError(
            f"rounding the output needs bfloat16 heads of a multiple of {KERNEL_GROUP} values, "
            f"got {p.q.dtype} and {width}"
        )
    if (p.out.dtype == torch.float8_e4m3fn) != (p.scales is not None):
        raise ValueError(f"an output must be E4M3 if and only if it has scales, got {p.out.dtype}")


def check_heads(heads_NAC: Tensor, rotation_NR: Tensor) -> None:
    width, rope = heads_NAC.shape[-1], 2 * rotation_NR.shape[1]
    if width % 2 or width > MAX_HEAD_DIM or rope > width:
        raise ValueError(
            f"a head must have an even number of values up to {MAX_HEAD_DIM}, and no more rope "
            f"values than that: got {width} and {rope}"
        )
    if heads_NAC.stride(-1) != 1:
        raise ValueError(f"a head's values must be contiguous, got strides {heads_NAC.stride()}")
    if not rotation_NR.is_contiguous():
        raise ValueError(f"rotation must be contiguous, got strides {rotation_NR.stride()}")


def sparse_attention(
    q_NAC: Tensor,
    rotary_LR: Tensor,
    eps: float | None,
    tokens: Tokens,
    window: Window,
    entries: TopkEntries | AllEntries | None,
    sink_A: Tensor,
    scale: float,
    out_NAC: Tensor,
    scales_NS: Tensor | None = None,
    *,
    invariant: bool = False,
    plan: Callable[[AttentionProblem], AttendPlan] = plan_for,
) -> None:
    """Supports only packed pools, and scales only with bfloat16 queries, on GPUs with E4M3.

    invariant: see AttentionProblem.
    plan: gives tile sizes, with the splits of `plan_for`.
    """
    args = q_NAC, rotary_LR, eps, tokens, window, entries, sink_A, scale, out_NAC, scales_NS
    problem = AttentionProblem(*args, invariant=invariant)
    check_problem(problem)
    for part in problem.launches():
        attend(part, plan(part))
