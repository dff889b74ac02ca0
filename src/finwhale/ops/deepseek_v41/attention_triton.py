"""Sparse attention over DeepSeek-V4.1's records as a Triton kernel, in one pass over the keys.

Read attention/sparse_attention_triton.py first: the algorithm, the numbering of keys, the plan and
the kernel that combines parts are the same. What differs are the rows (layout.py), and the halves:

- The kernel works on the even and the odd columns of heads and rows as two tiles. These are the low
  and the high halves of a row's words (two E4M3 values, or two e2m1 codes), and the two values of
  the rope's pairs, so that nothing is shuffled but the query and the output.
- Entries may also be window rows (DSpark's block). A tile of keys has only window rows or only
  entries, and the kernel branches on that. A loop for each would spill: the compiler would keep the
  descriptors of the second loop's products in registers.
- Rows are expanded to bfloat16 times 2^-64, exactly: the bits of E4M3 or e2m1, shifted into a
  bfloat16, are their value times 2^-120 or 2^-126, and the factor of a group makes that the row's
  value times 2^-64. The query and the output are multiplied by 2^64.

Bytes per token: 528 for each window row, 288 for each entry, and 4 A C for query and output.
Operations: 4 A C per key. The floors for 640 keys of 64 heads of 512 at 4.39 TB/s and 0.79 PFLOP/s
are 0.1 us for 1 token, where the launch and three dependent loads take longer, 3.4 us for 32 and
870 us for 8192. A program of many tokens expands 640 keys in 2.3 to 2.5 instructions a value, about
6,000 cycles of a multiprocessor. Its products should take 19,600, but with 64 heads, Triton lets
both groups of warps compute all scores: 29,400. (Calculated, not measured.)
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention import AllEntries, TopkEntries, Window
from finwhale.ops.attention.rotary_triton import rotation
from finwhale.ops.attention.sparse_attention_triton import (
    AttendPlan,
    AttentionProblem,
    combine,
    launch_classes,
    plan_for,
)
from finwhale.ops.deepseek_v41.layout import check_pool, check_widths, entry, window_row
from finwhale.ops.launch.early_launch import start_next, wait_for_last
from finwhale.ops.paging import Tokens

FEW_TOKENS = 8  # up to this number of tokens, a program has 16 heads
LEAST_WIDTH = 64


# PTX that expands the low or the high halves of two words of E4M3 values or four bytes of codes.
E4M3_LOW = tl.constexpr("""
{ .reg .b32 a, b;
shl.b32 a, $1, 4;  and.b32 a, a, 0x07f007f0;
shl.b32 b, $1, 8;  lop3.b32 a, b, 0x80008000, a, 0xea;  mul.rn.bf16x2 $0, a, $2; }
""")
E4M3_HIGH = tl.constexpr("""
{ .reg .b32 a;
shr.u32 a, $1, 4;  and.b32 a, a, 0x07f007f0;
lop3.b32 a, $1, 0x80008000, a, 0xea;  mul.rn.bf16x2 $0, a, $2; }
""")
# `prmt` gives each 16 bits one byte twice.
E2M1_LOW = tl.constexpr("""
{ .reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1100;  shr.u32 c, a, 2;  and.b32 c, c, 0x01c001c0;
prmt.b32 b, $2, 0, 0x3322;  shr.u32 d, b, 2;  and.b32 d, d, 0x01c001c0;
shl.b32 a, a, 4;  lop3.b32 a, a, 0x80008000, c, 0xea;  mul.rn.bf16x2 $0, a, $3;
shl.b32 b, b, 4;  lop3.b32 b, b, 0x80008000, d, 0xea;  mul.rn.bf16x2 $1, b, $4; }
""")
E2M1_HIGH = tl.constexpr("""
{ .reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1100;  shl.b32 c, a, 2;  and.b32 c, c, 0x01c001c0;
prmt.b32 b, $2, 0, 0x3322;  shl.b32 d, b, 2;  and.b32 d, d, 0x01c001c0;
lop3.b32 a, a, 0x80008000, c, 0xea;  mul.rn.bf16x2 $0, a, $3;
lop3.b32 b, b, 0x80008000, d, 0xea;  mul.rn.bf16x2 $1, b, $4; }
""")


@triton.jit
def _expand_half(x, factor, HIGH: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """The low or the high halves of words x of 2 BITS bits: bfloat16, times the factor and 2^-120
    (E4M3) or 2^-126 (e2m1).
    """
    if ASM:
        LOW_PTX: tl.constexpr = E4M3_LOW if BITS == 8 else E2M1_LOW
        HIGH_PTX: tl.constexpr = E4M3_HIGH if BITS == 8 else E2M1_HIGH
        y = tl.inline_asm_elementwise(
            HIGH_PTX if HIGH else LOW_PTX,
            "=r,r,r" if BITS == 8 else "=&r,=r,r,r,r",
            [x, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=16 // BITS,
        )
    else:
        bits = x.to(tl.int32) >> (BITS if HIGH else 0)
        SIZE: tl.constexpr = 2 ** (BITS - 1)
        SHIFT: tl.constexpr = 20 if BITS == 8 else 22
        value = ((bits & SIZE) << (32 - BITS)) | ((bits & (SIZE - 1)) << SHIFT)
        y = (value.to(tl.float32, bitcast=True) * factor.to(tl.float32)).to(tl.bfloat16)
    return y


@triton.jit
def _load_rows(page_ptr, offset, valid, ROWS: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Rows `offset` [K] of their pages: words [K,G,C/2G] of two values, and factors [K,G,1].

    A factor is bfloat16: the scale of a group times 2^56 or, with 4 bits, 2^62. The scale of a
    window row is at most 2^71.
    """
    HALF: tl.constexpr = C // 2
    GROUPS: tl.constexpr = C // 32 if BITS == 8 else C // 16
    word, group = tl.arange(0, HALF), tl.arange(0, GROUPS)
    row_ptr = page_ptr + offset * (C * BITS // 8)
    if BITS == 8:
        row_ptr = row_ptr.to(tl.pointer_type(tl.uint16))
    words = tl.load(row_ptr[:, None] + word[None, :], mask=valid[:, None], other=0)
    scale_ptr = page_ptr + ROWS * (C * BITS // 8) + offset * GROUPS
    scale = tl.load(scale_ptr[:, None] + group[None, :], mask=valid[:, None], other=0)
    if BITS == 8:
        factor = ((scale.to(tl.int16) + 56) << 7).to(tl.bfloat16, bitcast=True)
    else:
        factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 4611686018427387904.0
        factor = factor.to(tl.bfloat16)
    return tl.reshape(words, [valid.shape[0], GROUPS, HALF // GROUPS]), factor[:, :, None]


@triton.jit
def _expand(rows, BITS: tl.constexpr, ASM: tl.constexpr):
    """The even and the odd columns of rows: bfloat16 [K,C/2], the values times 2^-64."""
    words, factor = rows
    words, factor = tl.broadcast(words, factor)
    SHAPE: tl.constexpr = [words.shape[0], words.shape[1] * words.shape[2]]
    even = tl.reshape(_expand_half(words, factor, False, BITS, ASM), SHAPE)
    return even, tl.reshape(_expand_half(words, factor, True, BITS, ASM), SHAPE)


@triton.jit
def _attend_kernel(
    q_ptr,
    rotary_ptr,
    positions_ptr,
    sequence_ptr,
    windows_begin_ptr,
    window_ptr,
    window_pages_ptr,
    window_first_ptr,
    entry_ptr,
    entry_rows_ptr,
    sink_ptr,
    out_ptr,
    part_ptr,
    stats_ptr,
    A,
    scale_log2,
    stride_qn,
    stride_qa,
    stride_on,
    stride_oa,
    stride_window,
    stride_entry,
    stride_window_page,
    stride_entry_page,
    NUM_SLOTS,
    W: tl.constexpr,
    WINDOW_ROWS: tl.constexpr,
    ENTRY_ROWS: tl.constexpr,
    ENTRY_BITS: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SHARE: tl.constexpr,
    REPLAY: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of a token's BLOCK_H heads over a share of its keys. ENTRY_BITS 0: no entries.

    REPLAY: the windows of a sequence begin at *windows_begin.
    """
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < A
    HALF: tl.constexpr = C // 2
    WINDOW_TILES: tl.constexpr = (W + BLOCK_K - 1) // BLOCK_K
    start_next(PDL)
    position = tl.load(positions_ptr + token).to(tl.int32)
    sequence = tl.load(sequence_ptr + token).to(tl.int64)
    window_pages_ptr += sequence * stride_window
    window_first = tl.load(window_first_ptr + sequence)
    first_key = W - 1 - position
    if REPLAY:
        first_key += tl.maximum(tl.load(windows_begin_ptr + sequence).to(tl.int32), 0)
    rotary_ptr += tl.maximum(position, 0).to(tl.int64) * R
    cos, sin = rotation(rotary_ptr, 0, C, R, C)
    cos, sin = cos[None, :], sin[None, :]
    sink = tl.load(sink_ptr + head, mask=is_head, other=0.0) * 1.4426950408889634
    wait_for_last(PDL)
    entry_rows_ptr += token * stride_entry
    num_entries = 0
    if ENTRY_BITS > 0:
        slot_index = tl.arange(0, BLOCK_S)
        slots = tl.load(entry_rows_ptr + slot_index, mask=slot_index < NUM_SLOTS, other=-1)
        num_entries = tl.where(position >= 0, tl.sum((slots >= 0).to(tl.int32)), 0)
    tiles = WINDOW_TILES + tl.cdiv(num_entries, BLOCK_K)
    begin = split * SHARE

    # A word has the two values of a pair of columns.
    word = tl.arange(0, HALF)[None, :]
    q_row = (q_ptr + token * stride_qn + head[:, None] * stride_qa).to(tl.pointer_type(tl.int32))
    pairs = tl.load(q_row + word, mask=is_head[:, None], other=0)
    q0 = (pairs << 16).to(tl.float32, bitcast=True)
    q1 = (pairs & -65536).to(tl.float32, bitcast=True)
    q_even = ((q0 * cos - q1 * sin) * 18446744073709551616.0).to(tl.bfloat16)
    q_odd = ((q1 * cos + q0 * sin) * 18446744073709551616.0).to(tl.bfloat16)

    # The sink counts as one more key of split 0, which adds nothing to the output.
    maximum = tl.where(split == 0, sink, -1e30)
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([BLOCK_H], tl.float32)
    out_even = tl.zeros([BLOCK_H, HALF], tl.float32)
    out_odd = tl.zeros([BLOCK_H, HALF], tl.float32)
    for tile in range(begin, tl.minimum(begin + SHARE, tiles)):
        in_window = tile < WINDOW_TILES
        key = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        number = position - (W - 1) + key
        valid = (key >= first_key) & (key < W)
        page_at = window_pages_ptr + number // WINDOW_ROWS - window_first
        page = tl.load(page_at, mask=valid, other=0).to(tl.int64)
        page_ptr = window_ptr + page * stride_window_page
        in_page = number % WINDOW_ROWS
        recent = _load_rows(page_ptr, in_page, valid, WINDOW_ROWS, 8, C)
        if ENTRY_BITS == 0:
            even, odd = _expand(recent, 8, ASM)
        else:
            key -= WINDOW_TILES * BLOCK_K
            is_entry = (key >= 0) & (key < num_entries)
            slot = tl.load(entry_rows_ptr + key, mask=is_entry, other=-1)
            is_entry = is_entry & (slot >= 0)
            valid = valid | is_entry
            page_ptr = entry_ptr + (slot // ENTRY_ROWS).to(tl.int64) * stride_entry_page
            in_page = slot % ENTRY_ROWS
            chosen = _load_rows(page_ptr, in_page, is_entry, ENTRY_ROWS, ENTRY_BITS, C)
            if in_window:
                even, odd = _expand(recent, 8, ASM)
            else:
                even, odd = _expand(chosen, ENTRY_BITS, ASM)
        scores = tl.dot(q_even, tl.trans(even))
        scores = tl.dot(q_odd, tl.trans(odd), scores)
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weight = tl.exp2(scores - higher[:, None])
        # Rescale the total and the output to the new maximum (online softmax).
        fade = tl.exp2(maximum - higher)
        maximum = higher
        total = total * fade + tl.sum(weight, axis=1)
        weight = weight.to(tl.bfloat16)
        out_even = tl.dot(weight, even, out_even * fade[:, None])
        out_odd = tl.dot(weight, odd, out_odd * fade[:, None])

    if SPLITS == 1:
        lift = (18446744073709551616.0 / total)[:, None]
        o0, o1 = out_even * lift, out_odd * lift
        cos, sin = rotation(rotary_ptr, 0, C, R, C)
        cos, sin = cos[None, :], sin[None, :]
        o0, o1 = (o0 * cos + o1 * sin).to(tl.bfloat16), (o1 * cos - o0 * sin).to(tl.bfloat16)
        pairs = o0.to(tl.uint16, bitcast=True).to(tl.int32)
        pairs |= o1.to(tl.uint16, bitcast=True).to(tl.int32) << 16
        out = out_ptr + token * stride_on + head[:, None] * stride_oa
        tl.store(out.to(tl.pointer_type(tl.int32)) + word, pairs, mask=is_head[:, None])
    else:
        # The kernel that combines parts multiplies the columns before the rope by 2^64.
        lift = tl.where(2 * word >= C - R, 18446744073709551616.0, 1.0)
        joined = tl.reshape(tl.join(out_even * lift, out_odd * lift), [BLOCK_H, C])
        part = part_ptr + ((token * SPLITS + split) * A + head[:, None]) * C
        tl.store(part + tl.arange(0, C)[None, :], joined, mask=is_head[:, None])
        stats = stats_ptr + (token * SPLITS + split) * 2 * A + head
        tl.store(stats, maximum, mask=is_head)
        tl.store(stats + A, total, mask=is_head)


# --- Plan and launch ------------------------------------------------------------------------------


def tiles(num_tokens: int, heads: int, invariant: bool) -> tuple[int, int, int]:
    """See sparse_attention_triton.Tiles. More keys of 16 heads would leave room for one program."""
    if num_tokens <= FEW_TOKENS or invariant or heads < 32:
        return 16, 32, 4
    return (64, 64, 8) if heads >= 64 else (32, 64, 8)


LAUNCH_CLASSES = launch_classes(lambda model: tiles)


def attend(p: AttentionProblem, plan: AttendPlan) -> None:
    """Launch the kernels of a problem by a given plan."""
    num_tokens, heads, width = p.q.shape
    entry_bits = 0
    check_pool(p.window.rows, window_row(width))
    if p.entries is not None:
        record = check_pool(p.entries.rows, entry(width), window_row(width))
        entry_bits = record.value_bits if p.kind else 0
    share = plan.share or triton.cdiv(num_tiles(p, plan.block_k), plan.splits)
    splits = triton.cdiv(num_tiles(p, plan.block_k), share)
    part, stats = p.workspace(splits)
    begin = p.tokens.windows_begin
    arguments, names = p.arguments(part, stats), (*_attend_kernel.arg_names, "launch_pdl")
    _attend_kernel[(num_tokens, splits, triton.cdiv(heads, plan.block_h))](
        **{name: arguments[name] for name in arguments if name in names},
        windows_begin_ptr=p.tokens.positions if begin is None else begin,
        REPLAY=begin is not None,
        ENTRY_BITS=entry_bits,
        C=width,
        R=p.rope,
        SPLITS=splits,
        BLOCK_H=plan.block_h,
        BLOCK_K=plan.block_k,
        SHARE=share,
        ASM=p.inline_asm,
        num_warps=plan.num_warps,
    )
    if splits > 1:
        combine(p, splits, part, stats)


def num_tiles(p: AttentionProblem, block_k: int) -> int:
    """Tiles of the keys that a token may have. Window and entries have tiles of their own."""
    slots = p.entries.slots.shape[1] if isinstance(p.entries, TopkEntries) else 0
    return triton.cdiv(p.window.size, block_k) + triton.cdiv(slots, block_k)


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
    early_launch: bool = False,
    inline_asm: bool = False,
) -> None:
    """Supports packed pools of window rows and selected entries, without norms of heads.

    invariant, early_launch, inline_asm: see AttentionProblem.
    """
    if eps is not None or scales_NS is not None or isinstance(entries, AllEntries):
        raise ValueError("these kernels neither normalise heads, round outputs nor see all entries")
    for heads in (q_NAC, out_NAC):
        check_widths(heads, rotary_LR, LEAST_WIDTH)
        if heads.dtype != torch.bfloat16 or heads.stride(0) % 2 or heads.stride(1) % 2:
            raise ValueError(f"heads must be bfloat16 at even offsets, got {heads.dtype}")
    problem = AttentionProblem(
        *(q_NAC, rotary_LR, eps, tokens, window, entries, sink_A, scale, out_NAC, scales_NS),
        invariant=invariant,
        early_launch=early_launch,
        inline_asm=inline_asm,
    )
    for part in problem.launches():
        attend(part, plan_for(part, tiles))
