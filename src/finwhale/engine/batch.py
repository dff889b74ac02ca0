"""Chunks of sequences to the tensors that one forward reads.

Built with numpy on the host, one copy to the device at the end. Legend as in models' step.py.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from finwhale.engine.pages import BlockTable, PageGroup
from finwhale.engine.scheduler import Chunk
from finwhale.models.deepseek_v4.step import StepInputs
from finwhale.ops.compressor import CompressStep
from finwhale.ops.indexer import IndexStep

Ints = NDArray[np.int64]
# Slots of entries are padded to this many, the references' block of keys.
ENTRY_PAD = 128


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's inputs, and the rows of its tokens whose logits are wanted ([M] int64)."""

    inputs: StepInputs
    logits_rows: torch.Tensor


class BatchBuilder:
    """Builds batches for one model's cache groups on one device."""

    def __init__(self, groups: Items[PageGroup], sliding_window: int, device: torch.device) -> None:
        self.groups = {group.name: group for group in groups}
        self.window = sliding_window
        self.device = device

    def build(self, chunks: Items[Chunk]) -> Batch:
        """The inputs of the chunks, in their order; logits of each that completes."""
        query_start = np.cumsum([0] + [c.end - c.start for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        token_ids = np.concatenate(
            [np.array(c.sequence.token_ids[c.start : c.end], np.int64) for c in chunks]
        )
        return Batch(
            inputs=StepInputs(
                token_ids=self._tensor(token_ids),
                positions=self._tensor(positions),
                window_write_slots=self._tensor(self._window_write_slots(chunks)),
                window_slots=self._tensor(self._window_slots(chunks)),
                c4=self._compress_step(chunks, query_start, "c4", "c4_state", 4, 8),
                index=self._index_step(chunks, query_start, positions),
                c128=self._compress_step(chunks, query_start, "c128", "c128_state", 128, 128),
                c128_slots=self._c128_slots(chunks, query_start, positions),
            ),
            logits_rows=self._tensor(query_start[1:][[c.completes for c in chunks]] - 1),
        )

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _slots(self, chunk: Chunk, name: str, rows: Ints) -> Ints:
        """Slots of a sequence's row numbers; rows must lie in its pages."""
        group = self.groups[name]
        table: BlockTable = chunk.sequence.tables[name]
        pages = np.array(table.pages, np.int64)
        return (
            pages[rows // group.rows_per_page - table.first] * group.rows_per_page
            + rows % group.rows_per_page
        )

    def _window_write_slots(self, chunks: Items[Chunk]) -> Ints:
        return np.concatenate([self._slots(c, "window", np.arange(c.start, c.end)) for c in chunks])

    def _window_slots(self, chunks: Items[Chunk]) -> Ints:
        offsets = np.arange(1 - self.window, 1)
        out = []
        for c in chunks:
            seen = np.arange(c.start, c.end)[:, None] + offsets
            slots = self._slots(c, "window", np.maximum(seen, 0))
            out.append(np.where(seen >= 0, slots, -1))
        return np.concatenate(out)

    def _compress_step(
        self,
        chunks: Items[Chunk],
        query_start: Ints,
        name: str,
        state: str,
        ratio: int,
        mixed: int,
    ) -> CompressStep | None:
        """Entries of `ratio` tokens that complete; each mixes the `mixed` tokens up to its last."""
        if name not in self.groups:
            return None
        history, starts = [], []
        count = 0
        completing = [np.arange(c.start // ratio, c.end // ratio) for c in chunks]
        for c, entries in zip(chunks, completing, strict=True):
            first = self.groups[state].first_needed(c.start) if len(entries) else c.start
            history.append(self._slots(c, state, np.arange(first, c.start)))
            starts.append((count, first))
            count += c.start - first
        sources, slots, positions, state_sources, state_slots = [], [], [], [], []
        for i, (c, entries) in enumerate(zip(chunks, completing, strict=True)):
            at, first = starts[i]
            tokens = (entries[:, None] + 1) * ratio - mixed + np.arange(mixed)
            new = count + query_start[i] + tokens - c.start
            source = np.where(tokens >= c.start, new, at + tokens - first)
            sources.append(np.where(tokens >= 0, source, -1))
            slots.append(self._slots(c, name, entries))
            positions.append(entries * ratio)
            kept = np.arange(self.groups[state].first_written(c.start, c.end), c.end)
            state_sources.append(query_start[i] + kept - c.start)
            state_slots.append(self._slots(c, state, kept))
        return CompressStep(
            history_slots=self._tensor(np.concatenate(history)),
            entry_sources=self._tensor(np.concatenate(sources)),
            entry_slots=self._tensor(np.concatenate(slots)),
            entry_positions=self._tensor(np.concatenate(positions)),
            state_sources=self._tensor(np.concatenate(state_sources)),
            state_slots=self._tensor(np.concatenate(state_slots)),
        )

    def _entry_slots(self, chunks: Items[Chunk], name: str, ratio: int) -> Ints:
        """[B,E]: slots of each sequence's entries after the step, -1 past its last."""
        counts = [c.end // ratio for c in chunks]
        out = np.full((len(chunks), -(-max(counts) // ENTRY_PAD) * ENTRY_PAD), -1, np.int64)
        for row, (c, entries) in enumerate(zip(chunks, counts, strict=True)):
            out[row, :entries] = self._slots(c, name, np.arange(entries))
        return out

    def _index_step(
        self, chunks: Items[Chunk], query_start: Ints, positions: Ints
    ) -> IndexStep | None:
        if "c4" not in self.groups:
            return None
        lengths = np.diff(query_start)
        return IndexStep(
            query_start=tuple(query_start.tolist()),
            max_entries=tuple(c.end // 4 for c in chunks),
            entry_slots=self._tensor(self._entry_slots(chunks, "c4", 4)),
            num_entries=self._tensor((positions + 1) // 4),
            sequence=self._tensor(np.repeat(np.arange(len(chunks)), lengths)),
        )

    def _c128_slots(
        self, chunks: Items[Chunk], query_start: Ints, positions: Ints
    ) -> torch.Tensor | None:
        if "c128" not in self.groups:
            return None
        entry_slots = self._entry_slots(chunks, "c128", 128)
        visible = np.arange(entry_slots.shape[1]) < ((positions + 1) // 128)[:, None]
        rows = np.repeat(entry_slots, np.diff(query_start), 0)
        return self._tensor(np.where(visible, rows, -1))
