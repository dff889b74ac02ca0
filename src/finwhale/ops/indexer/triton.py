"""The lightning indexer as Triton kernels: scores of packed keys, then the topk of each token.

A program of the scores rounds its queries itself and reads keys in tiles of TILE_ENTRIES, which
stand as rows of the product so that the sum over heads stays within a few threads. Scores are
summed in one order whatever the batch, the chunk or the split.

Work of a token that sees E entries: 2 I C E operations, 1.42 PFLOP/s in FP8; bytes: E (C + 4) of
keys a sequence, 4.39 TB/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.indexer.layout import SCALE_BYTES, page_bytes
from finwhale.ops.indexer.triton_topk import select_topk
from finwhale.ops.paging import PageTable, Tokens

RATIO = 4
TILE_ENTRIES = 128
# Columns of a product: heads of the queries that share a tile of keys.
PREFILL_COLUMNS = 256
STAGES = 3
DECODE_WARPS = 4
PREFILL_WARPS = 8
# Programs that fill the GPU; a row's tiles are split between so many.
DECODE_PROGRAMS = 264
PREFILL_PROGRAMS = 1056
# Scores that stand in memory at once: a prefill's stay in the L2 cache, a decode's are whole.
PREFILL_SCORE_BYTES = 64 * 2**20
MAX_SCORE_BYTES = 2**30
OUT_PAD = 128


@triton.jit
def _rounded_queries(
    q_ptr,
    weights_ptr,
    rotary_ptr,
    tokens,
    heads,
    mask,
    positions,
    scale,
    stride_qn,
    stride_qi,
    stride_w,
    C: tl.constexpr,
    R: tl.constexpr,
):
    """rope(q) in E4M3 [rows, C], and weights * scale * the queries' scales [rows]."""
    columns = tl.arange(0, C)
    row_ptr = q_ptr + tokens * stride_qn + heads * stride_qi
    # The other value of a column's pair, and whether the column is the second of it.
    rope = columns - (C - R)
    is_rope = rope >= 0
    q = tl.load(row_ptr[:, None] + columns[None, :], mask=mask[:, None], other=0.0)
    pair_mask = mask[:, None] & is_rope[None, :]
    other = tl.load(row_ptr[:, None] + (columns ^ 1)[None, :], mask=pair_mask, other=0.0)
    angle_ptr = rotary_ptr + (positions * R)[:, None] + (rope // 2 * 2)[None, :]
    cos = tl.load(angle_ptr, mask=pair_mask, other=1.0)
    sin = tl.load(angle_ptr + 1, mask=pair_mask, other=0.0)
    sin = tl.where((columns % 2 == 1)[None, :], sin, -sin)
    rotated = q.to(tl.float32) * cos + other.to(tl.float32) * sin
    rotated = rotated.to(q_ptr.dtype.element_ty).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(rotated), axis=1), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    scale_bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = (0x7F000000 - scale_bits).to(tl.float32, bitcast=True)
    weights = tl.load(weights_ptr + tokens * stride_w + heads, mask=mask, other=0.0) * scale
    weights = weights * scale_bits.to(tl.float32, bitcast=True)
    return (rotated * inverse[:, None]).to(tl.float8e4nv), weights


@triton.jit
def _scores_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    key_scales_ptr,
    rotary_ptr,
    positions_ptr,
    sequence_ptr,
    pages_ptr,
    first_ptr,
    scores_ptr,
    first_token,
    num_rows,
    topk,
    scale,
    I,  # noqa: E741
    stride_qn,
    stride_qi,
    stride_w,
    stride_page,
    stride_scale_page,
    stride_pages,
    stride_scores,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The last tokens of a chunk see most entries: they go first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    rows = first_row + tl.arange(0, BLOCK_Q)
    there = rows < num_rows
    token_Q = first_token + rows.to(tl.int64)
    position_Q = tl.load(positions_ptr + token_Q, mask=there, other=-1)
    visible_Q = ((position_Q + 1) // RATIO).to(tl.int32)
    if tl.max(visible_Q, axis=0) <= topk:
        return
    sequence_Q = tl.load(sequence_ptr + token_Q, mask=there, other=-1)

    column = tl.arange(0, BLOCK_Q * BLOCK_I)
    head = column % BLOCK_I
    column_row = first_row + column // BLOCK_I
    column_there = (column_row < num_rows) & (head < I)
    column_token = first_token + column_row.to(tl.int64)
    column_position = tl.load(positions_ptr + column_token, mask=column_there, other=0)
    q, weights = _rounded_queries(
        q_ptr,
        weights_ptr,
        rotary_ptr,
        column_token,
        head,
        column_there,
        tl.maximum(column_position, 0),
        scale,
        stride_qn,
        stride_qi,
        stride_w,
        C,
        R,
    )
    q_T = tl.trans(q)
    lanes = tl.arange(0, BLOCK_E)
    values = tl.arange(0, C)
    score_row_Q = rows.to(tl.int64) * stride_scores
    before = -1
    for j in range(BLOCK_Q):
        own = tl.load(
            sequence_ptr + first_token + first_row + j, mask=first_row + j < num_rows, other=-1
        )
        if own != before:
            member_Q = sequence_Q == own
            visible = tl.max(tl.where(member_Q, visible_Q, 0), axis=0)
            visible = tl.where(visible > topk, visible, 0)
            b = tl.maximum(own, 0).to(tl.int64)
            page_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b)
            for tile in tl.range(
                tl.program_id(1), tl.cdiv(visible, BLOCK_E), tl.num_programs(1), num_stages=STAGES
            ):
                entry = tile * BLOCK_E + lanes
                seen = entry < visible
                page = tl.load(page_ptr + entry // ROWS_PER_PAGE, mask=seen, other=0).to(tl.int64)
                offset = entry % ROWS_PER_PAGE
                key_row = page * stride_page + offset * C
                keys = tl.load(keys_ptr + key_row[:, None] + values[None, :])
                key_scale = tl.load(
                    key_scales_ptr + page * stride_scale_page + (ROWS_PER_PAGE * C // 4) + offset
                )
                product = tl.dot(keys, q_T)
                product = tl.maximum(product, 0.0) * weights[None, :]
                score = tl.sum(tl.reshape(product, [BLOCK_E, BLOCK_Q, BLOCK_I]), axis=2)
                score = score * key_scale[:, None]
                tl.store(
                    scores_ptr + score_row_Q[None, :] + entry[:, None],
                    score,
                    mask=seen[:, None] & member_Q[None, :],
                )
        before = own


def _check(q_NIC: Tensor, key_pool: Tensor, table: PageTable, rope: int, round_query: bool) -> None:
    width = q_NIC.shape[2]
    if key_pool.dtype != torch.uint8 or key_pool.dim() != 2 or not round_query:
        raise ValueError(
            f"these kernels score rounded queries against packed keys (uint8 pages), "
            f"got {key_pool.dtype} {tuple(key_pool.shape)} and round_query {round_query}"
        )
    if width not in (32, 64, 128) or rope > width or q_NIC.stride(2) != 1:
        raise ValueError(
            f"index heads must have 32, 64 or 128 values that lie together, rope at most all of "
            f"them: got {tuple(q_NIC.shape)}, strides {q_NIC.stride()}, rope {rope}"
        )
    wanted = page_bytes(table.rows_per_page, width)
    if key_pool.shape[1] < wanted or key_pool.stride(0) % 16 or key_pool.stride(1) != 1:
        raise ValueError(
            f"pages of {table.rows_per_page} keys take {wanted} bytes and lie a multiple of 16 "
            f"apart: got {tuple(key_pool.shape)}, strides {key_pool.stride()}"
        )


def select_entries(
    q_NIC: Tensor,
    weights_NI: Tensor,
    key_pool: Tensor,
    rotary_LR: Tensor,
    tokens: Tokens,
    table: PageTable,
    topk: int,
    scale: float,
    round_query: bool,
) -> Tensor:
    """[N,K] int32 slots of packed keys; grids depend on N, max_len and max_query alone."""
    num_tokens, heads, width = q_NIC.shape
    _check(q_NIC, key_pool, table, 2 * rotary_LR.shape[1], round_query)
    max_entries = tokens.max_len // RATIO
    columns = min(topk, -(-max_entries // OUT_PAD) * OUT_PAD)
    out_NK = torch.empty(num_tokens, columns, dtype=torch.int32, device=q_NIC.device)
    if out_NK.numel() == 0:
        return out_NK
    if max_entries <= topk:
        no_scores = torch.empty(num_tokens, 0, dtype=torch.float32, device=q_NIC.device)
        select_topk(no_scores, out_NK, tokens, table, 0, topk, 0, RATIO)
        return out_NK

    block_i = max(16, triton.next_power_of_2(heads))
    prefill = tokens.max_query > 1
    block_q = max(1, PREFILL_COLUMNS // block_i) if prefill else 1
    row_length = triton.cdiv(max_entries, TILE_ENTRIES) * TILE_ENTRIES
    limit = PREFILL_SCORE_BYTES if prefill else MAX_SCORE_BYTES
    rows = min(num_tokens, max(block_q, limit // (4 * row_length) // block_q * block_q))
    scores_NE = torch.empty(rows, row_length, dtype=torch.float32, device=q_NIC.device)
    keys, key_scales = key_pool.view(torch.float8_e4m3fn), key_pool.view(torch.float32)
    for first_token in range(0, num_tokens, rows):
        num_rows = min(rows, num_tokens - first_token)
        groups = triton.cdiv(num_rows, block_q)
        programs = PREFILL_PROGRAMS if prefill else DECODE_PROGRAMS
        splits = max(1, min(programs // groups, row_length // TILE_ENTRIES))
        _scores_kernel[(groups, splits)](
            q_NIC,
            weights_NI,
            keys,
            key_scales,
            rotary_LR,
            tokens.positions,
            tokens.sequence,
            table.pages,
            table.first,
            scores_NE,
            first_token,
            num_rows,
            topk,
            scale,
            heads,
            q_NIC.stride(0),
            q_NIC.stride(1),
            weights_NI.stride(0),
            key_pool.stride(0),
            key_pool.stride(0) // SCALE_BYTES,
            table.pages.stride(0),
            scores_NE.stride(0),
            RATIO=RATIO,
            C=width,
            R=2 * rotary_LR.shape[1],
            ROWS_PER_PAGE=table.rows_per_page,
            BLOCK_Q=block_q,
            BLOCK_I=block_i,
            BLOCK_E=TILE_ENTRIES,
            STAGES=STAGES,
            num_warps=PREFILL_WARPS if prefill else DECODE_WARPS,
        )
        select_topk(
            scores_NE[:num_rows], out_NK, tokens, table, first_token, topk, max_entries, RATIO
        )
    return out_NK
