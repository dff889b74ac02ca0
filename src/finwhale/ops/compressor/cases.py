"""Compressors: steps with and without complete entries, first windows, history, every rounding."""

from typing import Literal

import torch

from finwhale.ops.case import (
    E4M3_FLIP,
    FP4_FLIP,
    Args,
    Chunks,
    Draw,
    OpCase,
    entry_rows,
    step_tokens,
)
from finwhale.ops.compressor import STATE_KEPT, CompressorWeight, CompressPart, Rounding
from finwhale.ops.paging import BLOCK_TOKENS
from finwhale.ops.rounding import is_power_of_two

EPS = 1e-6
MAX_VERIFY_TOKENS = 4
ROUNDINGS: tuple[Rounding, ...] = ("none", "nope", "key")
PAGES = {4: (8, 64), 128: (128, 2)}  # rows a page of the state and of the entries
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


def first_kept(count: int, ratio: int) -> int:
    """The first position whose row is kept once `count` tokens are read."""
    align, before = STATE_KEPT[ratio]
    return max(0, count // align * align - before)


def settled(start: int, end: int) -> int:
    """Where a sequence continues after a step at the earliest: drafts may be wrong."""
    return end if end - start > MAX_VERIFY_TOKENS else start + 1


def state_rows(chunks: Chunks, ratio: int) -> list[list[range]]:
    """The rows of the state that each chunk finds and those that it leaves.

    Of the blocks that end within a chunk, every second has a page for what is kept there.
    """
    return [
        [
            range(first_kept(start, ratio), start),
            range(max(start, first_kept(settled(start, end), ratio)), end),
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
) -> Args:
    """The arguments; all parts are views of one projection, with other columns behind them."""
    tokens = step_tokens(chunks)
    mixed, share = (8, 4) if ratio == 4 else (128, 2)
    columns = [share * width for width in widths]
    projected = draw.normal(len(tokens.positions), sum(columns) + 16, scale=2.0)
    states, num_states = draw.page_table(state_rows(chunks, ratio), PAGES[ratio][0])
    entries, num_entries = draw.page_table(entry_rows(chunks, ratio), PAGES[ratio][1])
    parts = tuple(
        CompressPart(
            part,
            CompressorWeight(draw.normal(mixed, width), draw.normal(width), ratio),
            draw.normal(num_states, share * width, scale=2.0),
            draw.normal(num_entries, width),
            rounding,
        )
        for part, width, rounding in zip(
            torch.split(projected, [*columns, 16], 1), widths, roundings, strict=False
        )
    )
    rotation = draw.rotation(tokens.max_len, rope)
    return parts, tokens, rotation, EPS, states, entries, MAX_VERIFY_TOKENS


def _case(
    ratio: Literal[4, 128], chunks: Chunks, widths: tuple[int, ...], rope: int, rounding: Rounding
) -> OpCase:
    # A layer's second part holds the indexer's keys.
    roundings: tuple[Rounding, ...] = (rounding, "none" if rounding == "none" else "key")
    return OpCase(
        operator="compress",
        name=f"{ratio} {chunks} {(*widths, rope)} {rounding}",
        args=lambda: compress_args(Draw(), ratio, chunks, widths, rope, roundings),
        written=(0,),
        flips=0.0 if rounding == "none" else 0.005,
        flip=FP4_FLIP if "key" in roundings[: len(widths)] else E4M3_FLIP,
    )


CASES = tuple(
    _case(*step, rounding)
    for step in STEPS
    for rounding in ROUNDINGS
    if rounding != "key" or is_power_of_two(step[2][0])
)
