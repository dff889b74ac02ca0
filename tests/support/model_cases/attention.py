"""Calls of attention at the models' sizes, and what they share with smaller cases."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from tests.support.op_case import (
    Args,
    Chunks,
    Draw,
    ModelDraw,
    OpCase,
    OpSizes,
    entry_rows,
    num_tokens,
    rounded_heads,
    token_positions,
    window_rows,
)
from torch import Tensor

from finwhale.bench.floors import BF16_RATE
from finwhale.ops.attention import AllEntries, RowForm, TopkEntries, Window
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.paging import CacheRows, PageTable, Tokens

EPS = 1e-6
WINDOW = 128
ENTRY_ROWS = {4: 64, 128: 2}  # of a page


def prepare_args(
    draw: Draw,
    chunks: Chunks,
    fused: Callable[[], Tensor],
    widths: tuple[int, int, int],
    rows_per_page: int,
    round_nope: bool,
) -> Args:
    Q, C, R = widths
    tokens = draw.tokens(chunks)
    table, num_rows = draw.page_table(window_rows(chunks, WINDOW), rows_per_page)
    q, kv = fused().split((Q, C), 1)
    q_norm, kv_norm, rotation = draw.normal(Q), draw.normal(C), draw.rotation(tokens.max_len, R)
    pool = draw.rows(num_rows, rows_per_page, C, R)
    form = RowForm(kv_norm, rotation, EPS, round_nope)
    return q, q_norm, kv, form, tokens, CacheRows(pool, table)


def row_bytes(s: OpSizes) -> float:
    """Bytes of a row in packed pages."""
    return RopeRow(s.head_dim, s.qk_rope_head_dim).page_bytes(64) / 64


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    yield _model_prepare(s, draw, chunks, with_query=True)
    yield _model_prepare(s, draw, chunks, with_query=False)
    yield _model_attend(s, draw, chunks, "window", 0)
    yield _model_attend(s, draw, chunks, "C4", 4)
    yield _model_attend(s, draw, chunks, "C128", 128)
    yield _model_attend(s, draw, chunks, "C128 rounded", 128, rounded=True)


def _model_prepare(s: OpSizes, draw: ModelDraw, chunks: Chunks, *, with_query: bool) -> OpCase:
    N, C, Q, R = num_tokens(chunks), s.head_dim, s.q_lora_rank, s.qk_rope_head_dim

    def args() -> Args:
        fused = partial(draw.activation, N, Q + C)
        found = prepare_args(draw, chunks, fused, (Q, C, R), 64, True)
        return found if with_query else found[2:]

    return OpCase(
        operator="prepare_qkv" if with_query else "store_window_rows",
        args=args,
        bytes=N * (2 * C + row_bytes(s) + 4 * R) + 4 * C + with_query * 4 * Q * (N + 1),
    )


def _model_attend(
    s: OpSizes, draw: ModelDraw, chunks: Chunks, name: str, ratio: int, rounded: bool = False
) -> OpCase:
    A, C, R, K = s.num_attention_heads, s.head_dim, s.qk_rope_head_dim, s.index_topk
    N = num_tokens(chunks)

    def args() -> Args:
        tokens = draw.tokens(chunks)
        table, num_rows = draw.page_table(window_rows(chunks, WINDOW), 64)
        out: tuple[Tensor, ...]
        if rounded:
            out = rounded_heads(N, A, C, draw.device)
        else:
            out = (torch.full((N, A, C), torch.nan, dtype=draw.dtype, device=draw.device),)
        fused = draw.activation(N, A * C + s.index_n_heads * s.index_head_dim)
        window = Window(CacheRows(draw.rows(num_rows, 64, C, R), table), WINDOW)
        return (
            fused[:, : A * C].unflatten(1, (A, C)),
            draw.rotation(tokens.max_len, R),
            EPS,
            tokens,
            window,
            entries(tokens),
            draw.normal(A),
            C**-0.5 * 3,
            *out,
        )

    def entries(tokens: Tokens) -> TopkEntries | AllEntries | None:
        if not ratio:
            return None
        table, num_rows = draw.page_table(entry_rows(chunks, ratio), ENTRY_ROWS[ratio])
        rows = CacheRows(draw.rows(num_rows, ENTRY_ROWS[ratio], C, R), table)
        if ratio == 128:
            return AllEntries(rows, 128)
        return TopkEntries(rows, _spread_slots(tokens, table, K).to(draw.device))

    read = token_positions(chunks) + 1
    seen = np.minimum(read, WINDOW)
    rows = sum(end - max(0, start - WINDOW + 1) for start, end in chunks)
    if ratio:
        widest = K if ratio == 4 else 2**62
        seen = seen + np.minimum(read // ratio, widest)
        rows += sum(min(end // ratio, (end - start) * widest) for start, end in chunks)
    written = 1 + 4 / 128 if rounded else 2
    return OpCase(
        operator="sparse_attention",
        name=name,
        args=args,
        bytes=N * (2 + written) * A * C + rows * row_bytes(s),
        operations=float(seen.sum()) * A * C * 4,
        rate=BF16_RATE,
    )


def _spread_slots(tokens: Tokens, table: PageTable, topk: int) -> Tensor:
    """[N,topk] int32: slots of evenly spread entries that each token sees; all, if at most topk."""
    seen = ((tokens.host_positions + 1) // 4)[:, None]
    k_index = np.arange(topk)
    chosen = np.where(seen > topk, k_index * seen // topk, k_index)
    visible = chosen < seen
    slots = table.slots(tokens.host_sequence[:, None], np.where(visible, chosen, 0))
    return torch.from_numpy(np.where(visible, slots, -1).astype(np.int32))
