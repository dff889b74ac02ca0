"""Chunks of sequences to the tensors that one forward reads.

Built with numpy on the host, with a number of numpy calls that does not grow with the number of
sequences, then copied to the device. Legend as in models' step.py; B sequences, P pages.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from finwhale.engine.pages import PageGroup
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


@dataclass(frozen=True, slots=True)
class _Step:
    """The tokens of a step.

    Attributes:
        query_start: B+1 offsets of the chunks among the tokens.
        sequence, positions: [N].
    """

    chunks: Items[Chunk]
    query_start: list[int]
    sequence: Ints
    positions: Ints


class _Tables:
    """The block tables of a step's sequences in one group, as one matrix [B,P]."""

    def __init__(self, group: PageGroup, chunks: Items[Chunk]) -> None:
        self.group = group
        tables = [c.sequence.tables[group.name] for c in chunks]
        width = max(1, *(len(table.pages) for table in tables))
        self.pages = np.array([t.pages + [0] * (width - len(t.pages)) for t in tables], np.int64)
        self._base = np.array([i * width - t.first for i, t in enumerate(tables)], np.int64)

    def slots(self, sequence: Ints | list[int], rows: Ints | list[int]) -> Ints:
        """Slots of row numbers, which must lie in the sequences' pages."""
        page, offset = np.divmod(rows, self.group.rows_per_page)
        page += self._base[sequence]
        slots: Ints = self.pages.take(page)
        slots *= self.group.rows_per_page
        slots += offset
        return slots

    def first_slots(self, counts: list[int], width: int) -> Ints:
        """[B,width]: slots of each sequence's first rows, `counts` of them, then -1."""
        per_page = self.group.rows_per_page
        pages = self.pages[:, : -(-width // per_page)]
        slots = (pages[:, :, None] * per_page + np.arange(per_page)).reshape(len(counts), -1)
        out = np.full((len(counts), width), -1, np.int64)
        columns = min(width, slots.shape[1])
        seen = np.arange(columns) < np.array(counts)[:, None]
        np.copyto(out[:, :columns], slots[:, :columns], where=seen)
        return out


class BatchBuilder:
    """Builds batches for one model's cache groups on one device."""

    def __init__(self, groups: Items[PageGroup], sliding_window: int, device: torch.device) -> None:
        self.groups = {group.name: group for group in groups}
        self.device = device
        self._none = self._tensor(np.empty(0, np.int64))
        self._window = np.arange(1 - sliding_window, 1)

    def build(self, chunks: Items[Chunk]) -> Batch:
        """The inputs of the chunks, in their order; logits of each that completes."""
        lengths = [c.end - c.start for c in chunks]
        query_start = list(accumulate(lengths, initial=0))
        token_ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.end]]
        if query_start[-1] == len(chunks):
            positions = np.array([c.start for c in chunks], np.int64)
            sequence = np.arange(len(chunks))
        else:
            positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
            sequence = np.repeat(np.arange(len(chunks)), lengths)
        step = _Step(chunks, query_start, sequence, positions)
        window_slots = self._window_slots(step)
        return Batch(
            inputs=StepInputs(
                token_ids=self._tensor(np.array(token_ids, np.int64)),
                positions=self._tensor(positions),
                window_write_slots=self._tensor(window_slots[:, -1].copy()),
                window_slots=self._tensor(window_slots),
                c4=self._compress_step(step, "c4", "c4_state", 4, 8),
                index=self._index_step(step),
                c128=self._compress_step(step, "c128", "c128_state", 128, 128),
                c128_slots=self._c128_slots(step),
            ),
            logits_rows=self._tensor(
                np.array(
                    [e - 1 for c, e in zip(chunks, query_start[1:], strict=True) if c.completes],
                    np.int64,
                )
            ),
        )

    def _tensor(self, array: Ints) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _window_slots(self, step: _Step) -> Ints:
        """[N,W]; the last column is the token's own slot."""
        tables = _Tables(self.groups["window"], step.chunks)
        seen = step.positions[:, None] + self._window
        slots = tables.slots(step.sequence[:, None], np.maximum(seen, 0))
        np.copyto(slots, -1, where=seen < 0)
        return slots

    def _compress_step(
        self, step: _Step, name: str, state_name: str, ratio: int, mixed: int
    ) -> CompressStep | None:
        """Entries of `ratio` tokens that complete; each mixes the `mixed` tokens up to its last."""
        if name not in self.groups:
            return None
        state = _Tables(self.groups[state_name], step.chunks)
        kept = [
            (b, start + token - c.start, token)
            for b, (c, start) in enumerate(zip(step.chunks, step.query_start, strict=False))
            for token in range(state.group.first_written(c.start, c.end), c.end)
        ]
        owners, sources, tokens = zip(*kept, strict=True) if kept else ((), (), ())
        entries = [
            (b, entry)
            for b, c in enumerate(step.chunks)
            for entry in range(c.start // ratio, c.end // ratio)
        ]
        history, entry_sources = self._none, self._none.view(0, 1).expand(0, mixed)
        entry_slots, positions = self._none, self._none
        if entries:
            sequence, entry = (np.array(column, np.int64) for column in zip(*entries, strict=True))
            history, entry_sources = self._sources(
                step, state, sequence, (entry[:, None] + 1) * ratio + np.arange(-mixed, 0)
            )
            entry_slots = self._tensor(
                _Tables(self.groups[name], step.chunks).slots(sequence, entry)
            )
            positions = self._tensor(entry * ratio)
        return CompressStep(
            history_slots=history,
            entry_sources=entry_sources,
            entry_slots=entry_slots,
            entry_positions=positions,
            state_sources=self._tensor(np.array(sources, np.int64)),
            state_slots=self._tensor(state.slots(list(owners), np.array(tokens, np.int64))),
        )

    def _sources(
        self, step: _Step, state: _Tables, sequence_M: Ints, tokens_MS: Ints
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the kept rows that the entries mix, and [M,S] rows of (those, the new ones)."""
        completing = set(sequence_M.tolist())
        history = [
            (b, token)
            for b, c in enumerate(step.chunks)
            if b in completing
            for token in range(state.group.first_needed(c.start), c.start)
        ]
        # Rows of (history, new) minus the position: of the kept tokens, and of the new.
        kept_row, new_row = [], []
        count = 0
        for b, c in enumerate(step.chunks):
            first = state.group.first_needed(c.start) if b in completing else c.start
            kept_row.append(count - first)
            new_row.append(len(history) + step.query_start[b] - c.start)
            count += c.start - first
        starts = np.array([c.start for c in step.chunks])[sequence_M, None]
        rows = np.where(
            tokens_MS >= starts,
            tokens_MS + np.array(new_row)[sequence_M, None],
            tokens_MS + np.array(kept_row)[sequence_M, None],
        )
        np.copyto(rows, -1, where=tokens_MS < 0)
        if not history:
            return self._none, self._tensor(rows)
        owners, tokens = zip(*history, strict=True)
        return self._tensor(state.slots(list(owners), np.array(tokens))), self._tensor(rows)

    def _entry_slots(self, step: _Step, name: str, ratio: int) -> Ints:
        """[B,E]: slots of each sequence's entries after the step, -1 past its last."""
        counts = [c.end // ratio for c in step.chunks]
        width = -(-max(counts) // ENTRY_PAD) * ENTRY_PAD
        if width == 0:
            return np.empty((len(counts), 0), np.int64)
        return _Tables(self.groups[name], step.chunks).first_slots(counts, width)

    def _index_step(self, step: _Step) -> IndexStep | None:
        if "c4" not in self.groups:
            return None
        return IndexStep(
            query_start=tuple(step.query_start),
            max_entries=tuple(c.end // 4 for c in step.chunks),
            entry_slots=self._tensor(self._entry_slots(step, "c4", 4)),
            num_entries=self._tensor((step.positions + 1) // 4),
            sequence=self._tensor(step.sequence),
        )

    def _c128_slots(self, step: _Step) -> torch.Tensor | None:
        if "c128" not in self.groups:
            return None
        slots = self._entry_slots(step, "c128", 128)[step.sequence]
        seen = (step.positions + 1) // 128
        np.copyto(slots, -1, where=np.arange(slots.shape[1]) >= seen[:, None])
        return self._tensor(slots)
