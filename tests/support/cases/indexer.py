"""The indexer: decodes and chunks in one step, entries from none to several blocks, ties.

Selections are compared exactly, because the scores are exact in any order of summation. They have
many ties. Queries, keys and weights are small integers, rope rotates by multiples of 90 degrees,
and the scale is a power of two. A rotated query is a vector of exact integer sums times one
constant, and after rounding to FP4 its values again have few bits.
"""

from tests.support.checked_case import CheckedCase
from tests.support.model_cases.indexer import ROWS_PER_PAGE
from tests.support.op_arguments import strided
from tests.support.op_case import Args, Chunks, Draw, entry_rows, step_tokens

from finwhale.ops.paging import CacheRows
from finwhale.ops.rounding import is_power_of_two

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
) -> CheckedCase:
    def args() -> Args:
        draw = Draw()
        tokens = step_tokens(chunks)
        N = len(tokens.positions)
        table, num_rows = draw.page_table(entry_rows(chunks, 4), ROWS_PER_PAGE)
        largest = ROUNDED if round_query else 1
        return (
            strided(draw.integers(largest + 1, N, heads, width, low=-largest).float()),
            strided(draw.integers(3, N, heads, low=-2).float()),
            CacheRows(draw.integers(2, num_rows, width, low=-1).float(), table),
            draw.quarter_turns(tokens.max_len, rope),
            tokens,
            topk,
            SCALE,
            round_query,
        )

    return CheckedCase(
        operator="select_entries",
        name=f"{chunks} {topk} {(heads, width, rope)}{' rounded' * round_query}",
        args=args,
        by_token=(0, 1, 2, 4),
    )


CASES = tuple(
    _select(*step, rounded)
    for step in STEPS
    for rounded in (False, True)
    if not rounded or is_power_of_two(step[3])
)
