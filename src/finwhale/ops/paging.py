"""Operator arguments: the positions of a step's tokens and the page tables of their sequences.

Legend: N tokens of the step, B sequences, P pages of the longest sequence, R rope dimensions.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Tokens in a block. At the end of a block, another sequence with the same prefix can resume from
# cached state. In every cache group, the number of tokens in a page divides BLOCK_TOKENS.
BLOCK_TOKENS = 256

# The GPU kernels treat a step as a decode if no sequence has more tokens in it than this. A step
# that verifies drafts is a decode: compressors allow up to 8 tokens of each sequence.
MAX_DECODE_QUERY = 8


def contiguous_rows(pool: Tensor) -> tuple[Tensor, int]:
    """View a dense pool [rows, width] as contiguous rows [X, width]; returns (view, step).

    Row r of the pool is row step * r of the view; the rows between belong to other layers. The
    stride of a cache's rows is a multiple of their width (models/cache.py, PageLayout).
    """
    num_rows, width = pool.shape
    step, rest = divmod(pool.stride(0), width)
    assert rest == 0 and pool.stride(1) == 1
    return pool.as_strided(((num_rows - 1) * step + 1, width), (width, 1)), step


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of each sequence in one group of the cache.

    Row r of sequence b lies at slot pages[b, r // rows_per_page - first[b]] * rows_per_page +
    r % rows_per_page of the group's pools.

    Attributes:
        pages: [B,P] int32 pages in order, 0 for no page; rows may be strided.
        first: [B] int32: the page number of pages[b,0], above 0 once old window pages are freed.
        rows_per_page: rows of one page.
    """

    pages: Tensor
    first: Tensor
    rows_per_page: int

    @cached_property
    def host_pages(self) -> Ints:
        """`pages` as a host array."""
        return self.pages.cpu().numpy().astype(np.int64)

    @cached_property
    def host_first(self) -> Ints:
        """`first` as a host array."""
        return self.first.cpu().numpy().astype(np.int64)

    def has_pages(self, sequence: Ints, rows: Ints) -> NDArray[np.bool]:
        """Whether the sequences have pages with these rows; computed on the host."""
        number, pages = rows // self.rows_per_page - self.host_first[sequence], self.host_pages
        found: NDArray[np.bool] = (number >= 0) & (number < pages.shape[1])
        found &= pages[sequence, np.where(found, number, 0)] > 0
        return found

    def slots(self, sequence: Ints, rows: Ints) -> Ints:
        """The slots of rows, which must have pages; computed on the host."""
        page, offset = np.divmod(rows, self.rows_per_page)
        page -= self.host_first[sequence]
        page += sequence * self.host_pages.shape[1]
        slots: Ints = self.host_pages.take(page)
        slots *= self.rows_per_page
        slots += offset
        return slots


@dataclass(frozen=True, slots=True)
class CacheRows:
    """The rows of one field of the cache in one layer.

    Attributes:
        pool: dense, [rows, width] of a float dtype, or packed, uint8 [pages, bytes]. Other layers'
            rows or pages lie between them.
        table: the pages of each sequence.
    """

    pool: Tensor
    table: PageTable


@dataclass(frozen=True, slots=True)
class CompressStep:
    """The entries that complete in a step, with slots. All layers of a ratio share it.

    Attributes:
        history_slots: [X] int64: slots of state rows, which precede the N new rows.
        entry_sources: [M,S] int64: rows of (history, new) that an entry mixes; -1: none.
        entry_slots: [M] int64: the entries' slots in their pool.
        entry_positions: [M] int64: the position of each entry's rope.
        state_sources: [Y] int64: the new rows that later steps need.
        state_slots: [Y] int64: their slots in the state's pool.
    """

    history_slots: Tensor
    entry_sources: Tensor
    entry_slots: Tensor
    entry_positions: Tensor
    state_sources: Tensor
    state_slots: Tensor


@dataclass(frozen=True, slots=True)
class IndexStep:
    """The slots of each sequence's C4 entries. All layers with an indexer share this object.

    Attributes:
        query_start: B+1 token offsets of the sequences in the batch, on the host.
        max_entries: for each of B sequences, the number of entries that its last token sees.
        entry_slots: [B,E] int64: slots of the sequences' entries in order; -1 past the end.
        num_entries: [N] int64: number of entries that each token sees.
    """

    query_start: tuple[int, ...]
    max_entries: tuple[int, ...]
    entry_slots: Tensor
    num_entries: Tensor


@dataclass(slots=True, eq=False)
class StepCache:
    """Results that the first layer of a step computes from its tokens and the other layers reuse.

    Attributes:
        rotations: the rows of each rotary table at the tokens' positions.
        slots: results of the functions of slots.py, by their names and arguments.
        compress_counters: the compressor kernels' counters, 0 between launches.
    """

    rotations: dict[Tensor, Tensor] = field(default_factory=dict)
    slots: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    compress_counters: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a step. A sequence's tokens are adjacent and have consecutive positions.

    Attributes:
        positions: [N] int64; -1 marks padding of a captured batch. A padding token stores nothing
            and sees no row; its results are finite and meaningless.
        sequence: [N] int32: the token's row in the page tables.
        query_start: [B+1] int32: offsets of the sequences among the tokens.
        max_len: upper bound, on the host, of the sequences' lengths after this step or any replay.
        max_query: upper bound, on the host, of a sequence's tokens in the step; 1 in a decode.
        windows_begin: [B] int64: the first position that the windows of each sequence have. None:
            0. DeepSeek-V4's kernels take None only.
        cache: results that the layers of the step share.

    The tensors must be contiguous, because kernels do not take their strides.
    """

    positions: Tensor
    sequence: Tensor
    query_start: Tensor
    max_len: int
    max_query: int
    windows_begin: Tensor | None = None
    cache: StepCache = field(default_factory=StepCache, repr=False)

    def __post_init__(self) -> None:
        for tensor in (self.positions, self.sequence, self.query_start):
            assert tensor.is_contiguous(), f"strides {tensor.stride()}"

    @cached_property
    def host_positions(self) -> Ints:
        return self.positions.cpu().numpy()

    @cached_property
    def host_sequence(self) -> Ints:
        return self.sequence.cpu().numpy().astype(np.int64)

    @cached_property
    def host_query_start(self) -> list[int]:
        return self.query_start.tolist()

    def part(self, rows: slice) -> "Tokens":
        """Some adjacent tokens, with copies of their positions and sequences.

        All sequences of the step remain; some of them may have no token.
        """
        return Tokens(
            # A copy has the alignment that kernels are built for.
            positions=self.positions[rows].clone(),
            sequence=self.sequence[rows].clone(),
            query_start=(self.query_start - rows.start).clamp_(0, rows.stop - rows.start),
            max_len=self.max_len,
            max_query=self.max_query,
            windows_begin=self.windows_begin,
        )

    def bounded(self, max_len: int, max_query: int) -> "Tokens":
        """The same tokens with other bounds."""
        return replace(self, max_len=max_len, max_query=max_query, cache=StepCache())

    def rotation(self, rotary_LR: Tensor) -> Tensor:
        """Rows [N,R/2,2] of a rotary table at the tokens' positions, gathered once per step."""
        rows = self.cache.rotations.get(rotary_LR)
        if rows is None:
            rows = rotary_LR.index_select(0, self.positions.clamp(min=0))
            self.cache.rotations[rotary_LR] = rows
        return rows
