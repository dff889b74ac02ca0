"""Unpacks the rows of prompts once for all tokens that read them, as a Triton kernel.

A packed row takes fewer bytes, but each program of attention that reads it converts 448 E4M3
values. The tokens of a prompt read the same rows: hundreds of programs read each of them. So this
kernel converts every row that a prompt may see, before attention, and attention copies them.

The kernel numbers the unpacked pages: those of the step's first prompt, then those of the second,
and so on. A sequence's pages are adjacent and in order. Sequences with fewer than LEAST_TOKENS in
the step, or with more than ROWS_PER_TOKEN rows for each of these, keep their packed rows. So do a
sequence that does not fit and all after it. Whether rows are unpacked changes no bit of attention.

Bytes of a row: 584 are read, 1024 written.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention.sparse_attention_triton import load_rows
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.paging import CacheRows, Tokens

LEAST_TOKENS, ROWS_PER_TOKEN = 256, 64
NOT_UNPACKED = tl.constexpr(-(2**30))
BLOCK_B = 128
HEAD_DIM = 512


@triton.jit(
    do_not_specialize=["B", "stride_pages"],
    do_not_specialize_on_alignment=["positions_ptr", "query_start_ptr", "pages_ptr", "first_ptr"],
)
def _unpack_kernel(
    positions_ptr,
    query_start_ptr,
    pages_ptr,
    first_ptr,
    pool_ptr,
    rows_ptr,
    page_ptr,
    copies_ptr,
    B,
    stride_pages,
    stride_pool,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Unpack one page. The first program also writes where each sequence has its pages."""
    C: tl.constexpr = 512
    NOPE: tl.constexpr = 448
    HALF: tl.constexpr = C // 2
    start_next(PDL)
    wait_for_last(PDL)
    own = tl.program_id(0)
    before, number, owner = 0, 0, -1
    for first_b in range(0, B, BLOCK_B):
        b = first_b + tl.arange(0, BLOCK_B)
        begin = tl.load(query_start_ptr + b, mask=b < B, other=0)
        end = tl.load(query_start_ptr + b + 1, mask=b < B, other=0)
        unpack = end - begin >= LEAST
        length = tl.load(positions_ptr + end - 1, mask=unpack, other=-1).to(tl.int32) + 1
        first_page = tl.zeros([BLOCK_B], tl.int32)
        if W > 0:
            position = tl.load(positions_ptr + begin, mask=unpack, other=0).to(tl.int32)
            first_page = tl.maximum(position - (W - 1), 0) // ROWS
        rows = length // RATIO
        unpack = unpack & (length > 0) & (rows - first_page * ROWS <= MOST * (end - begin))
        count = tl.where(unpack, tl.cdiv(rows, ROWS) - first_page, 0)
        stop = before + tl.cumsum(count)
        unpack = unpack & (stop <= tl.num_programs(0))
        # The unpacked page of page 0 of the sequence, if that were unpacked.
        page = tl.where(unpack, stop - count - first_page, NOT_UNPACKED)
        if own == 0:
            tl.store(page_ptr + b, page, mask=b < B)
        is_owner = unpack & (stop - count <= own) & (own < stop)
        owner = tl.maximum(owner, tl.max(tl.where(is_owner, b, -1)))
        number += tl.sum(tl.where(is_owner, own - page, 0))
        before += tl.sum(count)
    if owner >= 0:
        pages_ptr += tl.cast(owner, tl.int64) * stride_pages
        source = tl.load(pages_ptr + number - tl.load(first_ptr + owner)).to(tl.int64)
        if copies_ptr is not None:
            tl.store(copies_ptr + source, own)
        source_ptr = pool_ptr + source * stride_pool
        row = tl.arange(0, ROWS)
        word_ptr = (source_ptr + ROWS * 576 + row * 8).to(tl.pointer_type(tl.int64))
        word = tl.load(word_ptr)
        target_ptr = rows_ptr + (own.to(tl.int64) * ROWS + row[:, None]) * C
        for first in tl.static_range(0, C, HALF):
            x = load_rows(source_ptr + row * 576, word, row >= 0, first, NOPE, C, ROWS, HALF, ASM)
            tl.store(target_ptr + first + tl.arange(0, HALF)[None, :], x)


@dataclass(frozen=True, slots=True)
class UnpackedRows:
    """The rows of prompts in a form that MMAs take: bfloat16, nope times 2^-64.

    Attributes:
        rows: [pages * rows_per_page, 512] bfloat16.
        page: [B] int32: row r of a sequence is in page page[b] + r // rows_per_page. NOT_UNPACKED:
            its rows are not unpacked.
        copies: int32 by page of the pool: its unpacked page, if there is one; None: not needed.
    """

    rows: Tensor
    page: Tensor
    copies: Tensor | None


def has_prompts(tokens: Tokens) -> bool:
    """Whether a step may have rows to unpack, by its bounds."""
    return min(len(tokens.positions), tokens.max_query) >= LEAST_TOKENS


def unpack_rows(
    source: CacheRows, tokens: Tokens, *, window: int, ratio: int, selected: bool, inline_asm: bool,
    early_launch: bool,
) -> UnpackedRows:  # fmt: skip
    """Unpack the rows that the prompts of a step see.

    Args:
        window: size of the window; 0: the rows are entries.
        ratio: tokens of a row.
        selected: attention finds the rows by their slots, so it needs `copies`.
    """
    pool, table, num_tokens = source.pool, source.table, len(tokens.positions)
    size, device = table.rows_per_page, pool.device
    num_seqs = len(tokens.query_start) - 1
    # A sequence may fill its last page, and its first one of a window, with one row each.
    prompts = num_tokens // LEAST_TOKENS
    if window:
        most = triton.cdiv(num_tokens + prompts * window, size) + 2 * prompts
    else:
        most = triton.cdiv(tokens.max_len + 8 * num_tokens, ratio * size) + prompts
    unpacked = UnpackedRows(
        rows=torch.empty(most * size, HEAD_DIM, dtype=torch.bfloat16, device=device),
        page=torch.empty(num_seqs, dtype=torch.int32, device=device),
        copies=torch.empty(len(pool), dtype=torch.int32, device=device) if selected else None,
    )
    _unpack_kernel[(most,)](
        tokens.positions,
        tokens.query_start,
        table.pages,
        table.first,
        pool,
        unpacked.rows,
        unpacked.page,
        unpacked.copies,
        num_seqs,
        table.pages.stride(0),
        pool.stride(0),
        W=window,
        RATIO=ratio,
        ROWS=size,
        LEAST=LEAST_TOKENS,
        MOST=ROWS_PER_TOKEN,
        BLOCK_B=BLOCK_B,
        ASM=inline_asm,
        num_warps=4 if size >= 16 else 1,
        **launch_options(early_launch),
    )
    return unpacked
