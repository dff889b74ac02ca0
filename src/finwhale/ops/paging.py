"""Where a step's tokens stand and where the rows of their sequences lie: what operators are given.

Legend: N tokens of the step, B sequences, P pages of the longest sequence, R rope dimensions.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Tokens of a block: where one ends, another sequence with the same beginning may go on from what is
# kept. Pages of every group hold a divisor of it.
BLOCK_TOKENS = 256

# GPU kernels plan a step with at most this many tokens of each sequence as a decode.
MAX_DECODE_QUERY = 4


def contiguous_rows(pool: Tensor) -> tuple[Tensor, int]:
    """A dense pool [rows, width] as contiguous rows [X, width] and a step: row r of the pool is
    row step * r; other layers' rows lie between. Kept on the pool, which every step reads.

    A cache's rows are a whole number of widths apart (models/protocol.py, PageLayout).
    """
    found: tuple[Tensor, int] | None = getattr(pool, "_contiguous_rows", None)
    if found is None:
        width = pool.shape[1]
        step, rest = divmod(pool.stride(0), width)
        assert rest == 0 and pool.stride(1) == 1
        shape = (len(pool) - 1) * step + 1, width
        found = torch.as_strided(pool, shape, (width, 1)), step
        setattr(pool, "_contiguous_rows", found)  # noqa: B010
    return found


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of each sequence in one group of the cache.

    Row r of sequence b lies at slot pages[b, r // rows_per_page - first[b]] * rows_per_page +
    r % rows_per_page of the group's pools.

    Attributes:
        pages: [B,P] int32 page numbers in order, 0 where there is none; rows may be strided.
        first: [B] int32: the number of the page that pages[b,0] is; window pages are given back
            from the front.
        rows_per_page: rows of one page.
    """

    pages: Tensor
    first: Tensor
    rows_per_page: int

    @cached_property
    def host_pages(self) -> Ints:
        """pages as a host array."""
        pages: Ints = self.pages.cpu().numpy().astype(np.int64)
        return pages

    @cached_property
    def host_first(self) -> Ints:
        """first as a host array."""
        first: Ints = self.first.cpu().numpy().astype(np.int64)
        return first

    def has_page(self, sequence: int, row: int) -> bool:
        """Whether a row of a sequence lies in a page; on the host."""
        number = row // self.rows_per_page - int(self.host_first[sequence])
        pages = self.host_pages
        return 0 <= number < pages.shape[1] and bool(pages[sequence, number])

    def slots(self, sequence: Ints, rows: Ints) -> Ints:
        """Slots of row numbers, which must lie in the sequences' pages; on the host."""
        page, offset = np.divmod(rows, self.rows_per_page)
        page -= self.host_first[sequence]
        page += sequence * self.host_pages.shape[1]
        slots: Ints = self.host_pages.take(page)
        slots *= self.rows_per_page
        slots += offset
        return slots


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a step: each sequence's are neighbours, at consecutive positions.

    Attributes:
        positions: [N] int64; -1: padding of a captured batch. Nothing is stored for it, it sees
            no row, and its results are finite and meaningless.
        sequence: [N] int32: the token's row in the page tables.
        query_start: [B+1] int32: offsets of the sequences among the tokens.
        max_len: on the host: no sequence is longer after this step (nor after any replay).
        max_query: on the host: no sequence has more tokens in the step; 1 for a pure decode.
        memo: what implementations derive from the step once and use in every layer.
    """

    positions: Tensor
    sequence: Tensor
    query_start: Tensor
    max_len: int
    max_query: int
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def host_positions(self) -> Ints:
        positions: Ints = self.positions.cpu().numpy()
        return positions

    @cached_property
    def host_sequence(self) -> Ints:
        sequence: Ints = self.sequence.cpu().numpy().astype(np.int64)
        return sequence

    @cached_property
    def host_query_start(self) -> list[int]:
        starts: list[int] = self.query_start.tolist()
        return starts

    def rotation(self, rotary_LR: Tensor) -> Tensor:
        """[N,R/2,2]: the rows of a rotary table at the tokens' positions, gathered once a step."""
        # The table is kept beside its rows, so that its id stays its own.
        key = ("rotation", id(rotary_LR))
        if key not in self.memo:
            rows = rotary_LR.index_select(0, self.positions.clamp(min=0))
            self.memo[key] = rotary_LR, rows
        gathered: Tensor = self.memo[key][1]
        return gathered
