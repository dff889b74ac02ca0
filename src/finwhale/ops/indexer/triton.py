"""The lightning indexer as Triton kernels: scores of packed keys, then the topk of each token.

A program of the scores rounds its queries itself and reads keys a page at a time, which stand as
rows of the product so that the sum over heads stays within a few threads. Scores are
summed in one order whatever the batch, the chunk or the split.

Work of a token that sees E entries: 2 I C E operations, 1.42 PFLOP/s in FP8; bytes: E (C + 4) of
keys a sequence, 4.39 TB/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.indexer.layout import page_bytes
from finwhale.ops.indexer.triton_topk import select_topk
from finwhale.ops.paging import UNDOABLE_TOKENS, PageTable, Tokens

RATIO = 4
SCALE_BYTES = 4
PAGE_ROWS = (64, 128)
# Columns of a product: heads of the queries that share a tile of keys.
PREFILL_COLUMNS = 128
STAGES = 4
# Programs that fill the GPU; a row's tiles are split between so many.
DECODE_PROGRAMS = 264
PREFILL_PROGRAMS = 1056
# Scores that stand in memory at once: of a prefill, about what the L2 cache holds.
PREFILL_SCORE_BYTES = 64 * 2**20
MAX_SCORE_BYTES = 2**30
OUT_PAD = 128


@triton.jit
def _rounded_queries(
    q_ptr,
    weights_ptr,
    rotary_ptr,
    token_Q,
    position_Q,
    scale,
    I,  # noqa: E741
    stride_qn,
    stride_qi,
    stride_w,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """rope(q) in E4M3 [Q * I, C], and half of weights * scale * the queries' scales [Q * I]."""
    column = tl.arange(0, C)
    head = tl.arange(0, BLOCK_I)
    mask_QI = (position_Q >= 0)[:, None] & (head < I)[None, :]
    row_QI = token_Q[:, None] * stride_qn + head[None, :] * stride_qi
    weights_QI = tl.load(
        weights_ptr + token_Q[:, None] * stride_w + head[None, :], mask=mask_QI, other=0.0
    )
    q = tl.load(
        q_ptr + row_QI[:, :, None] + column[None, None, :], mask=mask_QI[:, :, None], other=0.0
    )
    # Cosines in even columns, sines in odd ones; 1 and 0 before the rope.
    rope = column - (C - R)
    angle_ptr = rotary_ptr + tl.maximum(position_Q, 0)[:, None] * R + rope[None, :]
    angles = tl.load(angle_ptr, mask=(rope >= 0)[None, :] & (position_Q >= 0)[:, None], other=0.0)
    angles = tl.where((rope < 0)[None, :], (1 - column % 2)[None, :].to(tl.float32), angles)
    cos, sin = tl.split(tl.reshape(angles, [BLOCK_Q, 1, C // 2, 2]))
    even, odd = tl.split(tl.reshape(q, [BLOCK_Q, BLOCK_I, C // 2, 2]).to(tl.float32))
    dtype = q_ptr.dtype.element_ty
    even, odd = (even * cos - odd * sin).to(dtype), (odd * cos + even * sin).to(dtype)
    rotated = tl.reshape(tl.join(even, odd), [BLOCK_Q * BLOCK_I, C]).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(rotated), axis=1), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    scale_bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = (0x7F000000 - scale_bits).to(tl.float32, bitcast=True)
    weights = tl.reshape(weights_QI * scale, [BLOCK_Q * BLOCK_I])
    weights = weights * (0.5 * scale_bits.to(tl.float32, bitcast=True))
    return (rotated * inverse[:, None]).to(tl.float8e4nv), weights


@triton.jit(do_not_specialize=["first_token", "num_rows"])
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
    STAGES: tl.constexpr,
):
    # The last tokens of a chunk see most entries: they go first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    rows = first_row + tl.arange(0, BLOCK_Q)
    there = rows < num_rows
    token_Q = first_token + rows.to(tl.int64)
    position_Q = tl.load(positions_ptr + token_Q, mask=there, other=-1)
    sequence_Q = tl.load(sequence_ptr + token_Q, mask=there, other=-1)
    visible_Q = ((position_Q + 1) // RATIO).to(tl.int32)
    most = tl.max(visible_Q, axis=0)
    if (most <= topk) | (split * ROWS_PER_PAGE >= most):
        return

    q, weights = _rounded_queries(
        q_ptr,
        weights_ptr,
        rotary_ptr,
        token_Q,
        position_Q,
        scale,
        I,
        stride_qn,
        stride_qi,
        stride_w,
        C,
        R,
        BLOCK_Q,
        BLOCK_I,
    )
    q_T = tl.trans(q)
    lanes = tl.arange(0, ROWS_PER_PAGE)
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
            num_pages = tl.cdiv(visible, ROWS_PER_PAGE)
            b = tl.maximum(own, 0).to(tl.int64)
            page_ptr = pages_ptr + b * stride_pages - tl.load(first_ptr + b)
            # A tile is a page; its number is read a tile ahead.
            next_page = tl.load(page_ptr + split, mask=split < num_pages, other=0)
            for tile in tl.range(split, num_pages, num_splits, num_stages=STAGES):
                page = next_page.to(tl.int64)
                following = tile + num_splits
                next_page = tl.load(page_ptr + following, mask=following < num_pages, other=0)
                page_keys_ptr = keys_ptr + page * stride_page
                keys = tl.load(page_keys_ptr + lanes[:, None] * C + values[None, :])
                page_scales_ptr = key_scales_ptr + page * stride_scale_page
                key_scale = tl.load(page_scales_ptr + ROWS_PER_PAGE * C // 4 + lanes)
                product = tl.dot(keys, q_T)
                # x + |x| is 2 relu(x), exactly, in one instruction at full rate, unlike a maximum.
                product = (product + tl.abs(product)) * weights[None, :]
                score = tl.sum(tl.reshape(product, [ROWS_PER_PAGE, BLOCK_Q, BLOCK_I]), axis=2)
                score = score * key_scale[:, None]
                entry = tile * ROWS_PER_PAGE + lanes
                tl.store(
                    scores_ptr + score_row_Q[None, :] + entry[:, None],
                    score,
                    mask=(entry < visible)[:, None] & member_Q[None, :],
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
    if table.rows_per_page not in PAGE_ROWS:
        raise ValueError(f"pages must hold {PAGE_ROWS} keys, got {table.rows_per_page}")
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
    *,
    invariant: bool = False,
) -> Tensor:
    """[N,K] int32 slots of packed keys; grids depend on N, max_len and max_query alone.

    invariant: K is topk in every step; else no more than the longest sequence can fill.
    """
    num_tokens, heads, width = q_NIC.shape
    _check(q_NIC, key_pool, table, 2 * rotary_LR.shape[1], round_query)
    max_entries = tokens.max_len // RATIO
    columns = topk if invariant else min(topk, -(-max_entries // OUT_PAD) * OUT_PAD)
    out_NK = torch.empty(num_tokens, columns, dtype=torch.int32, device=q_NIC.device)
    if out_NK.numel() == 0:
        return out_NK
    if max_entries <= topk:
        no_scores = torch.empty(num_tokens, 0, dtype=torch.float32, device=q_NIC.device)
        select_topk(no_scores, out_NK, tokens, table, 0, topk, 0, RATIO)
        return out_NK

    block_i = max(16, triton.next_power_of_2(heads))
    prefill = tokens.max_query > UNDOABLE_TOKENS
    block_q = max(1, PREFILL_COLUMNS // block_i) if prefill else 1
    num_pages = triton.cdiv(max_entries, table.rows_per_page)
    row_length = num_pages * table.rows_per_page
    limit = PREFILL_SCORE_BYTES if prefill else MAX_SCORE_BYTES
    rows = min(num_tokens, max(block_q, limit // (4 * row_length) // block_q * block_q))
    scores_NE = torch.empty(rows, row_length, dtype=torch.float32, device=q_NIC.device)
    keys, key_scales = key_pool.view(torch.float8_e4m3fn), key_pool.view(torch.float32)
    for first_token in range(0, num_tokens, rows):
        num_rows = min(rows, num_tokens - first_token)
        groups = triton.cdiv(num_rows, block_q)
        programs = PREFILL_PROGRAMS if prefill else DECODE_PROGRAMS
        splits = max(1, min(programs // groups, num_pages))
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
            STAGES=STAGES,
            num_warps=4,
        )
        select_topk(
            scores_NE[:num_rows], out_NK, tokens, table, first_token, topk, max_entries, RATIO
        )
    return out_NK
