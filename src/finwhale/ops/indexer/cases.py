"""The indexer: decodes and chunks in one step, entries from none to several blocks, ties.

Selections are compared exactly: scores here are small whole numbers, exact in any order of
summation and full of ties. Queries, keys and weights are whole too.
"""

from itertools import accumulate
from typing import Any

import torch

from finwhale.ops.case import Draw, OpCase
from finwhale.ops.indexer import IndexStep

# Chunks as (start, end) in tokens, topk, heads, width.
STEPS = (
    (((2, 3),), 4, 2, 32),
    (((0, 40),), 4, 2, 32),
    (((299, 300),), 64, 16, 128),
    (((299, 300), (20, 21), (600, 601)), 64, 16, 128),
    (((700, 701), (0, 90), (531, 540), (1200, 1201)), 5, 3, 48),
    (((1030, 1045),), 200, 4, 128),
    (((0, 3), (4, 5)), 64, 4, 128),
    (tuple((100 + 37 * i, 101 + 37 * i) for i in range(12)), 16, 2, 64),
)


def index_step(draw: Draw, chunks: tuple[tuple[int, int], ...], num_rows: int) -> IndexStep:
    """As the engine builds it, from random slots."""
    counts = [end // 4 for _, end in chunks]
    width = -(-max(counts) // 128) * 128
    slots = torch.full((len(chunks), width), -1)
    for row, count in enumerate(counts):
        slots[row, :count] = draw.distinct(num_rows, count)
    lengths = [end - start for start, end in chunks]
    positions = [t for start, end in chunks for t in range(start, end)]
    return IndexStep(
        query_start=tuple(accumulate(lengths, initial=0)),
        max_entries=tuple(counts),
        entry_slots=slots,
        num_entries=torch.tensor([(t + 1) // 4 for t in positions]),
        sequence=torch.arange(len(chunks)).repeat_interleave(torch.tensor(lengths)),
    )


def _select(chunks: tuple[tuple[int, int], ...], topk: int, heads: int, width: int) -> OpCase:
    def args() -> tuple[Any, ...]:
        draw = Draw()
        step = index_step(draw, chunks, 400)
        tokens = step.query_start[-1]
        return (
            draw.whole(2, tokens, heads, width, low=-1).float(),
            draw.whole(3, tokens, heads, low=-2).float(),
            draw.whole(2, 400, width, low=-1).float(),
            step,
            topk,
        )

    return OpCase(operator="select_entries", name=f"{chunks} {topk} {(heads, width)}", args=args)


def _prepare(N: int, heads: int, width: int, rope: int, rounded: bool) -> OpCase:
    def args() -> tuple[Any, ...]:
        draw = Draw()
        return draw.outliers(N, heads, width), draw.rotation(N, rope), rounded

    return OpCase(
        operator="prepare_index_query",
        name=f"{(N, heads, width, rope)}{' rounded' * rounded}",
        args=args,
        by_token=(0, 1),
        flips=0.005 if rounded else 0.0,
    )


CASES = (
    *(_select(*step) for step in STEPS),
    *(
        _prepare(*size, rounded)
        for size in ((0, 16, 128, 64), (1, 16, 128, 64), (7, 3, 130, 50), (9, 64, 128, 64))
        for rounded in (False, True)
    ),
)
