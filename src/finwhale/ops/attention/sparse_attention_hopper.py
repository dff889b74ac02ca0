"""Sparse attention over packed rows for Hopper's warpgroup MMA, in Gluon: heads of 512, rope 64.

Read sparse_attention_triton.py first: this kernel has the same algorithm, numbering of keys and
plan, and uses the same kernel to combine parts. Here the warps of a program are specialised:

- Four warps (the producers) find the rows, convert their bytes to bfloat16 and write them to one of
  two buffers [BLOCK_K,512] in shared memory, where they serve as K and as V. Two groups of four
  warps (the consumers) prepare the query, which stays in shared memory, compute both GEMMs of every
  tile, and each keep half of the output [64,512] in registers (sparse_attention_hopper_many_heads).
- mbarriers pass a buffer from producers to consumers (`ready`) and back (`free`).

With 32 heads or fewer, the keys are the rows of the MMA, and there are one group of consumers and
two groups of producers (sparse_attention_hopper_few_heads.py), except with one or two tokens: then
more programs, each with fewer keys, take less time.

Hundreds of a prompt's tokens read the same rows. With 64 heads, another kernel converts the rows of
prompts first (sparse_attention_hopper_unpack.py), and the producers copy them. Where the time goes
then, for 64 heads and tiles of 64 keys: docs/notes/2026-12-01-unpacked-rows.md.

A token's bits depend on BLOCK_K and the shares, as in sparse_attention_triton.py.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from finwhale.ops.attention import AllEntries, TopkEntries, Window, sparse_attention_triton
from finwhale.ops.attention.sparse_attention_hopper_few_heads import consume_few_heads
from finwhale.ops.attention.sparse_attention_hopper_many_heads import consume_many_heads
from finwhale.ops.attention.sparse_attention_hopper_parts import produce, produce_tiles
from finwhale.ops.attention.sparse_attention_hopper_unpack import (
    LEAST_TOKENS,
    has_prompts,
    unpack_rows,
)
from finwhale.ops.attention.sparse_attention_triton import (
    NO_ENTRIES,
    AttendPlan,
    AttentionProblem,
    Tiles,
    check_problem,
    combine,
    launch_classes,
    plan_for,
)
from finwhale.ops.indexer import RATIO
from finwhale.ops.launch.gluon_functions import reinterpret, start_next, wait_for_last
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.paging import Tokens

HEAD_DIM, ROPE = 512, 64
MMA_ROWS, BLOCK_K = 64, 64
NUM_WARPS = 4  # of the first partition, which are consumers
# Up to FEW_TOKENS tokens, a program has FEW_ROWS heads, the rows of the MMA, and FEW_KEYS keys at a
# time.
FEW_TOKENS, FEW_ROWS, FEW_KEYS = 2, 16, 32
# Rows that producers load at once, and their registers; CONSUMER_REGISTERS are those of the second
# group, and the first one gets the rest.
STEP, PRODUCER_WARPS, PRODUCER_REGISTERS, CONSUMER_REGISTERS = 32, 4, 104, 200
# Up to FEW_HEADS heads, keys are the rows of the MMA, with these producers' registers.
FEW_HEADS, FEW_HEADS_REGISTERS = 32, 136
# The kernel's arguments for unpacked rows (UnpackedRows), None without them.
UNPACKED = "window_rows_ptr", "window_page_ptr", "entries_ptr", "entry_page_ptr", "copies_ptr"


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
    window_rows_ptr,  # this and the next four: UNPACKED
    window_page_ptr,
    entries_ptr,
    entry_page_ptr,
    copies_ptr,
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
    ROWS: gl.constexpr,  # heads of the MMA: 64 as its rows, or fewer as its columns
    HEADS_EACH: gl.constexpr,
    FULL: gl.constexpr,  # whether every program has ROWS heads
    SHARE: gl.constexpr,
    STEP: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    H: gl.constexpr = ROWS
    PRODUCERS: gl.constexpr = 1 if ROWS == 64 else 2
    UNPACKED: gl.constexpr = window_rows_ptr is not None
    # Each group of warps waits for the previous kernel itself, unless all have waited here.
    WAIT: gl.constexpr = PDL and ENTRIES != 1 and not UNPACKED
    # If rows may be unpacked, each thread of the producers arrives when its copies are complete.
    ARRIVALS: gl.constexpr = 32 * PRODUCER_WARPS if UNPACKED else 1
    C: gl.constexpr = 512
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    SHARED_P: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_K, 16, rank=2)

    num_heads = 2**30 if FULL else gl.minimum(A, (gl.program_id(2) + 1) * HEADS_EACH)
    token = gl.program_id(0).to(gl.int64)
    split = gl.program_id(1)
    head0 = gl.program_id(2) * HEADS_EACH
    start_next(PDL)
    position = gl.load(positions_ptr + token).to(gl.int32)
    sequence = gl.load(sequence_ptr + token).to(gl.int64)
    window_pages_ptr += sequence * stride_window
    window_first = gl.load(window_first_ptr + sequence)
    entry_first = 0
    num_entries = 0
    rotary_ptr += gl.maximum(position, 0).to(gl.int64) * 64
    q_ptr += token * stride_qn
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [1, H, C], SHARED)
    q_words = reinterpret(q_shared, gl.int32, [1, H, C // 2], WORDS)
    if ENTRIES == 1 or UNPACKED:
        # Earlier kernels of this step wrote the slots, and unpacked rows.
        wait_for_last(PDL)
    if ENTRIES == 1:
        entry_rows_ptr += token * stride_entry
        slots_layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        slot_index = gl.arange(0, BLOCK_S, slots_layout)
        slots = gl.load(entry_rows_ptr + slot_index, mask=slot_index < NUM_SLOTS, other=-1)
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

    out_ptr += token * stride_on
    scales_ptr += token * stride_sn

    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_K, C], SHARED)
    words = reinterpret(buffers, gl.int32, [2, BLOCK_K, C // 2], WORDS)
    # Each group of consumers has weights and maxima; `met` is for both of them to meet, twice.
    GROUPS: gl.constexpr = 2 if ROWS == 64 else 1
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, H, BLOCK_K], SHARED_P)
    maxima = gl.allocate_shared_memory(
        gl.float32, [2 * GROUPS, H], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    passed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(ready.index(buffer), count=PRODUCERS * ARRIVALS)
        mbarrier.init(free.index(buffer), count=GROUPS)
        mbarrier.init(passed.index(buffer), count=1)
        mbarrier.init(met.index(buffer), count=GROUPS)
    heads = (
        (q_shared, q_words, buffers, p_shared, maxima, ready, free, passed, met),
        (token, split, begin, end, position, num_entries, scale_log2),
        (head0, num_heads, sink_ptr),
        (q_ptr, rotary_ptr, eps, stride_qa),
        (rotary_ptr, out_ptr, scales_ptr, stride_oa, stride_ss),
        (part_ptr, stats_ptr, A),
    )
    rows = (
        position, num_entries, window_ptr, window_pages_ptr, window_first, entry_ptr,
        entry_rows_ptr, entry_first, stride_window_page, stride_entry_page,
    )  # fmt: skip
    keys = words, ready, free, begin, end, rows
    window_page = 0
    if UNPACKED:
        window_page = gl.load(window_page_ptr + sequence)
    entry_page = window_page
    if UNPACKED and ENTRIES > 0:
        entry_page = gl.load(entry_page_ptr + sequence)
    copied = buffers, window_rows_ptr, window_page, entries_ptr, entry_page, copies_ptr
    HALF: gl.constexpr = BLOCK_K // 2
    # fmt: off
    if ROWS == 64:
        gl.warp_specialize(
            [
                (consume_many_heads, (heads, 0, W, SPLITS, BLOCK_K, ROUND, WAIT)),
                (consume_many_heads, (heads, 1, W, SPLITS, BLOCK_K, ROUND, WAIT)),
                (produce_tiles, (
                    keys, copied, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, BLOCK_K, STEP, ARRIVALS,
                    WAIT, UNPACKED,
                )),
            ],
            [PRODUCER_WARPS, PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume_few_heads, (heads, W, SPLITS, BLOCK_K, ROUND, WAIT)),
                (produce, (
                    keys, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, BLOCK_K, 0, HALF, HALF, 1, WAIT,
                )),
                (produce, (
                    keys, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, BLOCK_K, HALF, HALF, HALF, 1, WAIT,
                )),
            ],
            [PRODUCER_WARPS, PRODUCER_WARPS],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


def mma_heads(heads: int) -> int:
    """Number of heads of an MMA: its 64 rows, or up to FEW_HEADS heads its 8, 16 or 32 columns."""
    return MMA_ROWS if heads > FEW_HEADS else max(8, triton.next_power_of_2(heads))


def _fits(heads: int, head_dim: int, window: int) -> bool:
    whole = heads <= FEW_HEADS or heads % MMA_ROWS == 0
    return head_dim == HEAD_DIM and whole and window % BLOCK_K == 0


def takes(p: AttentionProblem) -> bool:
    """Whether the kernel supports the problem's sizes and dtype."""
    rows = [part.rows.table.rows_per_page for part in (p.window, p.entries) if part is not None]
    return (
        p.q.dtype == torch.bfloat16
        and p.rope == ROPE
        and _fits(p.q.shape[1], p.q.shape[2], p.window.size)
        and all(r & (r - 1) == 0 for r in rows)
    )


def tiles(num_tokens: int, heads: int, invariant: bool) -> tuple[int, int, int]:
    """See sparse_attention_triton.Tiles. With few tokens, a program has 16 heads and fewer keys."""
    if num_tokens <= FEW_TOKENS and not invariant:
        return FEW_ROWS, FEW_KEYS, NUM_WARPS
    return mma_heads(heads), BLOCK_K, NUM_WARPS


def _tiles_of(model: ModelSizes) -> Tiles:
    """The tiles of the kernel that supports a model's sizes."""
    fits = _fits(model.num_heads, model.head_dim, model.window)
    return tiles if fits else sparse_attention_triton.tiles


LAUNCH_CLASSES = launch_classes(_tiles_of, LEAST_TOKENS - 1)


def _unpacked(p: AttentionProblem) -> dict[str, Any]:
    """Unpack the rows of a step's prompts; returns arguments of the kernel."""
    entries = p.entries if p.kind != NO_ENTRIES else None
    if entries is not None and entries.rows.pool is p.window.rows.pool:
        return {}  # these are rows of the window, whose number is not known
    unpack = partial(
        unpack_rows, tokens=p.tokens, inline_asm=p.inline_asm, early_launch=p.early_launch
    )
    rows = unpack(p.window.rows, window=p.window.size, ratio=1, selected=False)
    found: dict[str, Any] = {"window_rows_ptr": rows.rows, "window_page_ptr": rows.page}
    if entries is not None:
        selected = isinstance(entries, TopkEntries)
        ratio = RATIO if isinstance(entries, TopkEntries) else entries.ratio
        rows = unpack(entries.rows, window=0, ratio=ratio, selected=selected)
        found |= {"entries_ptr": rows.rows, "entry_page_ptr": rows.page, "copies_ptr": rows.copies}
    return found


def attend(p: AttentionProblem, plan: AttendPlan) -> None:
    """Like sparse_attention_triton.attend, for heads of 512 with rope 64.

    block_k is BLOCK_K, or FEW_KEYS with FEW_ROWS heads a program.
    """
    num_tokens, heads, _ = p.q.shape
    rows = MMA_ROWS if plan.block_k == FEW_KEYS else mma_heads(heads)
    few = rows <= FEW_HEADS
    part, stats = p.workspace(plan.splits)
    unpacked = dict.fromkeys(UNPACKED)
    if not few and plan.splits == 1 and not p.invariant and has_prompts(p.tokens):
        unpacked |= _unpacked(p)
    _attend_kernel[(num_tokens, plan.splits, triton.cdiv(heads, plan.block_h))](
        **p.arguments(part, stats),
        SPLITS=plan.splits,
        BLOCK_K=plan.block_k,
        ROWS=rows,
        HEADS_EACH=plan.block_h,
        FULL=heads % rows == 0 and plan.block_h == rows,
        SHARE=plan.share,
        STEP=STEP,
        PRODUCER_WARPS=PRODUCER_WARPS,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=FEW_HEADS_REGISTERS if few else PRODUCER_REGISTERS,
        num_warps=plan.num_warps,
        **unpacked,
    )
    if plan.splits > 1:
        combine(p, plan.splits, part, stats)


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
) -> None:
    """Use sparse_attention_triton's kernels for sizes that this one does not support (`takes`)."""
    args = q_NAC, rotary_LR, eps, tokens, window, entries, sink_A, scale, out_NAC, scales_NS
    problem = AttentionProblem(*args, invariant=invariant, early_launch=True, inline_asm=True)
    check_problem(problem)
    for part in problem.launches():
        if takes(part):
            attend(part, plan_for(part, tiles))
        else:
            sparse_attention_triton.attend(part, plan_for(part))
