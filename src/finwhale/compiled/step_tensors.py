"""Converts a step to the flat list of tensors that a compiled graph gets, and back."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.ops.attention import Complete, Selected, Window
from finwhale.ops.paging import IndexStep, PageTable, Tokens, contiguous_rows
from finwhale.ops.slots import (
    complete_slots,
    index_step,
    padded,
    window_slots,
    write_slots,
)

# A graph reads complete entries in multiples of this number.
ENTRY_STEP = 32


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Converts positions and cached rows between a step and a graph's arguments.

    If the cache is not packed, a graph gets a pool as contiguous rows and row indices
    (`contiguous_rows`), whatever the pool's stride. So all layers of a kind share a graph.

    Attributes:
        packed: kernels read page tables, and attention runs between the graphs. Otherwise the
            operators read rotations and slots from the step's cache.
        rows_per_page: rows of a page of the window.
    """

    packed: bool
    rows_per_page: int

    def flat(
        self, tokens: Tokens, table: PageTable, rotary_LR: Tensor, window_pool: Tensor
    ) -> list[Tensor]:
        """The tensors of one step for one kind of layer."""
        if self.packed:
            token_tensors = [tokens.positions, tokens.sequence, tokens.query_start]
            return [*token_tensors, table.pages, table.first, rotary_LR]
        # All layers of a step that use the same rotary table share one list.
        kept = tokens.cache.graph_rotations
        found = kept.get(id(rotary_LR))
        if found is None:
            rotation = tokens.rotation(rotary_LR)
            written = write_slots(tokens, table) * contiguous_rows(window_pool)[1]
            found = kept[id(rotary_LR)] = [tokens.positions, rotation, written]
        return found

    def back(self, tensors: list[Tensor]) -> tuple[Tokens, PageTable, Tensor]:
        """The tokens, the window's page table and the rotary table, from the tensors of `flat`."""
        if self.packed:
            positions, sequence, query_start, pages, first, rotary = tensors
            tokens = Tokens(positions, sequence, query_start, max_len=0, max_query=0)
            return tokens, PageTable(pages, first, self.rows_per_page), rotary
        positions, rotation, slots = tensors
        tokens = Tokens(positions, positions, positions, max_len=0, max_query=0)
        table = PageTable(positions, positions, self.rows_per_page)
        # Tokens.rotation and slots.write_slots find these in the cache and never read the tables.
        tokens.cache.rotations[id(rotation)] = rotation, rotation
        tokens.cache.write_slots[table] = slots
        return tokens, table, rotation

    def flat_rows(
        self, tokens: Tokens, window: Window, entries: Selected | Complete | None
    ) -> list[Tensor]:
        """The rows that attention reads, for a graph that contains attention."""
        rows, row_step = contiguous_rows(window.pool)
        kept, key = tokens.cache.graph_windows, (window.table, window.size)
        indices = kept.get(key)
        if indices is None:
            indices = window_slots(tokens, window.table, window.size) * row_step
            kept[key] = indices
        return [rows, indices, *_entries(tokens, rows, entries)]

    def flat_entries(
        self, tokens: Tokens, table: PageTable, topk: int, row_step: int
    ) -> list[Tensor]:
        """For each token: the rows of its index keys [N,E], and its number of entries [N]."""
        kept = tokens.cache.graph_keys
        found = kept.get((table, topk))
        if found is None:
            step = index_step(tokens, table)
            slots = step.entry_slots.index_select(0, tokens.sequence)
            least = padded(topk)
            if slots.shape[1] < least:
                slots = F.pad(slots, (0, least - slots.shape[1]), value=-1)
            found = kept[table, topk] = [slots * row_step, step.num_entries]
        return found

    def back_entries(self, tensors: list[Tensor], tokens: Tokens, table: PageTable) -> None:
        """Put the tensors of `flat_entries` into the cache, as one sequence for each token."""
        slots, counts = tensors
        tokens.cache.index_steps[table] = IndexStep((), (), slots, counts)

    def back_rows(
        self, tensors: list[Tensor], tokens: Tokens, table: PageTable, size: int
    ) -> tuple[Window, Selected]:
        """The window and the entries, from the tensors of `flat_rows`."""
        pool, seen, entry_pool, slots = tensors
        tokens.cache.window_slots[table, size] = seen
        return Window(pool, table, size), Selected(entry_pool, slots, rows_per_page=1)


def _entries(
    tokens: Tokens, window_rows: Tensor, entries: Selected | Complete | None
) -> tuple[Tensor, Tensor]:
    """Contiguous rows, and indices [N,K] int32 of those to read. K is 0 without entries."""
    rows, row_step = (window_rows, 1) if entries is None else contiguous_rows(entries.pool)
    if isinstance(entries, Selected):
        return rows, entries.slots * row_step
    kept, key = tokens.cache.graph_entries, None if entries is None else entries.table
    slots = kept.get(key)
    if slots is None:
        if entries is None:
            slots = torch.empty(len(tokens.positions), 0, dtype=torch.int32)
        else:
            count = tokens.max_len // entries.ratio
            wide = complete_slots(tokens, entries.table, entries.ratio)
            seen = wide[:, : -(-count // ENTRY_STEP) * ENTRY_STEP].int()
            slots = (seen * row_step).contiguous()
        kept[key] = slots
    return rows, slots
