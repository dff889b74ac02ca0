"""Makes the input tensors of steps: from a plan, at fixed addresses, or synthetic.

`planned_inputs` makes the inputs of one step that the host launches. `StaticInputs` holds those of
captured steps. `synthetic_inputs` makes steps that measure memory or enumerate kernels. They build
their arrays with numpy; the number of numpy calls does not grow with the number of sequences.
ops/paging.py has the legend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.engine.plan.pages import BlockTable, SentTables
from finwhale.engine.plan.step_plan import PENDING, StepPlan
from finwhale.engine.steps.host_transfer import send
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.models.cache import CacheGroup
from finwhale.models.step_inputs import Prompts, StepInputs
from finwhale.ops.paging import PageTable, Tokens

MAX_UPDATES = 8192  # page updates that the pinned buffers hold; a step may have more
ALIGN = 16  # words: alignment of page tables and their rows, for wide loads
NO_STEP = StepPlan((), (), (), (), (), decodes=True)
PAGE = 1  # all tokens of synthetic steps read and write this page; no sequence owns page 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a step.

    Attributes:
        logits_rows: [M] int64: the rows of the step's tokens whose logits are wanted.
    """

    inputs: StepInputs
    logits_rows: Tensor


def planned_inputs(
    plan: StepPlan,
    groups: Sequence[CacheGroup],
    tables: SlotTables,
    device: torch.device,
    sampled: Tensor | None = None,
    lane_rows: int = 0,
) -> Batch:
    """The inputs of a planned step, which are sent to the device in one transfer.

    Args:
        groups: the model's cache groups.
        tables: the page tables of the plan's slots.
        sampled: [num_seqs] int64 on the device: the ids sampled in the previous step, row by row.
            None: no token is pending.
        lane_rows: see StepInputs.
    """
    count = len(plan.slots)
    token_ids = np.array(plan.token_ids, np.int64)
    ends = plan.ends
    positions = np.concatenate([np.arange(*span) for span in zip(plan.starts, ends, strict=True)])
    of_slots = [tables[slot] for slot in plan.slots]
    paged = [_pages_and_first([each[group.name] for each in of_slots]) for group in groups]
    cached, tail_ends = zip(*plan.prompts, strict=True) if plan.prompts else ((), ())
    ids, sent_positions, rows, pending, sampled_rows, sequences, starts, *sent = send(
        device,
        token_ids,
        positions,
        np.array(plan.logits_rows, np.int64),
        np.flatnonzero(token_ids == PENDING),
        np.array(plan.pending_rows, np.int64),
        np.repeat(np.arange(count, dtype=np.int32), plan.lengths),
        np.array(plan.query_start, np.int32),
        *(array for pair in paged for array in pair),
        *(np.array(bounds, np.int64) for bounds in (cached, tail_ends) if bounds),
    )
    if len(pending):
        assert sampled is not None
        ids.index_copy_(0, pending, sampled.index_select(0, sampled_rows))
    prompts = None
    if plan.prompts:
        *sent, cached_B, tail_end_B = sent
        after = [end - tail_end for end, tail_end in zip(ends, tail_ends, strict=True)]
        prompts = Prompts(cached_B, tail_end_B, tuple(zip(plan.lengths, after, strict=True)))
    inputs = StepInputs(
        token_ids=ids,
        tokens=Tokens(
            positions=sent_positions,
            sequence=sequences,
            query_start=starts,
            max_len=max(ends),
            max_query=max(plan.lengths),
        ),
        tables={
            group.name: PageTable(pages, first, group.rows_per_page)
            for group, pages, first in zip(groups, sent[::2], sent[1::2], strict=True)
        },
        lane_rows=lane_rows,
        prompts=prompts,
    )
    return Batch(inputs, rows)


def _pages_and_first(tables: Sequence[BlockTable]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(pages [B,P], first [B]) of a step's sequences in one group."""
    # Rows are aligned for wide loads, as in captured steps, so that the same kernels run.
    width = aligned(max(1, *(len(table.pages) for table in tables)))
    pages = np.array([t.pages + [0] * (width - len(t.pages)) for t in tables], np.int32)
    return pages, np.array([table.first for table in tables], np.int32)


def synthetic_inputs(
    lengths: Sequence[int],
    max_len: int,
    groups: Sequence[CacheGroup],
    device: torch.device,
    *,
    vocab_size: int,
    max_query: int | None = None,
) -> StepInputs:
    """A step that computes the last lengths[b] tokens of sequences of max_len tokens. In a model
    that replays, all of them are in the tails of prompts.

    Args:
        vocab_size: the ids of the tokens are arbitrary, and below it.
        max_query: the step's bound of tokens of one sequence; None: the largest of `lengths`.
    """
    counts = np.array(lengths)
    starts, query_start = np.maximum(0, max_len - counts), np.array([0, *counts.cumsum()], np.int32)
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
    positions = np.minimum(positions, max_len - 1)  # a sequence may be shorter than the step
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    tables = {}
    for group in groups:
        first_pages = {
            s: group.first_needed(s) // group.tokens_per_page for s in {*starts.tolist()}
        }
        width = aligned(-(-max_len // group.tokens_per_page) - min(first_pages.values()))
        tables[group.name] = PageTable(
            torch.full((len(counts), width), PAGE, dtype=torch.int32, device=device),
            torch.tensor(
                [first_pages[s] for s in starts.tolist()], dtype=torch.int32, device=device
            ),
            group.rows_per_page,
        )
    ids, sent_positions, sent_sequence, sent_starts = (
        torch.tensor(array, device=device)
        for array in (positions % vocab_size, positions, sequence, query_start)
    )
    prompts = None
    if any(group.rebuilt for group in groups):
        zeros = torch.zeros(len(counts), dtype=torch.int64, device=device)
        prompts = Prompts(zeros, zeros, tuple((length, max_len) for length in lengths))
    return StepInputs(
        token_ids=ids,
        tokens=Tokens(
            positions=sent_positions,
            sequence=sent_sequence,
            query_start=sent_starts,
            max_len=max_len,
            max_query=max_query or max(lengths),
        ),
        tables=tables,
        lane_rows=len(ids),
        prompts=prompts,
    )


def one_token_each(positions_B: Tensor, max_len: int, ordinal: Tensor | None = None) -> Tokens:
    """The operators' token arguments of a step in which each sequence has one token.

    Args:
        ordinal: the numbers from 0 to B or more, int32 on the device; None: made here.
    """
    size = len(positions_B)
    if ordinal is None:
        ordinal = torch.arange(size + 1, dtype=torch.int32, device=positions_B.device)
    return Tokens(
        positions=positions_B,
        sequence=ordinal[:size],
        query_start=ordinal[: size + 1],
        max_len=max_len,
        max_query=1,
    )


class StaticInputs:
    """The inputs of captured steps, at fixed addresses.

    One set of buffers serves every graph: a graph of n tokens reads the first n elements of each
    buffer. A step has at most num_tokens tokens of at most num_seqs sequences. The host has two
    pinned copies and alternates between them: while the device still reads one step's copy, the
    host writes the next step into the other. Page tables stay on the device; the host sends changes
    as pairs of index and page.

    Args:
        tables: the page tables of the plans' slots.
        max_len: length of the longest sequence.

    Attributes:
        sampled: [num_seqs] int64 on the device: ids sampled in the previous step, row by row.
    """

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        groups: Sequence[CacheGroup],
        tables: SlotTables,
        max_len: int,
        device: torch.device,
    ) -> None:
        # Align every part for wide loads: Triton compiles another kernel for unaligned pointers.
        num_tokens, self.num_sampled = aligned(num_tokens), aligned(num_seqs)
        self.num_tokens, self.num_seqs, self.max_len = num_tokens, num_seqs, max_len
        self.groups = tuple(groups)
        self._tables = tables
        # A token's source is an index into the sampled ids followed by the host's ids.
        words = 2 * self.num_sampled + _step_words(num_tokens, num_seqs)
        block = torch.zeros(words, dtype=torch.int32, device=device)
        self._ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._sources = block[: 2 * (self.num_sampled + num_tokens)].view(torch.int64)
        self.sampled = self._sources[:num_seqs]
        self._step_device = block[2 * self.num_sampled :]
        _, self._source, self._positions, self._sequence, self._query_start = _cut_step(
            self._step_device, num_tokens
        )
        self._layout = _PageLayout(groups, num_tokens, num_seqs, max_len)
        self._page_device = torch.zeros(self._layout.words, dtype=torch.int32, device=device)
        self._updates = torch.zeros(3 * MAX_UPDATES, dtype=torch.int32, device=device)
        self._copies = [_PinnedCopy(self, device) for _ in range(2)]
        self._turn = 0
        self._forget_pages()
        self.fill(NO_STEP, decode=True)

    def inputs(
        self,
        num_tokens: int,
        num_seqs: int,
        max_query: int,
        max_len: int | None = None,
        positions: Tensor | None = None,
    ) -> StepInputs:
        """The inputs of a graph of num_tokens tokens of num_seqs sequences.

        Args:
            max_query: the most tokens of one sequence.
            max_len: bound of the sequences' lengths; None: that of all steps.
            positions: the positions of the tokens; None: those that the host sends.
        """
        return StepInputs(
            token_ids=self._ids[:num_tokens],
            tokens=Tokens(
                positions=self._positions[:num_tokens] if positions is None else positions,
                sequence=self._sequence[:num_tokens],
                query_start=self._query_start[: num_seqs + 1],
                max_len=self.max_len if max_len is None else max_len,
                max_query=max_query,
            ),
            tables={
                group.name: PageTable(pages[:num_seqs], first[:num_seqs], group.rows_per_page)
                for group, pages, first in zip(
                    self.groups, *self._layout.cut(self._page_device), strict=True
                )
            },
            lane_rows=num_tokens,
        )

    def gather_ids(self, num_tokens: int) -> None:
        """Gather the tokens' ids. This is the first operation of a graph."""
        torch.index_select(self._sources, 0, self._source[:num_tokens], out=self._ids[:num_tokens])

    def planned_tokens(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, each token's index into them, and positions, as the host has sent them."""
        return self._sources, self._source[:num_tokens], self._positions[:num_tokens]

    def fill(self, plan: StepPlan, *, decode: bool) -> None:
        """Write a step and begin its transfer; fill the rest of the buffers with padding.

        Args:
            decode: each chunk has one token.
        """
        self._turn = 1 - self._turn
        pinned = self._copies[self._turn]
        pinned.wait()
        pinned.write_step(plan, decode)
        self._step_device.copy_(pinned.step, non_blocking=True)
        try:
            self._fill_pages(pinned, plan.slots)
        except BaseException:
            # After an interruption, the host does not know which pages have arrived.
            self._forget_pages()
            raise
        pinned.record_sent()

    def _forget_pages(self) -> None:
        self._versions: list[object] = [None] * self.num_seqs
        self._device_tables = SentTables()

    def _fill_pages(self, pinned: "_PinnedCopy", slots: Sequence[int]) -> None:
        """Send the pages that the device does not have yet."""
        held, count = self._versions, len(slots)
        versions = self._tables.versions(slots)
        if versions == held[:count]:
            return
        # Indices of words in the block, and their values.
        indices: list[int] = []
        values: list[int] = []
        for row, (new, old) in enumerate(zip(versions, held, strict=False)):
            if new is old:
                continue
            for group, table, begin in self._device_tables.changes(row, self._tables[slots[row]]):
                at, first_at = self._layout.indices(group, row, len(table.pages))
                if not begin:
                    indices.append(first_at)
                    values.append(table.first)
                indices.extend(range(at + begin, at + len(table.pages)))
                values.extend(table.pages[begin:])
        held[:count] = versions
        if len(indices) <= MAX_UPDATES:
            words = pinned.write_updates(indices, values)
            updates = self._updates[: len(words)]
            updates.copy_(words, non_blocking=True)
            where, what = _cut_updates(updates)
        else:
            where, what = send(
                self._page_device.device, np.array(indices, np.int64), np.array(values, np.int32)
            )
        self._page_device.index_copy_(0, where, what)


class _PinnedCopy:
    """One of the two pinned copies. The host may write to it once its transfers are done."""

    def __init__(self, static: StaticInputs, device: torch.device) -> None:
        pinned = device.type == "cuda"
        words = _step_words(static.num_tokens, static.num_seqs)
        self.step = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self._ids, self._source, self._positions, self._sequence, self._query_start = (
            part.numpy() for part in _cut_step(self.step, static.num_tokens)
        )
        self._ordinal = np.arange(static.num_seqs)
        self._own = np.arange(static.num_tokens) + static.num_sampled
        self._updates = torch.zeros(3 * MAX_UPDATES, dtype=torch.int32, pin_memory=pinned)
        self._device = device
        self._event = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Wait for the transfers of the step before last, which have usually been done long ago."""
        if self._event is not None:
            self._event.synchronize()

    def record_sent(self) -> None:
        """Record that all transfers from this copy have been launched, for the next `wait`."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def write_step(self, plan: StepPlan, decode: bool) -> None:
        ids, num_seqs = plan.token_ids, len(plan.slots)
        count = len(ids)
        if decode:
            self._positions[:count] = plan.starts
            self._sequence[:count] = self._ordinal[:count]
            self._query_start[:count] = self._ordinal[:count]
        else:
            spans = zip(plan.starts, plan.ends, strict=True)
            self._positions[:count] = np.concatenate([np.arange(*span) for span in spans])
            self._sequence[:count] = np.repeat(np.arange(num_seqs), plan.lengths)
            self._query_start[:num_seqs] = plan.query_start[:-1]
        self._query_start[num_seqs:] = count
        self._positions[count:] = -1
        self._sequence[count:] = 0
        self._ids[:count] = ids
        # Padding is embedded too, and an earlier step may have left PENDING here.
        self._ids[count:] = 0
        self._source[:] = self._own
        if len(plan.pending_rows) == count:
            self._source[:count] = plan.pending_rows
        elif plan.pending_rows:
            self._source[np.flatnonzero(self._ids[:count] == PENDING)] = plan.pending_rows

    def write_updates(self, indices: list[int], values: list[int]) -> Tensor:
        """Write page updates; returns the words, which `_cut_updates` splits."""
        words = self._updates[: 3 * len(indices)]
        where, what = _cut_updates(words)
        where.numpy()[:] = indices
        what.numpy()[:] = values
        return words


class _PageLayout:
    """Layout of the page tables in one block: each group's `first`, then rows of all groups."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_tokens: int, num_seqs: int, max_len: int
    ) -> None:
        self._num_seqs = num_seqs
        self._firsts = aligned(num_seqs)
        self._widths = [aligned(_pages_per_sequence(g, max_len, num_tokens)) for g in groups]
        self._before = self._firsts * len(self._widths)
        self._row = sum(self._widths)
        self.words = self._before + num_seqs * self._row
        starts = accumulate(self._widths[:-1], initial=self._before)
        self._groups = [
            (at, group * self._firsts, width)
            for group, (at, width) in enumerate(zip(starts, self._widths, strict=True))
        ]

    def cut(self, block: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of each group's pages [B,P], with strided rows, and of its `first` [B]."""
        firsts = list(block[: self._before].view(-1, self._firsts)[:, : self._num_seqs])
        rows = block[self._before :].view(self._num_seqs, self._row)
        return list(rows.split(self._widths, dim=1)), firsts

    def indices(self, group: int, row: int, num_pages: int) -> tuple[int, int]:
        """Indices in the block of a row's first page in a group, and of the row's `first`."""
        at, first, width = self._groups[group]
        assert num_pages <= width
        return at + row * self._row, first + row


def aligned(words: int) -> int:
    """Round up to a number of words after which wide loads are aligned."""
    return -(-words // ALIGN) * ALIGN


def _cut_updates(words: Tensor) -> tuple[Tensor, Tensor]:
    """Split 3 U words into indices [U] int64 and values [U] int32."""
    count = len(words) // 3
    return words[: 2 * count].view(torch.int64), words[2 * count :]


def with_bounds(inputs: StepInputs, plan: StepPlan) -> StepInputs:
    """Add the host's bounds to the inputs of a step that is not a pure decode."""
    return inputs.bounded(max(plan.ends), max(plan.lengths))


def _step_words(num_tokens: int, num_seqs: int) -> int:
    return 7 * num_tokens + num_seqs + 1


def _cut_step(block: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Views: ids, source and positions [N] int64, sequence [N] and query_start [B+1] int32."""
    ids, source, positions = block[: 6 * num_tokens].view(torch.int64).split(num_tokens)
    return (
        ids,
        source,
        positions,
        *block[6 * num_tokens :].split_with_sizes([num_tokens, len(block) - 7 * num_tokens]),
    )


def _pages_per_sequence(group: CacheGroup, max_len: int, num_tokens: int) -> int:
    """The most pages that one sequence holds at once, in steps of at most num_tokens tokens."""
    whole = -(-max_len // group.tokens_per_page)
    if group.keep is None:
        return whole
    align, before = group.keep
    return min(whole, -(-(align + before + num_tokens) // group.tokens_per_page) + 1)
