"""Cases of compressors: steps with and without complete entries, first windows, every rounding."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from finwhale.ops.attention.cases import ENTRY_ROWS, row_bytes
from finwhale.ops.case import (
    E4M3_FLIP,
    FP4_FLIP,
    Args,
    Chunks,
    Draw,
    ModelDraw,
    OpCase,
    OpSizes,
    entry_rows,
    num_tokens,
)
from finwhale.ops.compressor import STATE_KEPT, CompressorWeight, CompressPart, Rounding
from finwhale.ops.indexer.cases import key_bytes
from finwhale.ops.paging import BLOCK_TOKENS
from finwhale.ops.rounding import is_power_of_two

EPS = 1e-6
MAX_VERIFY_TOKENS = 4
ROUNDINGS: tuple[Rounding, ...] = ("none", "nope", "key")
# Rows in a page of the state and of the entries.
PAGES = {4: (8, ENTRY_ROWS[4]), 128: (128, ENTRY_ROWS[128])}
# ratio, tokens of each chunk as (start, end), widths of the parts' entries, rope width.
STEPS: tuple[tuple[Literal[4, 128], Chunks, tuple[int, ...], int], ...] = (
    (4, (), (128,), 64),
    (4, ((0, 1),), (128,), 64),
    (4, ((3, 4),), (128,), 64),
    (4, ((0, 4), (7, 8), (5, 7)), (128, 64), 64),
    (4, ((0, 41), (9, 12)), (130, 64), 34),
    (4, ((8, 12),), (512, 128), 64),
    (4, ((7, 8), (511, 512), (255, 256), (14, 15), (259, 260)), (128, 128), 64),
    (4, ((240, 530), (254, 259), (253, 257)), (64, 32), 16),
    (128, ((126, 127),), (128,), 64),
    (128, ((127, 128),), (128,), 64),
    (128, ((0, 130), (255, 256), (100, 101)), (48,), 16),
    (128, ((200, 384),), (512,), 64),
    (128, ((511, 512), (130, 131), (767, 769)), (64,), 32),
    # Steps that may verify drafts: the sequence may continue after any of its tokens.
    (4, ((254, 258), (7, 10), (11, 13), (5, 10)), (128,), 64),
    (128, ((126, 130), (127, 129), (125, 130), (128, 131)), (64,), 32),
)
# Steps with a draft head that makes 5 or 7 drafts: max_verify_tokens, then the fields of STEPS.
VERIFICATIONS: tuple[tuple[int, Literal[4, 128], Chunks, tuple[int, ...], int], ...] = (
    (6, 4, ((253, 259), (6, 11), (510, 516), (3, 4), (0, 6)), (128, 64), 64),
    (8, 4, ((250, 258), (5, 12), (7, 15), (1, 9), (512, 517)), (512, 128), 64),
    (6, 128, ((124, 130), (127, 132), (255, 261), (379, 384), (122, 128)), (64,), 32),
    (8, 128, ((120, 128), (127, 135), (252, 258), (510, 517)), (512,), 64),
)


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
            draw.normal(num_states, share * width, scale=scale),
            pool(width, rounding),
            rounding,
        )
        for part, width, rounding in zip(
            torch.split(projected, [*columns, columns_behind], 1), widths, roundings, strict=False
        )
    )
    rotation = draw.rotation(tokens.max_len, rope)
    return parts, tokens, rotation, EPS, states, entries, max_verify_tokens


def _case(
    ratio: Literal[4, 128],
    chunks: Chunks,
    widths: tuple[int, ...],
    rope: int,
    rounding: Rounding,
    max_verify_tokens: int = MAX_VERIFY_TOKENS,
) -> OpCase:
    # A layer's second part holds the indexer's keys.
    roundings: tuple[Rounding, ...] = (rounding, "none" if rounding == "none" else "key")
    return OpCase(
        operator="compress",
        name=f"{ratio} {chunks} {(*widths, rope)} {rounding}",
        args=lambda: compress_args(
            Draw(), ratio, chunks, widths, rope, roundings, max_verify_tokens=max_verify_tokens
        ),
        written=(0,),
        flips=0.0 if rounding == "none" else 0.005,
        flip=FP4_FLIP if "key" in roundings[: len(widths)] else E4M3_FLIP,
    )


CASES = tuple(
    _case(*step, rounding)
    for step in STEPS
    for rounding in ROUNDINGS
    if rounding != "key" or is_power_of_two(step[2][0])
) + tuple(
    _case(ratio, chunks, widths, rope, "nope", most)
    for most, ratio, chunks, widths, rope in VERIFICATIONS
)


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
            written=(0,),
            tolerance=1e-4,
            flips=0.01,
            flip=FP4_FLIP if ratio == 4 else E4M3_FLIP,
            bytes=(num_tokens(chunks) + found + left) * columns * 4 + completed * size,
        )

    widths = s.head_dim, s.index_head_dim
    yield case(4, widths, s.index_n_heads, row_bytes(s) + key_bytes(s))
    yield case(128, widths[:1], 0, row_bytes(s))
