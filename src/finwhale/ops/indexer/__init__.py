"""The lightning indexer: the contracts.

Source: DeepSeek-V4 technical report, section 2.3.1. Legend: N tokens, B sequences, I index heads,
C index_head_dim, E entries of the longest sequence, K selected entries, P rows of a pool.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class IndexStep:
    """Where each sequence's entries lie; shared by all layers with an indexer.

    Attributes:
        query_start: B+1 token offsets of the sequences in the batch, on the host.
        max_entries: B: the entries that each sequence's last token sees, on the host.
        entry_slots: [B,E] int64: slots of the sequences' entries in order; -1 past the end.
        num_entries: [N] int64: entries that each token sees.
        sequence: [N] int64: each token's row in entry_slots.
    """

    query_start: tuple[int, ...]
    max_entries: tuple[int, ...]
    entry_slots: Tensor
    num_entries: Tensor
    sequence: Tensor


class PrepareIndexQuery(Protocol):
    """Rope on each head's last R dimensions, then optionally E4M3 with one scale a head."""

    def __call__(self, q_NIC: Tensor, rotation_NR: Tensor, round_query: bool) -> Tensor:
        """q [N,I,C], rotation [N,R/2,2] float32 (cos, sin). Returns [N,I,C]."""
        ...


class SelectEntries(Protocol):
    """The topk visible entries with the highest score, ties to the lowest index.

    score(n, e) = sum_i weights[n,i] * relu(q[n,i] . key[e]).
    """

    def __call__(
        self, q_NIC: Tensor, weights_NI: Tensor, key_rows_PC: Tensor, step: IndexStep, topk: int
    ) -> Tensor:
        """q [N,I,C], weights [N,I] float32 (scaled already), key_rows [P,C].

        Returns slots [N,K] int64, in order of the entries' positions, -1 where there are fewer;
        K is topk, or less where no token of the batch sees that many.
        """
        ...
