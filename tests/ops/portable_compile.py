"""Calls of a few portable kernels, which test_arch_compile.py compiles for other GPUs than SM90."""

from collections.abc import Callable

import torch

from finwhale.ops.attention import Selected, Window
from finwhale.ops.attention import layout as rows_layout
from finwhale.ops.attention.sparse_attention_triton import sparse_attention
from finwhale.ops.indexer import layout as keys_layout
from finwhale.ops.indexer.select_entries_triton import select_entries
from finwhale.ops.linear.linear_triton import linear

from .sm90_compile import e4m3, f32, meta, page_table, step_tokens


def call_linear() -> None:
    """An E4M3 GEMM of many tokens, and the kernel that rounds them before."""
    linear(meta(8192, 1024), e4m3(1024, 1024))


def call_attention() -> None:
    """Flash's attention over selected entries: the kernel that needs the most shared memory."""
    tokens, table = step_tokens(256, 2**20, 1), page_table(256, 64)
    pool = meta(1024, rows_layout.page_bytes(64, 512, 64), dtype=torch.uint8)
    sparse_attention(
        meta(256, 64, 512),
        f32(2**20, 32, 2),
        1e-6,
        tokens,
        Window(pool, table, 128),
        Selected(pool, meta(256, 512, dtype=torch.int32), 64),
        f32(64),
        512**-0.5,
        meta(256, 64, 512),
    )


def call_indexer() -> None:
    tokens, table = step_tokens(8, 2**20, 1), page_table(8, 64)
    pool = meta(1024, keys_layout.page_bytes(64, 128), dtype=torch.uint8)
    q, weights, rotary = meta(8, 64, 128), f32(8, 64), f32(2**20, 32, 2)
    select_entries(q, weights, pool, rotary, tokens, table, 512, 0.1, True)


CALLS: dict[str, Callable[[], None]] = {
    "linear": call_linear,
    "attention": call_attention,
    "indexer": call_indexer,
}
