"""Attention of 8, 16 or 32 heads on Hopper GPUs, in Gluon: keys are the rows of the MMA.

Read sparse_attention_hopper.py first. A warpgroup MMA has 64 rows, and with tensor parallelism a
GPU has fewer heads than that. So here the rows are keys and the columns are heads:

    scores^T [64 keys, H] = rows [64,512] times query^T [512,H]
    output^T [512,H] += rows^T [512,64 keys] times weights^T [64 keys, H]

An instruction reads its 64 rows from shared memory in 16 cycles and multiplies them in H / 2, so
the GEMMs of a tile of 64 keys take 1024 cycles for up to 32 heads, against 2048 with heads as rows.
The output takes 4 H registers of a thread, which leaves registers for a second group of producers.

Each group of producers loads half of every tile. While it stores the rows of one tile, the loads of
the next tile's rows and of the page numbers or slots of the tile after that are in flight.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from finwhale.ops.attention.sparse_attention_hopper_parts import (
    LOG2_E,
    UP,
    prepare_query,
    store_heads,
)
from finwhale.ops.launch.gluon_functions import wait_for_last


@gluon.jit
def consume_few_heads(
    work,
    W: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROUND: gl.constexpr,
    WAIT: gl.constexpr,
):
    """The work of one warpgroup: the query, both GEMMs of every tile, and the output.

    WAIT: wait for the previous kernel first.
    """
    wait_for_last(WAIT)
    shared, tokens, heads, query, out_at, parts = work
    q_shared, q_words, buffers, p_shared, _, ready, free, _, _ = shared
    q_shared, q_words, p_shared = q_shared.index(0), q_words.index(0), p_shared.index(0)
    token, split, begin, end, position, num_entries, scale_log2 = tokens
    head0, num_heads, sink_ptr = heads
    H: gl.constexpr = q_shared.shape[0]
    C: gl.constexpr = 512
    # Layout of the scores [BLOCK_K,H] and of the output [C,H].
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, H, 16]
    )
    prepare_query(q_shared, q_words, head0, num_heads, query)

    stat_head = head0 + gl.arange(0, H, gl.SliceLayout(0, MMA))
    is_stat = stat_head < num_heads
    sink = gl.load(sink_ptr + stat_head, mask=is_stat, other=0.0) * LOG2_E
    maximum = sink
    if split > 0:
        maximum = gl.full([H], -1e30, gl.float32, stat_head.type.layout)
    sums = gl.full([BLOCK_K, H], 0.0, gl.float32, MMA)
    out = gl.full([C, H], 0.0, gl.float32, MMA)
    s_row = gl.arange(0, BLOCK_K, gl.SliceLayout(1, MMA))
    for tile in range(begin, end):
        buffer = (tile - begin) & 1
        rows = buffers.index(buffer)
        mbarrier.wait(ready.index(buffer), (tile - begin) >> 1 & 1)
        scores = warpgroup_mma(
            rows,
            q_shared.permute((1, 0)),
            gl.full([BLOCK_K, H], 0.0, gl.float32, MMA),
            use_acc=False,
            is_async=True,
        )
        key = tile * BLOCK_K + s_row
        valid = (key >= W - 1 - position) & (key < W + num_entries)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = gl.where(gl.expand_dims(valid, 1), scores * scale_log2, float("-inf"))
        higher = gl.maximum(maximum, gl.max(scores, 0))
        weight = gl.exp2(scores - gl.expand_dims(higher, 0))
        # Rescale the sums and the output to the new maximum (online softmax).
        fade = gl.expand_dims(gl.exp2(maximum - higher), 0)
        maximum = higher
        p_shared.permute((1, 0)).store(weight.to(gl.bfloat16))
        sums = sums * fade + weight
        out = out * fade
        fence_async_shared()
        pending = warpgroup_mma(rows.permute((1, 0)), p_shared.permute((1, 0)), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(free.index(buffer), count=1)

    total = gl.sum(sums, 0)
    if split == 0:
        total += gl.exp2(sink - maximum)
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, MMA)), 1)
    if SPLITS == 1:
        lift = gl.where(column < 448, UP, 1.0)
        out = out * gl.expand_dims(1.0 / total, 0) * lift
        q_shared.permute((1, 0)).store(out.to(gl.bfloat16))
        store_heads(q_shared, q_words, head0, num_heads, out_at, 0, ROUND)
    else:
        part_ptr, stats_ptr, A = parts
        stats = stats_ptr + (token * SPLITS + split) * 2 * A + stat_head
        gl.store(stats, maximum, mask=is_stat)
        gl.store(stats + A, total, mask=is_stat)
        if begin < end or split == 0:
            part_at = part_ptr + ((token * SPLITS + split) * A + gl.expand_dims(stat_head, 0)) * C
            gl.store(part_at + column, out, mask=gl.expand_dims(is_stat, 0))
