"""Selection of entries and blocks as Triton kernels (`SelectShared`).

`_prepare_kernel` rotates and rounds the queries. `_scores_kernel` scores tiles of keys (layout.py):
a tile is a part of a page, or consists of blocks that an earlier layer kept. The kernel also stores
the largest key of every block. The kernels of `indexer` select from the scores: entries from a row
of scores; blocks from a row of the blocks' scores; and entries within blocks from a row of these
entries alone, as if a block were a page.

A rounded query is exact in bfloat16, and so is a key (`_keys`). Sums are in float32, in an order
that does not depend on the batch, the chunk or the split. Tokens that verify drafts, and those of a
prefill, share tiles of keys.

Work for a token that sees E entries: 2 I C E operations at 0.79 PFLOP/s in bfloat16, and E (C/2 +
C/32) bytes of keys per sequence at 4.0 TB/s. A score adds 4 bytes, and a block 4 to 9. For I = 32
and C = 128, a decode of one token takes at least 17 us for 2^20 entries (22 us by the instructions
of its loop: some 310 for 128 threads and 64 keys), and 0.3 us within 2,048 blocks. A prefill takes
at least 10 ps for each pair of a token and an entry.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.deepseek_v41 import IndexRule, Selection
from finwhale.ops.deepseek_v41.layout import check_pool, index_key
from finwhale.ops.indexer import topk_long_triton as long_rows
from finwhale.ops.indexer import topk_triton
from finwhale.ops.indexer.fp4_triton import round_to_scale, scale_exponent
from finwhale.ops.indexer.prepare_queries_triton import check_heads, load_angles, rotate_heads
from finwhale.ops.indexer.topk_triton import from_keys, to_keys
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import NUM_MULTIPROCESSORS, LaunchClasses, ModelSizes, up_to
from finwhale.ops.paging import MAX_DECODE_QUERY, CacheRows, PageTable, StepCache, Tokens
from finwhale.ops.rounding import FP4_GROUP

RATIOS = (1, 2)
PAGE_ROWS = (64, 128, 256)
TILE = 64  # keys of a tile
STAGES = 4
COLUMNS = 128  # of the GEMM if sequences have several tokens: queries times heads
# The most bytes at a time for scores and their selection, in a decode and in a prefill.
MAX_DECODE_BYTES, MAX_PREFILL_BYTES = 2**30, 2**28
# Programs per multiprocessor that fill the GPU; the tiles of a row are split over all of them. A
# program of one query has at most 128 registers a thread, so that four run at a time.
ONE_PROGRAMS, MANY_PROGRAMS = 4, 8
OUT_PAD = 128
BLOCK = long_rows.GROUP  # entries of a block
MOST_BLOCKS = 2048  # that a layer keeps
GROUP, UNIT = tl.constexpr(FP4_GROUP), tl.constexpr(BLOCK)
HIGHEST, LOWEST = tl.constexpr(0x7F7FFFFF), tl.constexpr(-0x7FFFFFFF - 1)  # keys
# Eight codes, the first one in the lowest bits, as bfloat16: codes 0 and 4 in $0, 1 and 5 in $1, 2
# and 6 in $2, 3 and 7 in $3. A code's magnitude is exponent and mantissa of a value times 2^-126.
UNPACK = tl.constexpr("""{
.reg .b32 size, sign;
shl.b32 size, $4, 6;
and.b32 size, size, 0x01C001C0;
shl.b32 sign, $4, 12;
lop3.b32 size, sign, 0x80008000, size, 0xEA;
mul.rn.bf16x2 $0, size, $5;
shl.b32 size, $4, 2;
and.b32 size, size, 0x01C001C0;
shl.b32 sign, $4, 8;
lop3.b32 size, sign, 0x80008000, size, 0xEA;
mul.rn.bf16x2 $1, size, $5;
shr.u32 size, $4, 2;
and.b32 size, size, 0x01C001C0;
shl.b32 sign, $4, 4;
lop3.b32 size, sign, 0x80008000, size, 0xEA;
mul.rn.bf16x2 $2, size, $5;
shr.u32 size, $4, 6;
and.b32 size, size, 0x01C001C0;
lop3.b32 size, $4, 0x80008000, size, 0xEA;
mul.rn.bf16x2 $3, size, $5;
}""")
OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


@triton.jit
def _keys(codes, word, C: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Keys times 2^-64 in bfloat16 [TILE, C], exactly for values from 2^-62 to 2^66.

    The keys are normalised, so larger values do not occur, and smaller ones do not matter.

    codes: uint8 [TILE, C/2]. word: [TILE], with an exponent in each byte. On SM90, a thread loads
    16 bytes of codes: a group. The keys come in the order of `_in_turns`, and with inline assembly
    the value 8w + 4l + 2a + h of group g is in column G (8w + 4a + 2h) + 2g + l, so that the thread
    has its values where the GEMM needs them. Otherwise the columns are in order.
    """
    G: tl.constexpr = C // GROUP
    exponent = (word[:, None] >> (8 * tl.arange(0, G))[None, :]) & 255
    # 2^62 times the group's scale; with the 2^-126 of the codes, 2^-64 times.
    scale = ((tl.minimum(exponent, 192) + 62) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    codes = tl.reshape(codes, [TILE, G, GROUP // 2])
    if ASM:
        wide, _ = tl.broadcast(scale[:, :, None], codes)
        first, second = tl.inline_asm_elementwise(
            UNPACK, OPERANDS, [codes, wide], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        values = tl.reshape(tl.join(first, second), [TILE, G, 4, 2, 2, 2])
        values = tl.permute(values, [0, 2, 5, 3, 1, 4])
    else:
        nibble = tl.join(codes & 15, codes >> 4).to(tl.int32)
        size = ((nibble & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
        value = tl.where(nibble > 7, -size, size)
        values = (value * (scale.to(tl.float32) * 2.0**-126)[:, :, None, None]).to(tl.bfloat16)
    return _in_turns(tl.reshape(values, [TILE, C]), 2, 4)


@triton.jit
def _in_turns(x, A: tl.constexpr, B: tl.constexpr):
    """Rows a, b of 8 each in the order b, a, in every 64 rows."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, [ROWS // 64, A, B, 8, COLUMNS]), [0, 2, 1, 3, 4])
    return tl.reshape(x, [ROWS, COLUMNS])


@triton.jit
def _place(table_row_ptr, tile, num_tiles, ROWS: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr):
    """The page of a tile, or with B > 0 the unit of each of its keys: a block's place in a pool."""
    if B > 0:
        unit = tl.arange(0, TILE) // UNIT + tile * (TILE // UNIT)
        return tl.load(table_row_ptr + unit, mask=(unit < B) & (tile < num_tiles), other=0)
    else:
        return tl.load(table_row_ptr + tile // (ROWS // TILE), mask=tile < num_tiles, other=0)


@triton.jit
def _load_keys(
    pool, place, tile, C: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr
):
    """The codes [TILE, C/2] of a tile's keys, and a word with each key's exponents [TILE].

    pool: its pointer and the stride of its pages.
    """
    WORD: tl.constexpr = tl.int32 if C // GROUP == 4 else tl.int16 if C // GROUP == 2 else tl.uint8
    keys_ptr, stride_page = pool
    row = tl.arange(0, TILE)
    column = tl.arange(0, C // 2)
    if B > 0:
        page_ptr = keys_ptr + (place // (ROWS // UNIT)).to(tl.int64) * stride_page
        row = row % UNIT + place % (ROWS // UNIT) * UNIT
        codes = tl.load(page_ptr[:, None] + row[:, None] * (C // 2) + column[None, :])
    else:
        page_ptr = keys_ptr + place.to(tl.int64) * stride_page
        row += tile % (ROWS // TILE) * TILE
        codes = tl.load(page_ptr + row[:, None] * (C // 2) + column[None, :])
    # Load one word per key, because Triton does not prefetch single bytes.
    word_ptr = (page_ptr + ROWS * (C // 2)).to(tl.pointer_type(WORD))
    return codes, tl.load(word_ptr + row).to(tl.int32)


@triton.jit
def _store_scores(
    outputs, strides, rows, seen, score, tile, MAXIMA: tl.constexpr, KEEPS: tl.constexpr
):
    """Store a tile's scores [TILE, BLOCK_Q] of tokens.

    outputs, strides: of the scores; the largest key of each block; with KEEPS the blocks' scores,
    of which the newest block's is the highest float; and the largest key of every 8 of those.
    seen: which tokens are meant, how many entries each sees, and at most one of them.
    """
    member_Q, visible_Q, visible = seen
    TILE: tl.constexpr = score.shape[0]
    BLOCK_Q: tl.constexpr = score.shape[1]
    BLOCKS: tl.constexpr = TILE // UNIT
    scores_ptr, maxima_ptr, best_ptr, tops_ptr = outputs
    entry = tile * TILE + tl.arange(0, TILE)
    row = rows.to(tl.int64)[None, :]
    there = (entry < visible)[:, None] & member_Q[None, :]
    tl.store(scores_ptr + row * strides[0] + entry[:, None], score, mask=there)
    if MAXIMA:
        keys = tl.where(entry[:, None] < visible_Q[None, :], to_keys(score), LOWEST)
        largest = tl.max(tl.reshape(keys, [BLOCKS, UNIT, BLOCK_Q]), axis=1)
        block = (tl.arange(0, BLOCKS) + tile * BLOCKS)[:, None]
        there = (block * UNIT < visible) & member_Q[None, :]
        tl.store(maxima_ptr + row * strides[1] + block, largest, mask=there)
        if KEEPS:
            newest = ((visible_Q - 1) // UNIT)[None, :]
            largest = tl.where(block == newest, HIGHEST, largest)
            tl.store(best_ptr + row * strides[2] + block, from_keys(largest), mask=there)
            largest = tl.max(tl.reshape(largest, [BLOCKS // 8, 8, BLOCK_Q]), axis=1)
            group = (tl.arange(0, BLOCKS // 8) + tile * (BLOCKS // 8))[:, None]
            there = (group * 8 * UNIT < visible) & member_Q[None, :]
            tl.store(tops_ptr + row * strides[3] + group, largest, mask=there)


@triton.jit
def _compact(visible, B: tl.constexpr, UNIT: tl.constexpr):
    """How many entries the B kept blocks of a token have that sees this many entries."""
    return visible - UNIT * tl.maximum(tl.cdiv(visible, UNIT) - B, 0)


@triton.jit
def _prepare_kernel(
    q_ptr,
    rotary_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    blocks_ptr,
    out_ptr,
    last_ptr,
    number_ptr,
    zero_ptr,
    units_ptr,
    least,
    I,  # noqa: E741
    stride_qn,
    stride_qi,
    stride_pages,
    stride_blocks,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    B: tl.constexpr,
    BLOCK_B: tl.constexpr,
    KEEPS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write one token's queries, with columns in the order of `_keys`, if it sees more than least.

    Also write what the kernels that select from other rows than entries take for positions,
    sequences and page tables: with KEEPS of blocks, with B > 0 of entries in B blocks.
    """
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    visible = ((position + 1) // RATIO).to(tl.int32)
    column = tl.arange(0, C)
    cos, sin = load_angles(rotary_ptr, position, C, R)
    wait_for_last(PDL)
    tl.store(zero_ptr + token, 0)
    if KEEPS:
        tl.store(last_ptr + token, (tl.cdiv(visible, UNIT) - 1).to(tl.int64))
    if B > 0:
        tl.store(last_ptr + token, (_compact(visible, B, UNIT) - 1).to(tl.int64))
        tl.store(number_ptr + token, token.to(tl.int32))
        b = tl.load(sequence_ptr + token).to(tl.int64)
        table_row_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b)
        at = tl.arange(0, BLOCK_B)
        block = tl.load(blocks_ptr + token * stride_blocks + at, mask=at < B, other=-1)
        there = (block >= 0) & (block * UNIT < visible)
        page = tl.load(table_row_ptr + block // (ROWS // UNIT), mask=there, other=0)
        unit = page * (ROWS // UNIT) + block % (ROWS // UNIT)
        tl.store(units_ptr + token * B + at, tl.where(there, unit, 0), mask=at < B)
    if visible <= least:
        return

    head = tl.arange(0, BLOCK_I)
    row_ptr = q_ptr + token * stride_qn + head[:, None] * stride_qi
    q = tl.load(row_ptr + column[None, :], mask=(head < I)[:, None], other=0.0)
    x = tl.reshape(rotate_heads(q, cos, sin), [BLOCK_I, C // GROUP, GROUP]).to(tl.float32)
    x = round_to_scale(x, scale_exponent(tl.max(tl.abs(x), axis=2))[:, :, None])
    if ASM:
        x = tl.reshape(x, [BLOCK_I, C // GROUP, 4, 2, 2, 2])
        x = tl.permute(x, [0, 2, 4, 5, 1, 3])
    x = tl.reshape(x, [BLOCK_I, C]).to(tl.bfloat16)
    out = out_ptr + (token * I + head[:, None]) * C + column[None, :]
    tl.store(out, x, mask=(head < I)[:, None])


@triton.jit(do_not_specialize=["first_token", "num_rows"])
def _scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    scores_ptr,
    maxima_ptr,
    best_ptr,
    tops_ptr,
    first_token,
    num_rows,
    least,
    scale,
    I,  # noqa: E741
    stride_w,
    stride_page,
    stride_pages,
    stride_scores,
    stride_maxima,
    stride_best,
    stride_tops,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_I: tl.constexpr,
    MAXIMA: tl.constexpr,
    KEEPS: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score BLOCK_Q tokens against every num_splits-th tile of their sequences' keys.

    scale: of all scores, times 2^63. B: number of a token's blocks; 0: score all entries. With
    blocks, BLOCK_Q is 1 and pages_ptr has the units of each token's blocks.
    """
    # The next kernel may read before it waits what `_prepare_kernel` wrote: wait before it starts.
    wait_for_last(PDL)
    start_next(PDL)
    # The last tokens of a chunk see the most entries, so process them first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    rows = first_row + tl.arange(0, BLOCK_Q)
    there = rows < num_rows
    token_Q = first_token + rows.to(tl.int64)
    position_Q = tl.load(positions_ptr + token_Q, mask=there, other=-1)
    sequence_Q = tl.load(sequence_ptr + token_Q, mask=there, other=-1)
    visible_Q = ((position_Q + 1) // RATIO).to(tl.int32)
    wanted_Q = visible_Q > least
    if B > 0:
        visible_Q = _compact(visible_Q, B, UNIT)
    most = tl.max(tl.where(wanted_Q, visible_Q, 0), axis=0)
    if split * TILE >= most:
        return

    head = tl.arange(0, BLOCK_I)
    mask_QI = wanted_Q[:, None] & (head < I)[None, :]
    weight_ptr = weights_ptr + token_Q[:, None] * stride_w + head[None, :]
    weights = tl.load(weight_ptr, mask=mask_QI, other=0.0) * scale
    weights = tl.reshape(weights, [BLOCK_Q * BLOCK_I])
    row_QI = token_Q[:, None] * I + head[None, :]
    offsets = row_QI[:, :, None] * C + tl.arange(0, C)[None, None, :]
    q = tl.load(q_ptr + offsets, mask=mask_QI[:, :, None], other=0.0)
    q_T = tl.trans(tl.reshape(q, [BLOCK_Q * BLOCK_I, C]))
    strides = stride_scores, stride_maxima, stride_best, stride_tops
    outputs = scores_ptr, maxima_ptr, best_ptr, tops_ptr
    pool = keys_ptr, stride_page
    before = -1
    for j in range(BLOCK_Q):
        token = first_token + first_row + j
        own = tl.load(sequence_ptr + token, mask=first_row + j < num_rows, other=-1)
        if own != before:
            member_Q = sequence_Q == own
            visible = tl.max(tl.where(member_Q & wanted_Q, visible_Q, 0), axis=0)
            num_tiles = tl.cdiv(visible, TILE)
            if B > 0:
                table_row_ptr = pages_ptr + token.to(tl.int64) * B
            else:
                b = tl.maximum(own, 0).to(tl.int64)
                table_row_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b)
            # Load the place of a tile's keys one tile ahead.
            next_place = _place(table_row_ptr, split, num_tiles, ROWS, TILE, B)
            for tile in tl.range(split, num_tiles, num_splits, num_stages=STAGES):
                place = next_place
                next_place = _place(table_row_ptr, tile + num_splits, num_tiles, ROWS, TILE, B)
                codes, word = _load_keys(pool, place, tile, C, ROWS, TILE, B)
                product = tl.dot(_keys(codes, word, C, TILE, ASM), q_T)
                # x + |x| is 2 relu(x), exactly, in one instruction at full rate.
                product = (product + tl.abs(product)) * weights[None, :]
                score = tl.sum(tl.reshape(product, [TILE, BLOCK_Q, BLOCK_I]), axis=2)
                score = _in_turns(score, 4, 2)
                seen = member_Q, visible_Q, visible
                _store_scores(outputs, strides, rows, seen, score, tile, MAXIMA, KEEPS)
        before = own


# --- Launch ---------------------------------------------------------------------------------------


def launch_contexts(model: ModelSizes, num_tokens: int, longest: int) -> set[int]:
    """See LaunchClasses. Numbers of entries and blocks change launches at powers of two."""
    entries = {0, *range(OUT_PAD, model.index_topk, OUT_PAD), *(1 << i for i in range(17))}
    entries.add(model.index_topk)
    return up_to(longest, (count * r + r - 1 for count in entries for r in RATIOS))


LAUNCH_CLASSES = LaunchClasses(contexts=launch_contexts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectPlan:
    """How a step is scored and selected from.

    Attributes:
        max_entries, max_blocks: the most that a token sees.
        kept: columns of the result's blocks; 0: keep none.
        within: blocks of a token to score; 0: score all entries.
        least: a token that sees no more entries needs no scores.
        row_length: number of scores of a token.
        block_q: queries that share a tile of keys: several, if sequences have several tokens.
        block_i: heads of a query, with those that pad them.
        rows: tokens that are scored at a time.
        programs: that fill the GPU.
    """

    max_entries: int
    max_blocks: int
    kept: int
    within: int
    least: int
    row_length: int
    block_q: int
    block_i: int
    rows: int
    programs: int

    @staticmethod
    def of(
        q_NIJ: Tensor, tokens: Tokens, rule: IndexRule, num_blocks: int, num_multiprocessors: int
    ) -> "SelectPlan":
        """num_blocks: columns of the blocks to select from; 0: select from all entries."""
        num_tokens, heads, _ = q_NIJ.shape
        entries = tokens.max_len // rule.ratio
        blocks = triton.cdiv(entries, BLOCK)
        # Fewer blocks than are kept are all blocks.
        within = num_blocks if 0 < num_blocks < blocks else 0
        length = triton.cdiv(within * BLOCK or entries, TILE) * TILE
        least = min(rule.topk, rule.keeps * BLOCK or rule.topk)
        block_i = max(16, triton.next_power_of_2(heads))
        block_q, each = max(1, COLUMNS // block_i), MANY_PROGRAMS
        if within or tokens.max_query == 1:
            block_q, each = 1, ONE_PROGRAMS
        programs, decode = num_multiprocessors * each, tokens.max_query <= MAX_DECODE_QUERY
        # Scores, the blocks' scores and their maxima, and what selecting from them takes.
        row_bytes = 5 * length + 2 * long_rows.row_bytes(length)
        budget = MAX_DECODE_BYTES if decode else MAX_PREFILL_BYTES
        groups = max(1, budget // (row_bytes * block_q))
        if groups < programs and not decode:  # As many as can be split over all programs.
            groups = programs // triton.cdiv(programs, groups)
        return SelectPlan(
            max_entries=entries,
            max_blocks=blocks,
            kept=min(rule.keeps, max(16, triton.next_power_of_2(blocks))),
            within=within,
            least=least,
            row_length=length,
            block_q=block_q,
            block_i=block_i,
            rows=num_tokens if entries <= least else min(num_tokens, groups * block_q),
            programs=programs,
        )


def _check(q: Tensor, keys: CacheRows, rotary: Tensor, rule: IndexRule, within: bool) -> None:
    rows_per_page = keys.table.rows_per_page
    check_pool(keys, index_key(q.shape[2]))
    check_heads(q, 2 * rotary.shape[1])
    if rows_per_page not in PAGE_ROWS or not rule.round_query:
        raise ValueError(
            f"these kernels score rounded queries against pages of {PAGE_ROWS} keys: got pages of "
            f"{rows_per_page} and round_query {rule.round_query}"
        )
    most = long_rows.MOST_TOPK, MOST_BLOCKS
    if rule.topk > most[0] or rule.keeps > most[1] or rule.block != BLOCK:
        raise ValueError(f"selects at most {most} entries and blocks of {BLOCK}, not {rule}")
    if within and rule.keeps:
        raise ValueError("a layer that selects within blocks keeps none")


def _select(
    scores: Tensor, maxima: Tensor, out: Tensor, given: tuple[Any, ...], num_warps: int
) -> None:
    """Select from rows of any length. given: the arguments of `select_topk` after `out`."""
    topk, most = given[3:5]
    # One of the scores of blocks is so high that the search in a short row would be slow.
    is_short = most <= topk_triton.BLOCK and topk <= long_rows.MOST_TOPK
    if is_short or most <= topk:
        topk_triton.select_topk(scores, out, *given)
    else:
        long_rows.select_topk_long(scores, maxima, out, *given, num_warps=num_warps)


def select_shared(
    q_NIJ: Tensor,
    weights_NI: Tensor,
    keys: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    rule: IndexRule,
    blocks_NB: Tensor | None = None,
    *,
    inline_asm: bool = False,
    early_launch: bool = False,
    num_multiprocessors: int = NUM_MULTIPROCESSORS,
    long_warps: int = long_rows.FEWER_WARPS,
) -> Selection:
    """Select from packed keys (layout.py). Grids depend only on N, max_len and max_query.

    The width of the results depends on max_len. blocks_NB: the kept blocks of a layer of the same
    step and ratio.

    The other arguments are those of `indexer.select_entries_triton.select_entries`.
    """
    num_tokens, heads, width = q_NIJ.shape
    table, device = keys.table, q_NIJ.device
    _check(q_NIJ, keys, rotary_LR, rule, blocks_NB is not None)
    num_blocks = 0 if blocks_NB is None else blocks_NB.shape[1]
    plan = SelectPlan.of(q_NIJ, tokens, rule, num_blocks, num_multiprocessors)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    columns = min(rule.topk, triton.cdiv(plan.max_entries, OUT_PAD) * OUT_PAD)
    slots, kept = ints(num_tokens, columns), ints(num_tokens, plan.kept)
    selection = Selection(slots, kept if rule.keeps else None)
    scored = plan.max_entries > plan.least
    if num_tokens == 0 or not (scored or rule.keeps or columns):
        return selection
    last, number, zero = ints(num_tokens, dtype=torch.int64), ints(num_tokens), ints(num_tokens)
    units, q = ints(num_tokens, plan.within), ints(num_tokens, heads, width, dtype=torch.bfloat16)
    common: dict[str, Any] = {
        "RATIO": rule.ratio,
        "C": width,
        "ROWS": table.rows_per_page,
        "BLOCK_I": plan.block_i,
        "B": plan.within,
        "ASM": inline_asm,
        "num_warps": 4,
        **launch_options(early_launch),
    }
    if scored or rule.keeps:
        _prepare_kernel[(num_tokens,)](
            *(q_NIJ, rotary_LR, tokens.positions, tokens.sequence, table.pages, table.first),
            *(zero if blocks_NB is None else blocks_NB, q, last, number, zero, units),
            *(plan.least, heads, q_NIJ.stride(0), q_NIJ.stride(1), table.pages.stride(0)),
            0 if blocks_NB is None else blocks_NB.stride(0),
            R=2 * rotary_LR.shape[1],
            BLOCK_B=triton.next_power_of_2(max(1, plan.within)),
            KEEPS=rule.keeps > 0,
            **common,
        )
    # A page of all blocks, or a page that is a block.
    page = PageTable(zero.as_strided((1, 1), (16, 1)), zero, 2**20)
    derived = replace(tokens, positions=last, sequence=zero, cache=StepCache())
    of_entries, of_blocks = (tokens, table), (derived, page)
    ratio, most = rule.ratio, plan.max_entries
    if plan.within:
        of_entries = replace(derived, sequence=number), PageTable(units, zero, BLOCK)
        ratio, most = 1, plan.within * BLOCK
    scores = torch.empty((plan.rows, plan.row_length if scored else 0), device=device)
    maxima = best = tops = scores
    if scored and (rule.keeps or most > topk_triton.BLOCK):
        maxima = long_rows.empty_maxima(scores)
    if scored and rule.keeps:
        best = torch.empty(maxima.shape, device=device)
        tops = long_rows.empty_maxima(best)
    # Only after the kernel of the scores may the next ones read early what `_prepare_kernel` wrote.
    early = early_launch and (scored or not rule.keeps)
    for first in range(0, num_tokens, plan.rows):
        parts = [t[: num_tokens - first] for t in (scores, maxima, best, tops)]
        if scored:
            groups = triton.cdiv(len(parts[0]), plan.block_q)
            splits = max(1, min(plan.programs // groups, plan.row_length // TILE))
            _scores_kernel[(groups, splits)](
                *(q, weights_NI, keys.pool, tokens.positions, tokens.sequence),
                *(units if plan.within else table.pages, table.first, *parts),
                *(first, len(parts[0]), plan.least, rule.scale * 2.0**63, heads),
                *(weights_NI.stride(0), keys.pool.stride(0), table.pages.stride(0)),
                *(part.stride(0) for part in parts),
                TILE=TILE,
                BLOCK_Q=plan.block_q,
                MAXIMA=maxima is not scores,
                KEEPS=best is not scores,
                STAGES=STAGES,
                **({"maxnreg": 128 if plan.block_q == 1 else 255} if inline_asm else {}),
                **common,
            )
        if columns:
            given = *of_entries, first, rule.topk, most, ratio, early
            _select(parts[0], parts[1], slots, given, long_warps)
        if rule.keeps:
            given = *of_blocks, first, rule.keeps, plan.max_blocks, 1, early
            _select(parts[2], parts[3], kept, given, long_warps)
    return selection
