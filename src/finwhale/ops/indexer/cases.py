"""The indexer: decodes and chunks in one step, entries from none to several blocks, ties.

Selections are compared exactly, because the scores are exact in any order of summation. They have
many ties. Queries, keys and weights are small integers, rope rotates by multiples of 90 degrees,
and the scale is a power of two. A rotated query is a vector of exact integer sums times one
constant, and after rounding to FP4 its values again have few bits.
"""

from collections.abc import Iterator

from finwhale.ops.case import (
    MODEL_TOLERANCE,
    Args,
    Chunks,
    Draw,
    ModelDraw,
    OpCase,
    OpSizes,
    entry_rows,
    num_tokens,
    step_tokens,
    strided,
    token_positions,
)
from finwhale.ops.indexer.layout import pack_keys, page_bytes
from finwhale.ops.rounding import is_power_of_two

ROWS_PER_PAGE = 64
SCALE = 2.0**-3
# Queries of -40 .. 40 reach every FP4 value, and heads have groups of different scales.
ROUNDED = 40
# Chunks as (start, end) in tokens, topk, heads, width, rope width.
STEPS: tuple[tuple[Chunks, int, int, int, int], ...] = (
    ((), 64, 16, 128, 64),
    (((2, 3),), 4, 2, 32, 8),
    (((0, 40),), 4, 2, 32, 32),
    (((299, 300),), 64, 16, 128, 64),
    (((299, 300), (20, 21), (600, 601)), 64, 16, 128, 64),
    (((700, 701), (0, 90), (531, 540), (1200, 1201)), 5, 3, 48, 16),
    (((1030, 1045),), 200, 4, 128, 64),
    (((0, 3), (4, 5)), 64, 4, 128, 64),
    (((254, 258), (1022, 1027), (255, 256)), 64, 4, 100, 50),
    (((254, 258), (1022, 1027), (255, 256)), 64, 4, 16, 8),
    (tuple((100 + 37 * i, 101 + 37 * i) for i in range(12)), 16, 2, 64, 64),
    # Verifications of 4 to 8 tokens.
    (((700, 706), (0, 5), (531, 538), (1200, 1208), (253, 257)), 64, 16, 128, 64),
)


def _select(
    chunks: Chunks, topk: int, heads: int, width: int, rope: int, round_query: bool
) -> OpCase:
    def args() -> Args:
        draw = Draw()
        tokens = step_tokens(chunks)
        N = len(tokens.positions)
        table, num_rows = draw.page_table(entry_rows(chunks, 4), ROWS_PER_PAGE)
        largest = ROUNDED if round_query else 1
        return (
            strided(draw.integers(largest + 1, N, heads, width, low=-largest).float()),
            strided(draw.integers(3, N, heads, low=-2).float()),
            draw.integers(2, num_rows, width, low=-1).float(),
            draw.quarter_turns(tokens.max_len, rope),
            tokens,
            table,
            topk,
            SCALE,
            round_query,
        )

    return OpCase(
        operator="select_entries",
        name=f"{chunks} {topk} {(heads, width, rope)}{' rounded' * round_query}",
        args=args,
        by_token=(0, 1, 4, 5),
    )


CASES = tuple(
    _select(*step, rounded)
    for step in STEPS
    for rounded in (False, True)
    if not rounded or is_power_of_two(step[3])
)


def key_bytes(s: OpSizes) -> float:
    """Bytes of an entry's key in packed pages."""
    return page_bytes(ROWS_PER_PAGE, s.index_head_dim) / ROWS_PER_PAGE


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    """Integers and quarter turns, as in CASES: the scores are exact in any order."""
    I, J, K = s.index_n_heads, s.index_head_dim, s.index_topk  # noqa: E741
    N = num_tokens(chunks)

    def args() -> Args:
        tokens = draw.tokens(chunks)
        table, num_rows = draw.page_table(entry_rows(chunks, 4), ROWS_PER_PAGE)
        keys = draw.integers(2, num_rows, J, low=-1).float()
        rotation = draw.quarter_turns(tokens.max_len, s.qk_rope_head_dim)
        return (
            draw.integers(4, N, I, J, low=-3).to(draw.dtype),
            draw.integers(3, N, I, low=-2).float(),
            pack_keys(keys, ROWS_PER_PAGE),
            rotation,
            tokens,
            table,
            K,
            2.0**-6,
            True,
        )

    scored = sum(end // 4 for _, end in chunks if end // 4 > K)
    entries = (token_positions(chunks) + 1) // 4
    yield OpCase(
        operator="select_entries",
        args=args,
        by_token=(0, 1, 4, 5),
        tolerance=MODEL_TOLERANCE,
        bytes=N * (2 * I * J + 4 * I + 4 * K) + scored * key_bytes(s),
        operations=float(entries[entries > K].sum()) * 2 * I * J,
    )
