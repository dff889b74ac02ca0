"""Attention of 64 heads on Hopper GPUs, in Gluon: two groups of consumers take turns.

Read sparse_attention_hopper.py first. A program has two groups of four consumer warps, partitions
of their own. Group 0 computes the scores and the weights of a program's first, third, ... tile,
group 1 of the others, so that the softmax of one runs beside the GEMMs of the other. Each passes
its weights and the new maxima to the other through shared memory, and multiplies the weights of all
tiles with its own half of the 512 columns:

    group 0                                     group 1
    scores and weights of tile 0  -- passed -->
    output[:, :256] += weights * rows           output[:, 256:] += weights * rows
                                  <-- passed -- scores and weights of tile 1
    output[:, :256] += weights * rows           output[:, 256:] += weights * rows

A tile's buffer is free when both groups have multiplied with it. Its next rows are then written, so
whoever waits for them (`ready`) also knows that the other group has read the weights and maxima of
the tile before.
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
def _zero():
    """0, computed anew: what depends on it does not become an invariant of a loop."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _faded(x, fade):
    """The rows of x [H,X] times fade [H]."""
    return x * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, x.type.layout)), 1)


@gluon.jit
def _scores(q_shared, rows, tile, tokens, W: gl.constexpr):
    """Scaled scores [H,BLOCK_K] of a tile's keys; -inf where the token does not see the key."""
    _, _, _, _, position, num_entries, scale_log2 = tokens
    H: gl.constexpr = q_shared.shape[0]
    BLOCK_K: gl.constexpr = rows.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    zeros = gl.full([H, BLOCK_K], 0.0, gl.float32, SCORES)
    scores = warpgroup_mma(q_shared, rows.permute((1, 0)), zeros, use_acc=False, is_async=True)
    key = tile * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    valid = (key >= W - 1 - position) & (key < W + num_entries)
    scores = warpgroup_mma_wait(0, deps=[scores])
    return gl.where(gl.expand_dims(valid, 0), scores * scale_log2, float("-inf"))


@gluon.jit
def _own_tile(out, maximum, total, shared, tile, begin, tokens, W: gl.constexpr, G: gl.constexpr):
    """Compute the weights of a tile of this group, pass them on, and multiply them."""
    query_shared, _, buffers, p_shared, maxima, ready, free, passed, _ = shared
    X: gl.constexpr = out.shape[1]
    # Otherwise the MMAs' descriptors are invariants of the loop, and spill registers.
    zero = _zero()
    rows = buffers.index(zero + G)
    mbarrier.wait(ready.index(G), (tile - begin) >> 1 & 1)
    # Rows that producers copied are ordinary writes.
    fence_async_shared()
    scores = _scores(query_shared.index(zero), rows, tile, tokens, W)
    higher = gl.maximum(maximum, gl.max(scores, 1))
    weight = gl.exp2(scores - gl.expand_dims(higher, 1))
    p = weight.to(gl.bfloat16)
    p_shared.index(G).store(p)
    maxima.index(G).store(higher)
    fence_async_shared()
    mbarrier.arrive(passed.index(G), count=1)
    # Rescale the sum and the output to the new maximum (online softmax).
    fade = gl.exp2(maximum - higher)
    total = total * fade + gl.sum(weight, 1)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out.type.layout, k_width=2)
    pending = warpgroup_mma(
        gl.convert_layout(p, P), rows.slice(X * G, X, dim=1), _faded(out, fade), is_async=True
    )
    out = warpgroup_mma_wait(0, deps=[pending])
    mbarrier.arrive(free.index(G), count=1)
    return out, higher, total


@gluon.jit
def _other_tile(out, maximum, total, shared, tile, begin, G: gl.constexpr):
    """Multiply the weights of a tile of the other group."""
    _, _, buffers, p_shared, maxima, _, free, passed, _ = shared
    OTHER: gl.constexpr = 1 - G
    X: gl.constexpr = out.shape[1]
    zero = _zero()
    mbarrier.wait(passed.index(OTHER), (tile - begin) >> 1 & 1)
    fence_async_shared()
    higher = maxima.index(OTHER).load(maximum.type.layout)
    fade = gl.exp2(maximum - higher)
    rows = buffers.index(zero + OTHER).slice(X * G, X, dim=1)
    weights = p_shared.index(zero + OTHER)
    pending = warpgroup_mma(weights, rows, _faded(out, fade), is_async=True)
    out = warpgroup_mma_wait(0, deps=[pending])
    mbarrier.arrive(free.index(OTHER), count=1)
    return out, higher, total * fade


@gluon.jit
def consume_many_heads(
    work,
    G: gl.constexpr,
    W: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROUND: gl.constexpr,
    WAIT: gl.constexpr,
):
    """The work of group G: half of the query's heads, every other tile, half of the columns.

    WAIT: wait for the previous kernel first.
    """
    wait_for_last(WAIT)
    shared, tokens, heads, query, out_at, parts = work
    query_shared, q_words, _, _, maxima, _, _, _, met = shared
    token, split, begin, end, _, _, _ = tokens
    head0, num_heads, sink_ptr = heads
    H: gl.constexpr = query_shared.shape[1]
    C: gl.constexpr = query_shared.shape[2]
    X: gl.constexpr = C // 2
    HALF: gl.constexpr = H // 2
    # Rows of the scores, whose columns do not matter here, and of the output.
    ROW: gl.constexpr = gl.SliceLayout(
        1,
        gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
        ),
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, X, 16]
    )
    prepare_query(
        query_shared.index(0).slice(HALF * G, HALF, dim=0),
        q_words.index(0).slice(HALF * G, HALF, dim=0),
        head0 + HALF * G,
        num_heads,
        query,
    )
    # The whole query is written when both groups have arrived.
    mbarrier.arrive(met.index(0), count=1)
    stat_head = head0 + gl.arange(0, H, ROW)
    is_stat = stat_head < num_heads
    sink = gl.load(sink_ptr + stat_head, mask=is_stat, other=0.0) * LOG2_E
    maximum = sink
    if split > 0:
        maximum = gl.full([H], -1e30, gl.float32, ROW)
    total = gl.full([H], 0.0, gl.float32, ROW)
    out = gl.full([H, X], 0.0, gl.float32, OUT)
    mbarrier.wait(met.index(0), 0)
    for tile in range(begin, end, 2):
        if G == 0:
            out, maximum, total = _own_tile(out, maximum, total, shared, tile, begin, tokens, W, G)
            if tile + 1 < end:
                out, maximum, total = _other_tile(out, maximum, total, shared, tile + 1, begin, G)
        else:
            out, maximum, total = _other_tile(out, maximum, total, shared, tile, begin, G)
            if tile + 1 < end:
                out, maximum, total = _own_tile(
                    out, maximum, total, shared, tile + 1, begin, tokens, W, G
                )

    # Add both groups' sums. When both have arrived, none reads the query.
    maxima.index(2 + G).store(total)
    mbarrier.arrive(met.index(1), count=1)
    mbarrier.wait(met.index(1), 0)
    total += maxima.index(3 - G).load(ROW)
    if split == 0:
        total += gl.exp2(sink - maximum)
    column = X * G + gl.arange(0, X, gl.SliceLayout(0, OUT))
    if SPLITS == 1:
        lift = gl.where(column < 448, UP, 1.0)
        out = _faded(out, 1.0 / total) * gl.expand_dims(lift, 0)
        staged = query_shared.index(0).slice(X * G, X, dim=1)
        staged.store(out.to(gl.bfloat16))
        store_heads(staged, q_words.index(0), head0, num_heads, out_at, X * G, ROUND)
    else:
        part_ptr, stats_ptr, A = parts
        stats = stats_ptr + (token * SPLITS + split) * 2 * A + stat_head
        if G == 0:
            gl.store(stats, maximum, mask=is_stat)
            gl.store(stats + A, total, mask=is_stat)
        if begin < end or split == 0:
            out_head = gl.expand_dims(head0 + gl.arange(0, H, gl.SliceLayout(1, OUT)), 1)
            part_at = part_ptr + ((token * SPLITS + split) * A + out_head) * C
            gl.store(part_at + gl.expand_dims(column, 0), out, mask=out_head < num_heads)
