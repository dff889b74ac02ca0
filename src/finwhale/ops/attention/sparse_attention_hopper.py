"""Sparse attention over packed rows for Hopper's warpgroup MMA, in Gluon: heads of 512, rope 64.

Read sparse_attention_triton.py first: this kernel has the same algorithm, numbering of keys and
plan, and uses the same kernel to combine parts. Here the warps of a program are specialised:

- Four warps (the producers) find the rows, convert their bytes to bfloat16 and write them to one of
  two buffers [BLOCK_K,512] in shared memory, where they serve as K and as V. Two warpgroups (the
  consumers) prepare the query, which stays in shared memory, compute both GEMMs of every tile, and
  each keep half of the output [64,512] in registers.
- mbarriers pass a buffer from producers to consumers (`ready`) and back (`free`).

With 32 heads or fewer, the keys are the rows of the MMA, and there are one group of consumers and
two groups of producers (sparse_attention_hopper_few_heads.py), except with one or two tokens: then
more programs, each with fewer keys, take less time.

With 128 tokens and 64 heads, a tile of 64 keys takes about 8000 cycles, of which both GEMMs need
2000. The rest is mostly waiting for global loads, so the producers probably limit the speed.

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

from finwhale.ops.attention import AllEntries, TopkEntries, Window, sparse_attention_triton
from finwhale.ops.attention.sparse_attention_hopper_few_heads import consume_few_heads
from finwhale.ops.attention.sparse_attention_hopper_parts import (
    LOG2_E,
    UP,
    prepare_query,
    produce,
    store_heads,
)
from finwhale.ops.attention.sparse_attention_triton import (
    AttendPlan,
    AttentionProblem,
    Tiles,
    check_problem,
    combine,
    launch_classes,
    plan_for,
)
from finwhale.ops.launch.gluon_functions import reinterpret, start_next, wait_for_last
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.paging import Tokens

HEAD_DIM, ROPE = 512, 64
MMA_ROWS, BLOCK_K = 64, 64
NUM_WARPS = 8
# Up to FEW_TOKENS tokens, a program has FEW_ROWS heads, the rows of the MMA, and FEW_KEYS keys at a
# time.
FEW_TOKENS, FEW_ROWS, FEW_KEYS = 2, 16, 32
STEP, PRODUCER_WARPS, PRODUCER_REGISTERS = 32, 4, 104
# Up to FEW_HEADS heads, keys are the rows of the MMA, with these warps and producers' registers.
FEW_HEADS, FEW_HEADS_WARPS, FEW_HEADS_REGISTERS = 32, 4, 136


@gluon.jit
def _consume(
    work,
    W: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROUND: gl.constexpr,
    WAIT: gl.constexpr,
):
    """The consumers' work: the query, both GEMMs of every tile, and the output.

    WAIT: wait for the previous kernel first.
    """
    wait_for_last(WAIT)
    shared, tokens, heads, query, out_at, parts = work
    q_shared, buffers, p_shared, ready, free = shared
    token, split, begin, end, position, num_entries, scale_log2 = tokens
    head0, num_heads, sink_ptr = heads
    H: gl.constexpr = 64
    C: gl.constexpr = 512
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK_K // 2, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]
    )
    prepare_query(q_shared, head0, num_heads, query)

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
        # Rescale the sums and the output to the new maximum (online softmax).
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
        store_heads(q_shared, head0, num_heads, out_at, ROUND)
    else:
        part_ptr, stats_ptr, A = parts
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
    ROWS: gl.constexpr,  # heads of the MMA: 64 as its rows, or fewer as its columns
    HEADS_EACH: gl.constexpr,
    FULL: gl.constexpr,  # whether every program has ROWS heads
    SHARE: gl.constexpr,
    STEP: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    H: gl.constexpr = ROWS
    PRODUCERS: gl.constexpr = 1 if ROWS == 64 else 2
    # Each group of warps waits for the previous kernel itself, unless all have waited here.
    WAIT: gl.constexpr = PDL and ENTRIES != 1
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
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [H, C], SHARED)
    if ENTRIES == 1:
        # An earlier kernel of this step wrote the slots.
        wait_for_last(PDL)
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
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [H, BLOCK_K], SHARED_P)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(ready.index(buffer), count=PRODUCERS)
        mbarrier.init(free.index(buffer), count=1)
    heads = (
        (q_shared, buffers, p_shared, ready, free),
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
    HALF: gl.constexpr = BLOCK_K // 2
    # fmt: off
    if ROWS == 64:
        gl.warp_specialize(
            [
                (_consume, (heads, W, SPLITS, BLOCK_K, ROUND, WAIT)),
                (produce, (
                    keys, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, BLOCK_K, 0, BLOCK_K, STEP, WAIT,
                )),
            ],
            [PRODUCER_WARPS],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume_few_heads, (heads, W, SPLITS, BLOCK_K, ROUND, WAIT)),
                (produce, (
                    keys, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, BLOCK_K, 0, HALF, HALF, WAIT,
                )),
                (produce, (
                    keys, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, BLOCK_K, HALF, HALF, HALF, WAIT,
                )),
            ],
            [PRODUCER_WARPS, PRODUCER_WARPS],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


# --- Launch ---------------------------------------------------------------------------------------


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
    return mma_heads(heads), BLOCK_K, FEW_HEADS_WARPS if heads <= FEW_HEADS else NUM_WARPS


def _tiles_of(model: ModelSizes) -> Tiles:
    """The tiles of the kernel that supports a model's sizes."""
    fits = _fits(model.num_heads, model.head_dim, model.window)
    return tiles if fits else sparse_attention_triton.tiles


LAUNCH_CLASSES = launch_classes(_tiles_of)


def attend(p: AttentionProblem, plan: AttendPlan) -> None:
    """Like sparse_attention_triton.attend, for heads of 512 with rope 64.

    block_k is BLOCK_K, or FEW_KEYS with FEW_ROWS heads a program.
    """
    num_tokens, heads, _ = p.q.shape
    rows = MMA_ROWS if plan.block_k == FEW_KEYS else mma_heads(heads)
    few = rows <= FEW_HEADS
    part, stats = p.workspace(plan.splits)
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
        PRODUCER_REGISTERS=FEW_HEADS_REGISTERS if few else PRODUCER_REGISTERS,
        num_warps=plan.num_warps,
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
