"""The inputs of captured steps at fixed addresses, and what fills them.

One set of buffers serves every graph: a graph of n tokens reads the first n of each. The host
writes into pinned twins, of which there are two in turns: while the device still reads a step from
one, the next step is written into the other.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.engine.pages import BlockTables
from finwhale.engine.scheduler import PENDING, Chunk
from finwhale.models.deepseek_v4.cache_spec import CacheGroup
from finwhale.models.deepseek_v4.step import StepInputs
from finwhale.ops.paging import PageTable, Tokens

ALIGN = 16  # words: page tables begin and rows lie where loads may be wide
PageState = tuple[BlockTables, list[tuple[int, int, list[int]]]]


class StaticInputs:
    """Buffers for steps of at most num_tokens tokens of at most num_seqs sequences.

    Args:
        max_len: no sequence is longer.

    Attributes:
        sampled: [num_seqs] int64 on the device: the ids that the step before chose, row by row.
    """

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        groups: Items[CacheGroup],
        max_len: int,
        device: torch.device,
    ) -> None:
        self.num_tokens, self.num_seqs, self.max_len = num_tokens, num_seqs, max_len
        self.groups = tuple(groups)
        # A token's id is one of the ids sampled last, or of those from the host behind them.
        words = 2 * num_seqs + _step_words(num_tokens, num_seqs)
        block = torch.zeros(words, dtype=torch.int32, device=device)
        self._ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._sources = block[: 2 * (num_seqs + num_tokens)].view(torch.int64)
        self.sampled = self._sources[:num_seqs]
        self._step_device = block[2 * num_seqs :]
        _, self._source, self._positions, self._sequence, self._query_start = _cut_step(
            self._step_device, num_tokens
        )
        self._layout = _PageLayout(groups, num_tokens, num_seqs, max_len)
        self._page_device = torch.zeros(self._layout.words, dtype=torch.int32, device=device)
        self._twins = [_Twin(self, device) for _ in range(2)]
        self._turn = 0
        self._held: list[PageState | None] = [None] * num_seqs
        self._firsts = np.zeros((len(self.groups), num_seqs), np.int32)
        self.fill([])

    def inputs(self, num_tokens: int, *, decode: bool) -> StepInputs:
        """What a graph of num_tokens tokens reads; decode: each is a sequence of its own."""
        num_seqs = num_tokens if decode else self.num_seqs
        return StepInputs(
            token_ids=self._ids[:num_tokens],
            tokens=Tokens(
                positions=self._positions[:num_tokens],
                sequence=self._sequence[:num_tokens],
                query_start=self._query_start[: num_seqs + 1],
                max_len=self.max_len,
                max_query=1 if decode else num_tokens,
            ),
            tables={
                group.name: PageTable(pages[:num_seqs], first[:num_seqs], group.rows_per_page)
                for group, pages, first in zip(
                    self.groups, *self._layout.cut(self._page_device), strict=True
                )
            },
        )

    def gather_ids(self, num_tokens: int) -> None:
        """Put the tokens' ids in their place; what a graph does first."""
        torch.index_select(self._sources, 0, self._source[:num_tokens], out=self._ids[:num_tokens])

    def fill(self, chunks: Items[Chunk]) -> None:
        """Write the chunks and send them on their way; the rest becomes padding."""
        self._turn = 1 - self._turn
        twin = self._twins[self._turn]
        twin.wait()
        twin.write_step(chunks)
        self._step_device.copy_(twin.step, non_blocking=True)
        self._fill_pages(twin, chunks)
        twin.sent()

    def _fill_pages(self, twin: "_Twin", chunks: Items[Chunk]) -> None:
        """Send the rows whose pages are not there yet."""
        changed = []
        for row, chunk in enumerate(chunks):
            if self._update(row, chunk.sequence.tables):
                changed.append(row)
        if not changed:
            return
        for each in self._twins:
            each.stale.update(changed)
        for row in changed:
            tables = chunks[row].sequence.tables
            self._firsts[:, row] = [tables[group.name].first for group in self.groups]
        twin.write_firsts(self._firsts)
        # Rows past the batch stay stale: they are not sent.
        for row in [row for row in twin.stale if row < len(chunks)]:
            twin.write_pages(row, chunks[row].sequence.tables)
        for part in self._layout.parts(changed[0], changed[-1]):
            self._page_device[part].copy_(twin.pages[part], non_blocking=True)

    def _update(self, row: int, tables: BlockTables) -> bool:
        """Note the pages that a row is to have; whether they are not those that it has."""
        # Of a sequence's tables, pages are given and taken at the ends alone.
        ends = [(t.first, len(t.pages), t.pages[-1:]) for t in tables.values()]
        held = self._held[row]
        if held is not None and held[0] is tables and held[1] == ends:
            return False
        self._held[row] = tables, ends
        return True


class _Twin:
    """One of the pinned copies; free again when what was sent from it has arrived."""

    def __init__(self, static: StaticInputs, device: torch.device) -> None:
        pinned = device.type == "cuda"
        words = _step_words(static.num_tokens, static.num_seqs)
        self.step = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self._ids, self._source, self._positions, self._sequence, self._query_start = (
            part.numpy() for part in _cut_step(self.step, static.num_tokens)
        )
        self._num_seqs = static.num_seqs
        self.pages = torch.zeros(static._layout.words, dtype=torch.int32, pin_memory=pinned)
        tables, firsts = static._layout.cut(self.pages)
        self._tables: list[NDArray[np.int32]] = [table.numpy() for table in tables]
        self._firsts: list[NDArray[np.int32]] = [first.numpy() for first in firsts]
        self._names = [group.name for group in static.groups]
        self.stale: set[int] = set()
        self._device = device
        self._event = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Wait for the transfers of the step before last, which are long done in a serving loop."""
        if self._event is not None:
            self._event.synchronize()

    def sent(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def write_step(self, chunks: Items[Chunk]) -> None:
        lengths = [c.end - c.start for c in chunks]
        starts = list(accumulate(lengths, initial=0))
        count = starts.pop()
        if count == len(chunks):
            self._ids[:count] = [c.sequence.token_ids[c.start] for c in chunks]
            self._positions[:count] = [c.start for c in chunks]
            self._sequence[:count] = np.arange(count)
        else:
            self._ids[:count] = [t for c in chunks for t in c.sequence.token_ids[c.start : c.end]]
            self._positions[:count] = np.concatenate([np.arange(c.start, c.end) for c in chunks])
            self._sequence[:count] = np.repeat(np.arange(len(chunks)), lengths)
        self._source[:] = np.arange(self._num_seqs, self._num_seqs + len(self._source))
        pending = np.flatnonzero(self._ids[:count] == PENDING)
        if len(pending):
            rows = [c.sequence.sampled_row for c in chunks if c.pending]
            self._source[pending] = rows
        self._positions[count:] = -1
        self._sequence[count:] = 0
        self._query_start[: len(chunks)] = starts
        self._query_start[len(chunks) :] = count

    def write_firsts(self, firsts: NDArray[np.int32]) -> None:
        for mine, first in zip(self._firsts, firsts, strict=True):
            mine[:] = first

    def write_pages(self, row: int, tables: BlockTables) -> None:
        self.stale.discard(row)
        for name, rows in zip(self._names, self._tables, strict=True):
            pages = tables[name].pages
            rows[row, : len(pages)] = pages


class _PageLayout:
    """Where the page tables lie in one block: each group's `first`, then rows of all groups."""

    def __init__(
        self, groups: Items[CacheGroup], num_tokens: int, num_seqs: int, max_len: int
    ) -> None:
        self._num_seqs = num_seqs
        self._firsts = _rounded(num_seqs)
        self._widths = [_rounded(_pages_a_sequence(g, max_len, num_tokens)) for g in groups]
        self._before = self._firsts * len(self._widths)
        self.words = self._before + num_seqs * sum(self._widths)

    def cut(self, block: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Each group's pages [B,P], rows lying apart, and first [B]."""
        firsts = list(block[: self._before].view(-1, self._firsts)[:, : self._num_seqs])
        rows = block[self._before :].view(self._num_seqs, sum(self._widths))
        return list(rows.split(self._widths, dim=1)), firsts

    def parts(self, low: int, high: int) -> tuple[slice, slice]:
        """The block's words that rows low..high are."""
        row = sum(self._widths)
        return (
            slice(0, self._before),
            slice(self._before + low * row, self._before + (high + 1) * row),
        )


def _rounded(words: int) -> int:
    return -(-words // ALIGN) * ALIGN


def with_bounds(inputs: StepInputs, chunks: Items[Chunk]) -> StepInputs:
    """The inputs with the host's bounds of a step that is not all decodes."""
    tokens = replace(
        inputs.tokens,
        max_len=max(c.end for c in chunks),
        max_query=max(c.end - c.start for c in chunks),
        memo={},
    )
    return replace(inputs, tokens=tokens)


def _step_words(num_tokens: int, num_seqs: int) -> int:
    return 7 * num_tokens + num_seqs + 1


def _cut_step(block: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ids, source and positions [N] int64, sequence [N] and query_start [B+1] int32."""
    ids, source, positions = block[: 6 * num_tokens].view(torch.int64).split(num_tokens)
    return (
        ids,
        source,
        positions,
        *block[6 * num_tokens :].split_with_sizes([num_tokens, len(block) - 7 * num_tokens]),
    )


def _pages_a_sequence(group: CacheGroup, max_len: int, num_tokens: int) -> int:
    """Pages that one sequence can hold at a time in steps of at most num_tokens tokens."""
    whole = -(-max_len // group.tokens_per_page)
    if group.keep is None:
        return whole
    align, before = group.keep
    return min(whole, -(-(align + before + num_tokens) // group.tokens_per_page) + 1)
