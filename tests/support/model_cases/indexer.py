"""Calls of the indexer at the models' sizes."""

from collections.abc import Iterator

from tests.support import op_case as case
from tests.support.packed_pools import pack_keys

from finwhale.ops.indexer.layout import IndexKey
from finwhale.ops.paging import CacheRows

ROWS_PER_PAGE = 64


def key_bytes(s: case.OpSizes) -> float:
    """Bytes of an entry's key in packed pages."""
    return IndexKey(s.index_head_dim).page_bytes(ROWS_PER_PAGE) / ROWS_PER_PAGE


def model_cases(
    s: case.OpSizes, draw: case.ModelDraw, chunks: case.Chunks
) -> Iterator[case.OpCase]:
    """Integers and quarter turns, as in the small cases: the scores are exact in any order."""
    I, J, K = s.index_n_heads, s.index_head_dim, s.index_topk  # noqa: E741
    N = case.num_tokens(chunks)

    def args() -> case.Args:
        tokens = draw.tokens(chunks)
        table, num_rows = draw.page_table(case.entry_rows(chunks, 4), ROWS_PER_PAGE)
        keys = draw.integers(2, num_rows, J, low=-1).float()
        rotation = draw.quarter_turns(tokens.max_len, s.qk_rope_head_dim)
        return (
            draw.integers(4, N, I, J, low=-3).to(draw.dtype),
            draw.integers(3, N, I, low=-2).float(),
            CacheRows(pack_keys(keys, ROWS_PER_PAGE), table),
            rotation,
            tokens,
            K,
            2.0**-6,
            True,
        )

    scored = sum(end // 4 for _, end in chunks if end // 4 > K)
    entries = (case.token_positions(chunks) + 1) // 4
    yield case.OpCase(
        operator="select_entries",
        args=args,
        bytes=N * (2 * I * J + 4 * I + 4 * K) + scored * key_bytes(s),
        operations=float(entries[entries > K].sum()) * 2 * I * J,
    )
