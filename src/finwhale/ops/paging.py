"""The positions of a step's tokens and the page tables of their sequences: operators' arguments.

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

# Tokens of a block. At the end of a block, another sequence with the same prefix can resume from
# cached state. The number of tokens of a page divides BLOCK_TOKENS in every group.
BLOCK_TOKENS = 256

# A step is a decode for the GPU kernels if no sequence has more tokens in it than this.
MAX_DECODE_QUERY = 4


def contiguous_rows(pool: Tensor) -> tuple[Tensor, int]:
    """A dense pool [rows, width] as contiguous rows [X, width] and a step.

    Row r of the pool is row step * r of the result; rows of other layers lie between. The stride of
    a cache's rows is a multiple of their width (models/protocol.py, PageLayout). The result is
    stored on the pool, because every step reads it.
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
        pages: [B,P] int32 pages in order, 0 for no page; rows may be strided.
        first: [B] int32: the page number of pages[b,0]; old window pages are freed.
        rows_per_page: rows of one page.
    """

    pages: Tensor
    first: Tensor
    rows_per_page: int

    @cached_property
    def host_pages(self) -> Ints:
        """`pages` as a host array."""
        pages: Ints = self.pages.cpu().numpy().astype(np.int64)
        return pages

    @cached_property
    def host_first(self) -> Ints:
        """`first` as a host array."""
        first: Ints = self.first.cpu().numpy().astype(np.int64)
        return first

    def has_page(self, sequence: int, row: int) -> bool:
        """Whether the sequence has a page with this row; computed on the host."""
        number = row // self.rows_per_page - int(self.host_first[sequence])
        pages = self.host_pages
        return 0 <= number < pages.shape[1] and bool(pages[sequence, number])

    def slots(self, sequence: Ints, rows: Ints) -> Ints:
        """The slots of rows, which must have pages; computed on the host."""
        page, offset = np.divmod(rows, self.rows_per_page)
        page -= self.host_first[sequence]
        page += sequence * self.host_pages.shape[1]
        slots: Ints = self.host_pages.take(page)
        slots *= self.rows_per_page
        slots += offset
        return slots


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a step. Those of a sequence are adjacent and have consecutive positions.

    Attributes:
        positions: [N] int64; -1 marks padding of a captured batch. A padding token stores nothing
            and sees no row; its results are finite and meaningless.
        sequence: [N] int32: the token's row in the page tables.
        query_start: [B+1] int32: offsets of the sequences among the tokens.
        max_len: upper bound, on the host, of the sequences' lengths after this step or any replay.
        max_query: upper bound, on the host, of a sequence's tokens in the step; 1 in a decode.
        memo: values that operators compute once per step and use in every layer.
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
        """Rows [N,R/2,2] of a rotary table at the tokens' positions, gathered once per step."""
        # Keep the table alive with its rows, so that no other object gets the same id.
        key = ("rotation", id(rotary_LR))
        if key not in self.memo:
            rows = rotary_LR.index_select(0, self.positions.clamp(min=0))
            self.memo[key] = rotary_LR, rows
        gathered: Tensor = self.memo[key][1]
        return gathered
