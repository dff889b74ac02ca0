"""Calls of DeepSeek-V4.1's selection, which sm90_compile.py compiles for SM90."""

from collections.abc import Callable
from functools import partial

import torch

from finwhale.ops.deepseek_v41 import IndexRule
from finwhale.ops.deepseek_v41.layout import index_key
from finwhale.ops.deepseek_v41.select_triton import select_shared
from finwhale.ops.indexer.topk_long_triton import NUM_WARPS
from finwhale.ops.paging import CacheRows

from .sm90_compile import f32, meta, page_table, step_tokens


def call_select(
    ratio: int, keeps: int, blocks: int, N: int, max_len: int, max_query: int, asm: bool = True
) -> None:
    """keeps: of the candidate source; blocks: columns of the blocks to select from."""
    page = 256 // ratio
    pool = meta(1024, index_key(128).page_bytes(page), dtype=torch.uint8)
    rule = IndexRule(ratio=ratio, topk=512, scale=0.1, round_query=True, keeps=keeps)
    select_shared(
        *(meta(N, 32, 128), f32(N, 32), CacheRows(pool, page_table(N, page)), f32(2**20, 32, 2)),
        *(step_tokens(N, max_len, max_query), rule),
        meta(N, blocks, dtype=torch.int32) if blocks else None,
        inline_asm=asm,
        early_launch=True,
        long_warps=NUM_WARPS,
    )


KINDS = {"pairs": (2, 0, 0), "source": (1, 2048, 0), "within": (1, 0, 2048)}
STEPS = {"decode": (8, 2**20, 1), "prefill": (8192, 2**20, 8192), "short": (8, 8192, 1)}
FAR_STEPS = {"many": (2**22, 2**15, 2**22), "long": (64, 2**22, 1)}


def calls(steps: dict[str, tuple[int, int, int]]) -> dict[str, Callable[[], None]]:
    return {
        f"select-{kind}-{name}": partial(call_select, *sizes, *step)
        for kind, sizes in KINDS.items()
        for name, step in steps.items()
    }


FAR = calls(FAR_STEPS)  # for sm90_far.py
CALLS = calls(STEPS)
