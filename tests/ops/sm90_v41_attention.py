"""Calls of DeepSeek-V4.1's records and attention, which sm90_compile.py compiles for SM90."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from finwhale.ops.attention import TopkEntries, Window
from finwhale.ops.deepseek_v41.attention_triton import sparse_attention
from finwhale.ops.deepseek_v41.layout import ScaledRow, entry, index_key, window_row
from finwhale.ops.deepseek_v41.merge_pairs_triton import merge_pairs
from finwhale.ops.deepseek_v41.store_rows_triton import store_rows
from finwhale.ops.paging import CacheRows

from .sm90_compile import f32, meta, page_table, step_tokens

C, J = 512, 128


def pool(record: ScaledRow, N: int, rows_per_page: int) -> CacheRows:
    pages = meta(1024, record.page_bytes(rows_per_page), dtype=torch.uint8)
    return CacheRows(pages, page_table(N, rows_per_page))


def call_rows(N: int, max_query: int) -> None:
    """What writes rows and states, for N tokens."""
    tokens, rotary, early = step_tokens(N, 2**20, max_query), f32(2**20, 32, 2), True
    window = pool(window_row(C), N, 64)
    store_rows(meta(N, C), window, rotary, tokens, 1, "e4m3", early_launch=early)
    for ratio, make in ((1, meta), (2, f32)):
        latents, entries = make(N, C), pool(entry(C), N, 256 // ratio)
        keys = CacheRows(pool(index_key(J), N, 256 // ratio).pool, entries.table)
        store_rows(latents, entries, rotary, tokens, ratio, "fp4", early_launch=early)
        store_rows(make(N, J), keys, rotary, tokens, ratio, "key", early_launch=early)
    state = CacheRows(f32(1024, 2 * C), page_table(N, 8))
    merge_pairs(f32(N, 2 * C), f32(C), state, tokens, 1e-20, 6, early_launch=early)


def call_attention(heads: int, N: int, *, replays: bool = False) -> None:
    """Call attention for N tokens, as layers of every kind do."""
    tokens, rotary = step_tokens(N, 2**20, 1), f32(2**20, 32, 2)
    if replays:
        tokens = replace(tokens, windows_begin=meta(N, dtype=torch.int64))
    window = pool(window_row(C), N, 64)
    for entries in (
        None,
        TopkEntries(pool(entry(C), N, 128), meta(N, 512, dtype=torch.int32)),
        TopkEntries(window, meta(N, 5, dtype=torch.int32)),
    ):
        sparse_attention(
            *(meta(N, heads, C), rotary, None, tokens, Window(window, 128), entries),
            *(f32(heads), C**-0.5, meta(N, heads, C)),
            early_launch=True,
            inline_asm=True,
        )


CALLS: dict[str, Callable[[], None]] = {
    **{f"v41-rows-{N}": partial(call_rows, N, 1) for N in (1, 8192)},
    **{
        f"v41-attention-{heads}-{N}": partial(call_attention, heads, N)
        for heads, N in ((64, 1), (64, 32), (64, 8192), (32, 8192), (8, 8), (8, 8192))
    },
    "v41-attention-replay": partial(call_attention, 64, 8192, replays=True),
}
