"""Calls of compressors at the models' sizes, and what they share with smaller cases."""

from collections.abc import Iterator
from typing import Literal

import torch
from tests.support.model_cases.attention import ENTRY_ROWS, row_bytes
from tests.support.model_cases.indexer import key_bytes
from tests.support.op_case import (
    Args,
    Chunks,
    Draw,
    ModelDraw,
    OpCase,
    OpSizes,
    entry_rows,
    num_tokens,
)
from torch import Tensor

from finwhale.ops.compressor import STATE_KEPT, CompressorWeight, CompressPart, Rounding
from finwhale.ops.paging import BLOCK_TOKENS, CacheRows

EPS = 1e-6
MAX_VERIFY_TOKENS = 4
# Rows in a page of the state and of the entries.
PAGES = {4: (8, ENTRY_ROWS[4]), 128: (128, ENTRY_ROWS[128])}


def first_kept(count: int, ratio: int) -> int:
    """The first position whose row the cache keeps after `count` tokens."""
    align, before = STATE_KEPT[ratio]
    return max(0, count // align * align - before)


def settled(start: int, end: int, max_verify_tokens: int) -> int:
    """The earliest position at which a sequence may continue after a step that rejects drafts."""
    return end if end - start > max_verify_tokens else start + 1


def state_rows(
    chunks: Chunks, ratio: int, max_verify_tokens: int = MAX_VERIFY_TOKENS
) -> list[list[range]]:
    """For each chunk, the state rows that exist before it, and the rows that the step must keep.

    Every second block that ends within a chunk has a page for its last rows.
    """
    return [
        [
            range(first_kept(start, ratio), start),
            range(max(start, first_kept(settled(start, end, max_verify_tokens), ratio)), end),
            *(
                range(max(start, block_end - 4), block_end)
                for block_end in range(2 * BLOCK_TOKENS, end, 2 * BLOCK_TOKENS)
                if ratio == 4 and block_end > start
            ),
        ]
        for start, end in chunks
    ]


def compress_args(
    draw: Draw,
    ratio: Literal[4, 128],
    chunks: Chunks,
    widths: tuple[int, ...],
    rope: int,
    roundings: tuple[Rounding, ...],
    *,
    columns_behind: int = 16,
    scale: float = 2.0,
    max_verify_tokens: int = MAX_VERIFY_TOKENS,
) -> Args:
    """Arguments of `compress`. The parts are views of one projection, which has more columns."""
    tokens = draw.tokens(chunks)
    mixed, share = (8, 4) if ratio == 4 else (128, 2)
    columns = [share * width for width in widths]
    projected = draw.normal(len(tokens.positions), sum(columns) + columns_behind, scale=scale)
    kept = state_rows(chunks, ratio, max_verify_tokens)
    states, num_states = draw.page_table(kept, PAGES[ratio][0])
    entries, num_entries = draw.page_table(entry_rows(chunks, ratio), PAGES[ratio][1])

    def pool(width: int, rounding: Rounding) -> Tensor:
        if rounding == "key":
            return draw.keys(num_entries, PAGES[ratio][1], width)
        return draw.rows(num_entries, PAGES[ratio][1], width, rope)

    parts = tuple(
        CompressPart(
            part,
            CompressorWeight(draw.normal(mixed, width), draw.normal(width), ratio),
            CacheRows(draw.normal(num_states, share * width, scale=scale), states),
            CacheRows(pool(width, rounding), entries),
            rounding,
        )
        for part, width, rounding in zip(
            torch.split(projected, [*columns, columns_behind], 1), widths, roundings, strict=False
        )
    )
    rotation = draw.rotation(tokens.max_len, rope)
    return parts, tokens, rotation, EPS, max_verify_tokens


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    """A C4 layer, whose second part has the index keys, and a C128 layer."""

    def case(ratio: Literal[4, 128], widths: tuple[int, ...], behind: int, size: float) -> OpCase:
        def args() -> Args:
            roundings: tuple[Rounding, ...] = ("nope", "key")
            rope = s.qk_rope_head_dim
            return compress_args(
                draw, ratio, chunks, widths, rope, roundings, columns_behind=behind, scale=1.0
            )

        # Count the kept rows that are read and written, and the entries that complete.
        found = left = completed = 0
        for (start, end), (before, *after) in zip(chunks, state_rows(chunks, ratio), strict=True):
            completes = end // ratio - start // ratio
            found += len(before) if completes else 0
            left += sum(map(len, after))
            completed += completes
        columns = (4 if ratio == 4 else 2) * sum(widths)
        return OpCase(
            operator="compress",
            name=f"C{ratio}",
            args=args,
            bytes=(num_tokens(chunks) + found + left) * columns * 4 + completed * size,
        )

    widths = s.head_dim, s.index_head_dim
    yield case(4, widths, s.index_n_heads, row_bytes(s) + key_bytes(s))
    yield case(128, widths[:1], 0, row_bytes(s))
