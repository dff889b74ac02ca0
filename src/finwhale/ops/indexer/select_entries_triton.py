"""The lightning indexer as Triton kernels: scores of packed keys, then the topk of each token.

A program of `_scores_kernel` has one token of a decode, or a few of a prefill, and every
num_splits-th page of their keys. Keys are the rows of the GEMM, so that the sum over heads stays
within a few threads. The order of that sum does not depend on the batch, the chunk or the split.
`topk_triton.py` then selects from the scores, or `topk_long_triton.py` if rows are long.

Keys are FP4. The kernel unpacks them to E4M3 in registers and moves the exponents of a key's groups
into its values, relative to the largest exponent, which remains as one factor of the dot product.
This is exact for every key (layout.py). `prepare_queries_triton.py` treats queries in the same way.

Work for a token that sees E entries: 2 I C E operations at 1.42 PFLOP/s in FP8, and E (C/2 + C/32)
bytes of keys per sequence at 4.39 TB/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.indexer import RATIO, IndexQueries, topk_triton
from finwhale.ops.indexer import topk_long_triton as long_rows
from finwhale.ops.indexer.layout import IndexKey
from finwhale.ops.indexer.prepare_queries_triton import (
    GROUP,
    TOP,
    block_heads,
    prepare_index_queries,
)
from finwhale.ops.indexer.topk_triton import to_keys
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import NUM_MULTIPROCESSORS, LaunchClasses, ModelSizes, up_to
from finwhale.ops.paging import MAX_DECODE_QUERY, CacheRows, Tokens

PAGE_ROWS = (64, 128)
STAGES = 4
COLUMNS = 256  # of the GEMM in a prefill: queries times heads
# The most bytes at a time for scores and their selection, in a decode and in a prefill.
MAX_DECODE_BYTES, MAX_PREFILL_BYTES = 2**30, 2**28
# Programs per multiprocessor that fill the GPU; the tiles of a row are split over all of them.
DECODE_PROGRAMS, PREFILL_PROGRAMS = 4, 8
OUT_PAD = 128
MAX_QUERY = tl.constexpr(MAX_DECODE_QUERY)
# Eight codes of a word (layout.py) -> two words of E4M3. Three bits of each nibble of prmt's
# selector choose a byte: 0 .. 3 of `low`, 4 .. 7 of `high`. $3 is subtracted from their exponents.
UNPACK = tl.constexpr("""{
.reg .b32 low, high, codes, value, signs;
mad.lo.s32 low, $3, 0xF7F7F800, 0x6C686000;
mad.lo.s32 high, $3, 0xF7F7F7F8, 0x7C787470;
and.b32 codes, $2, 0x77777777;
prmt.b32 value, low, high, codes;
lop3.b32 $0, $2, 0x80808080, value, 0xEA;
shr.u32 codes, codes, 16;
prmt.b32 value, low, high, codes;
shl.b32 signs, $2, 4;
lop3.b32 $1, signs, 0x80808080, value, 0xEA;
}""")
OPERANDS = tl.constexpr("=&r,=&r" + ",r" * 5)


@triton.jit
def _unpacked(codes, below, C: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """Codes uint8 [ROWS, C/2] as E4M3 [ROWS, C]: 64 / 2^below times their values.

    below [ROWS, C/32] int32, 0 .. 11: the row's largest exponent minus the group's. With inline
    assembly, a group first has the columns 8i .. 8i + 3 of all i, then 8i + 4 .. 8i + 7, so that
    the values of a word stay in its thread, where the GEMM needs them. Otherwise the columns are in
    order.
    """
    if ASM:
        codes = tl.reshape(codes, [ROWS, C // GROUP, GROUP // 2])
        wide, _ = tl.broadcast(below[:, :, None], codes)
        first, second = tl.inline_asm_elementwise(
            UNPACK, OPERANDS, [codes, wide], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
        values = tl.permute(tl.join(first, second), [0, 1, 3, 2])
    else:
        codes = codes.to(tl.int32)
        sign = tl.reshape(tl.join(codes >> 7, (codes >> 3) & 1), [ROWS, C // 8, 4, 2])
        sign = tl.reshape(tl.permute(sign, [0, 1, 3, 2]), [ROWS, C // GROUP, GROUP])
        size = tl.reshape(tl.join(codes & 7, (codes >> 4) & 7), [ROWS, C // GROUP, GROUP])
        values = _bytes(size, sign, below[:, :, None])
    return tl.reshape(values, [ROWS, C]).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _bytes(size, sign, below):
    """E4M3 bytes of 64 / 2^below times e2m1 values, from magnitude codes and signs.

    A magnitude code of 2 or more is itself exponent and mantissa. Code 1 is the power of two below
    that of code 2.
    """
    byte = 4 * (size - (size == 1).to(tl.int32)) + 8 * (12 - below)
    return (tl.where(size == 0, 0, byte) | (sign << 7)).to(tl.uint8)


@triton.jit
def _load_queries(
    q_ptr,
    factors_ptr,
    weights_ptr,
    token_Q,
    wanted_Q,
    scale,
    I,  # noqa: E741
    stride_w,
    C: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Returns prepared queries, E4M3 [Q * I, C], and half of weights * scale * factors [Q * I].

    The values of tokens that are not wanted are 0: their queries may be uninitialised.
    """
    column = tl.arange(0, C)
    head = tl.arange(0, BLOCK_I)
    mask_QI = wanted_Q[:, None] & (head < I)[None, :]
    row_QI = token_Q[:, None] * I + head[None, :]
    weight_ptr = weights_ptr + token_Q[:, None] * stride_w + head[None, :]
    weights = tl.load(weight_ptr, mask=mask_QI, other=0.0) * scale
    weights = weights * tl.load(factors_ptr + row_QI, mask=mask_QI, other=0.0)
    offsets = row_QI[:, :, None] * C + column[None, None, :]
    q = tl.load(q_ptr + offsets, mask=mask_QI[:, :, None], other=0)
    q = tl.reshape(q, [BLOCK_Q * BLOCK_I, C]).to(tl.float8e4nv, bitcast=True)
    return q, tl.reshape(weights, [BLOCK_Q * BLOCK_I])


@triton.jit
def _load_keys(keys_ptr, page, there, stride_page, C: tl.constexpr, ROWS: tl.constexpr):
    """Load the keys of a page. Return their codes [ROWS, C/2] and a word for each key [ROWS].

    The word of a key contains its exponents, one byte for each group.
    there: if false, load nothing and return zeros.
    """
    WORD: tl.constexpr = tl.int32 if C // GROUP == 4 else tl.int16 if C // GROUP == 2 else tl.uint8
    lanes = tl.arange(0, ROWS)
    page_ptr = keys_ptr + page.to(tl.int64) * stride_page
    code_offsets = lanes[:, None] * (C // 2) + tl.arange(0, C // 2)[None, :]
    codes = tl.load(page_ptr + code_offsets, mask=there, other=0)
    # Load one word per key, because Triton does not prefetch single bytes.
    word_ptr = (page_ptr + ROWS * (C // 2)).to(tl.pointer_type(WORD))
    return codes, tl.load(word_ptr + lanes, mask=there, other=0).to(tl.int32)


@triton.jit
def _page_scores(
    codes,
    word,
    q_T,
    weights,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_I: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scores [ROWS, BLOCK_Q] of a page's keys, from the results of `_load_keys`."""
    groups = tl.arange(0, C // GROUP)
    exponent = (word[:, None] >> (8 * groups)[None, :]) & 255
    largest = tl.max(exponent, axis=1)
    keys = _unpacked(codes, largest[:, None] - exponent, C, ROWS, ASM)
    product = tl.dot(keys, q_T)
    # x + |x| is 2 relu(x), exactly, in one instruction at full rate, unlike a maximum.
    product = (product + tl.abs(product)) * weights[None, :]
    score = tl.sum(tl.reshape(product, [ROWS, BLOCK_Q, BLOCK_I]), axis=2)
    key_scale = (largest << 23).to(tl.float32, bitcast=True) * (2.0**-TOP)
    return score * key_scale[:, None]


@triton.jit
def _store_scores(
    rows_at, member_Q, visible_Q, score, tile, visible, ROWS: tl.constexpr, LARGEST_OF: tl.constexpr
):
    """Store a page's scores [ROWS, BLOCK_Q] of the member tokens, which see at most `visible`.

    LARGEST_OF: if positive, also store the largest key of every LARGEST_OF entries.
    """
    scores_ptr, maxima_ptr, score_row_Q, maxima_row_Q = rows_at
    entry = tile * ROWS + tl.arange(0, ROWS)
    seen = entry < visible
    offsets = score_row_Q[None, :] + entry[:, None]
    tl.store(scores_ptr + offsets, score, mask=seen[:, None] & member_Q[None, :])
    if LARGEST_OF > 0:
        COUNT: tl.constexpr = ROWS // LARGEST_OF
        BLOCK_Q: tl.constexpr = score.shape[1]
        keys = tl.where(entry[:, None] < visible_Q[None, :], to_keys(score), -0x7FFFFFFF - 1)
        largest = tl.max(tl.reshape(keys, [COUNT, LARGEST_OF, BLOCK_Q]), axis=1)
        group = (tile * COUNT + tl.arange(0, COUNT))[:, None]
        there = (group * LARGEST_OF < visible) & member_Q[None, :]
        tl.store(maxima_ptr + maxima_row_Q[None, :] + group, largest, mask=there)


@triton.jit(do_not_specialize=["first_token", "num_rows"])
def _scores_kernel(
    q_ptr,
    factors_ptr,
    weights_ptr,
    keys_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    scores_ptr,
    maxima_ptr,
    first_token,
    num_rows,
    topk,
    scale,
    I,  # noqa: E741
    stride_w,
    stride_page,
    stride_pages,
    stride_scores,
    stride_maxima,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    LARGEST_OF: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score BLOCK_Q tokens against every num_splits-th page of their sequences' keys.

    DECODE: no sequence has more than MAX_QUERY tokens in the step, and BLOCK_Q is 1.
    LARGEST_OF: see `_store_scores`.
    """
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
    most = tl.max(visible_Q, axis=0)
    is_wanted = (most > topk) & (split * ROWS < most)
    if DECODE:
        # The step writes no entry that ends before the sequence's first token in it, so the keys of
        # such entries are complete before the wait.
        complete = (tl.max(position_Q, axis=0) - (MAX_QUERY - 1)) // RATIO
        is_complete = is_wanted & ((split + 1) * ROWS <= complete)
        b = tl.maximum(tl.max(sequence_Q, axis=0), 0).to(tl.int64)
        page_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b) + split
        page = tl.load(page_ptr, mask=is_wanted, other=0)
        codes, word = _load_keys(keys_ptr, page, is_complete, stride_page, C, ROWS)
    wait_for_last(PDL)
    if not is_wanted:
        return

    wanted_Q = visible_Q > topk
    q, weights = _load_queries(
        q_ptr, factors_ptr, weights_ptr, token_Q, wanted_Q, scale, I, stride_w, C, BLOCK_Q, BLOCK_I
    )
    q_T = tl.trans(q)
    score_row_Q, maxima_row_Q = rows.to(tl.int64) * stride_scores, rows.to(tl.int64) * stride_maxima
    rows_at = scores_ptr, maxima_ptr, score_row_Q, maxima_row_Q
    if DECODE:  # noqa: SIM102 (a constant)
        if (split + num_splits) * ROWS >= most:
            if not is_complete:
                codes, word = _load_keys(keys_ptr, page, True, stride_page, C, ROWS)
            score = _page_scores(codes, word, q_T, weights, C, ROWS, BLOCK_Q, BLOCK_I, ASM)
            _store_scores(rows_at, there, visible_Q, score, split, most, ROWS, LARGEST_OF)
            return

    # A program with several pages loads the first one again, now from the L2 cache: keeping its
    # keys would take registers that the other pages need.
    before = -1
    for j in range(BLOCK_Q):
        own = tl.load(
            sequence_ptr + first_token + first_row + j, mask=first_row + j < num_rows, other=-1
        )
        if own != before:
            member_Q = sequence_Q == own
            visible = tl.max(tl.where(member_Q, visible_Q, 0), axis=0)
            visible = tl.where(visible > topk, visible, 0)
            num_pages = tl.cdiv(visible, ROWS)
            b = tl.maximum(own, 0).to(tl.int64)
            table_row_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b)
            # A tile is a page. Load its number one tile ahead.
            next_page = tl.load(table_row_ptr + split, mask=split < num_pages, other=0)
            for tile in tl.range(split, num_pages, num_splits, num_stages=STAGES):
                tile_page = next_page
                following = tile + num_splits
                next_page = tl.load(table_row_ptr + following, mask=following < num_pages, other=0)
                tile_codes, tile_word = _load_keys(keys_ptr, tile_page, True, stride_page, C, ROWS)
                score = _page_scores(
                    tile_codes, tile_word, q_T, weights, C, ROWS, BLOCK_Q, BLOCK_I, ASM
                )
                _store_scores(rows_at, member_Q, visible_Q, score, tile, visible, ROWS, LARGEST_OF)
        before = own


def launch_contexts(model: ModelSizes, num_tokens: int, longest: int) -> set[int]:
    """See LaunchClasses."""
    entries = {
        0,
        model.index_topk,
        *range(OUT_PAD, model.index_topk, OUT_PAD),
        *topk_triton.BLOCKS,
        long_rows.TILE,
        2 * long_rows.TILE,
    }
    return up_to(longest, (count * RATIO + RATIO - 1 for count in entries))


LAUNCH_CLASSES = LaunchClasses(contexts=launch_contexts)


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """How a step is scored.

    Attributes:
        decode: no sequence has more than MAX_DECODE_QUERY tokens.
        block_q, block_i: queries that share a tile of keys, and their heads. Together they are the
            columns of the GEMM.
        rows: tokens that are scored at a time.
        programs: that fill the GPU.
        registers: of a thread. A multiprocessor then runs four programs of a decode or two of a
            prefill.
    """

    decode: bool
    block_q: int
    block_i: int
    rows: int
    programs: int
    registers: int

    @staticmethod
    def of(
        num_tokens: int, heads: int, row_length: int, decode: bool, num_multiprocessors: int
    ) -> "ScorePlan":
        """row_length: number of scores of a token."""
        block_i = block_heads(heads)
        row_bytes = 4 * row_length
        if row_length > topk_triton.BLOCK:
            row_bytes += long_rows.row_bytes(row_length)
        if decode:
            programs = num_multiprocessors * DECODE_PROGRAMS
            rows = max(1, MAX_DECODE_BYTES // row_bytes)
            return ScorePlan(decode, 1, block_i, min(num_tokens, rows), programs, 128)
        programs, block_q = num_multiprocessors * PREFILL_PROGRAMS, max(1, COLUMNS // block_i)
        groups = max(1, MAX_PREFILL_BYTES // (row_bytes * block_q))
        if groups < programs:  # As many as can be split over all programs.
            groups = programs // triton.cdiv(programs, groups)
        return ScorePlan(decode, block_q, block_i, min(num_tokens, groups * block_q), programs, 255)


def _check(width: int, keys: CacheRows, round_query: bool) -> None:
    key_pool, table = keys.pool, keys.table
    if key_pool.dtype != torch.uint8 or key_pool.dim() != 2 or not round_query:
        raise ValueError(
            f"these kernels score rounded queries against packed keys (uint8 pages), "
            f"got {key_pool.dtype} {tuple(key_pool.shape)} and round_query {round_query}"
        )
    if table.rows_per_page not in PAGE_ROWS:
        raise ValueError(f"pages must hold {PAGE_ROWS} keys, got {table.rows_per_page}")
    wanted = IndexKey(width).page_bytes(table.rows_per_page)
    if key_pool.shape[1] < wanted or key_pool.stride(0) % 16 or key_pool.stride(1) != 1:
        raise ValueError(
            f"pages of {table.rows_per_page} keys take {wanted} bytes and lie a multiple of 16 "
            f"apart: got {tuple(key_pool.shape)}, strides {key_pool.stride()}"
        )


def _score(
    plan: ScorePlan,
    q: IndexQueries,
    weights_NI: Tensor,
    keys: CacheRows,
    tokens: Tokens,
    topk: int,
    scale: float,
    first_token: int,
    scores_NE: Tensor,
    maxima_NG: Tensor | None,
    inline_asm: bool,
    early_launch: bool,
) -> None:
    """Write the scores of the tokens from `first_token` on. maxima: see topk_long_triton.py."""
    (_, heads, width), (num_rows, row_length), table = q.values.shape, scores_NE.shape, keys.table
    maxima = scores_NE if maxima_NG is None else maxima_NG
    groups = triton.cdiv(num_rows, plan.block_q)
    splits = max(1, min(plan.programs // groups, row_length // table.rows_per_page))
    _scores_kernel[(groups, splits)](
        *(q.values, q.factors, weights_NI, keys.pool, tokens.positions, tokens.sequence),
        *(table.pages, table.first, scores_NE, maxima),
        *(first_token, num_rows, topk, scale, heads),
        *(weights_NI.stride(0), keys.pool.stride(0), table.pages.stride(0)),
        *(scores_NE.stride(0), maxima.stride(0)),
        RATIO=RATIO,
        C=width,
        ROWS=table.rows_per_page,
        DECODE=plan.decode,
        BLOCK_Q=plan.block_q,
        BLOCK_I=plan.block_i,
        STAGES=STAGES,
        LARGEST_OF=0 if maxima_NG is None else long_rows.GROUP,
        ASM=inline_asm,
        num_warps=4,
        **({"maxnreg": plan.registers} if inline_asm else {}),
        **launch_options(early_launch),
    )


def select_entries(
    q_NIC: Tensor | IndexQueries,
    weights_NI: Tensor,
    keys: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    topk: int,
    scale: float,
    round_query: bool,
    *,
    invariant: bool = False,
    inline_asm: bool = False,
    early_launch: bool = False,
    num_multiprocessors: int = NUM_MULTIPROCESSORS,
    long_warps: int = long_rows.FEWER_WARPS,
) -> Tensor:
    """Select slots [N,K] int32 of packed keys. Grids depend only on N, max_len and max_query.

    invariant: K is topk in every step; otherwise it is limited by the longest sequence.
    inline_asm: unpack keys with PTX instructions, within a fixed number of registers.
    early_launch: kernels launch early (ops/launch/early_launch.py).
    num_multiprocessors: number in the GPU; it determines the number of programs.
    long_warps: warps of a program that selects from a long row.
    """
    shape = q_NIC.shape if isinstance(q_NIC, Tensor) else q_NIC.values.shape
    num_tokens, heads, width = shape
    _check(width, keys, round_query)
    if isinstance(q_NIC, Tensor):
        how = {"inline_asm": inline_asm, "early_launch": early_launch}
        q_NIC = prepare_index_queries(q_NIC, rotary_LR, tokens, topk, round_query, **how)
    values, factors = q_NIC.values, q_NIC.factors
    max_entries = tokens.max_len // RATIO
    columns = topk if invariant else min(topk, -(-max_entries // OUT_PAD) * OUT_PAD)
    out_NK = torch.empty(num_tokens, columns, dtype=torch.int32, device=values.device)
    if out_NK.numel() == 0:
        return out_NK
    if max_entries <= topk:
        no_scores = torch.empty(num_tokens, 0, dtype=torch.float32, device=values.device)
        none = (no_scores, out_NK, tokens, keys.table, 0, topk, 0, RATIO, early_launch)
        topk_triton.select_topk(*none)
        return out_NK
    assert factors is not None, "the queries were prepared for shorter sequences"
    row_length = triton.cdiv(max_entries, keys.table.rows_per_page) * keys.table.rows_per_page
    decode = tokens.max_query <= MAX_DECODE_QUERY
    plan = ScorePlan.of(num_tokens, heads, row_length, decode, num_multiprocessors)
    scores_NE = torch.empty(plan.rows, row_length, dtype=torch.float32, device=values.device)
    is_long = max_entries > topk_triton.BLOCK
    if is_long and topk > long_rows.MOST_TOPK:
        raise ValueError(f"selects at most {long_rows.MOST_TOPK} of {max_entries}, not {topk}")
    maxima_NG = long_rows.empty_maxima(scores_NE) if is_long else None
    for first in range(0, num_tokens, plan.rows):
        scores = scores_NE[: num_tokens - first]
        _score(
            plan, q_NIC, weights_NI, keys, tokens, topk, scale, first, scores, maxima_NG,
            inline_asm, early_launch,
        )  # fmt: skip
        rest = (out_NK, tokens, keys.table, first, topk, max_entries, RATIO, early_launch)
        if maxima_NG is None:
            topk_triton.select_topk(scores, *rest)
        else:
            maxima = maxima_NG[: len(scores)]
            long_rows.select_topk_long(scores, maxima, *rest, num_warps=long_warps)
    return out_NK
