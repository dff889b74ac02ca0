"""The lightning indexer: the contract.

Source: DeepSeek-V4 technical report, section 2.3.1. Legend: N tokens, I index heads, C
index_head_dim, K selected entries, R rope dimensions, L positions.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from finwhale.ops.paging import CacheRows, Tokens

RATIO = 4  # tokens of a C4 entry


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries that `prepare_index_queries` made for `select_entries` of the same table.

    values: [N,I,C]. factors: None or [N,I] float32. Their meaning depends on the table. The values
    may be the projected queries if no token sees more than topk entries with tokens.max_len.
    """

    values: Tensor
    factors: Tensor | None = None


class PrepareIndexQueries(Protocol):
    """Compute the part of `select_entries` that depends only on the queries.

    q <- rope(q). With round_query, q is also rotated by a Hadamard matrix and rounded to FP4, like
    the keys in the pool (rounding.rotate_to_fp4), and C is a power of two. The rotation alone would
    not change any dot product.
    """

    def __call__(
        self, q_NIC: Tensor, rotary_LR: Tensor, tokens: Tokens, topk: int, round_query: bool
    ) -> IndexQueries:
        """q [N,I,C] as projected, rows may be strided; rotary [L,R/2,2] float32."""


class SelectEntries(Protocol):
    """Select the topk visible entries with the highest score; the lowest index wins ties.

    score(n, e) = sum_i weights[n,i] * scale * relu(q[n,i] . key[e]) with prepared q;
    a token at position p sees the entries e < (p + 1) // 4.
    """

    def __call__(
        self,
        q_NIC: Tensor | IndexQueries,
        weights_NI: Tensor,
        keys: CacheRows,
        rotary_LR: Tensor,
        tokens: Tokens,
        topk: int,
        scale: float,
        round_query: bool,
    ) -> Tensor:
        """weights [N,I] float32 as projected, rows may be strided; keys dense [C] or packed
        (layout.py). q is as projected, or prepared with the same rotary table, tokens, topk
        and round_query.

        Returns slots [N,K] int32 in order of the entries' positions, filled with -1. K is topk, or
        less if no token can see topk entries with tokens.max_len.
        """
