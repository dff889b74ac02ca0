"""Slot tables, which the reference operators and the CPU's table use instead of page tables.

The host computes them in numpy once per step and keeps them in the step's cache. The number of
numpy calls does not grow with the number of sequences. Padding tokens (position -1) are not
supported.

Legend: as in paging.py, and W window, E entries of the longest sequence, M entries that complete,
S tokens that an entry mixes, K slots per token.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from finwhale.ops.compressor import STATE_KEPT
from finwhale.ops.paging import (
    BLOCK_TOKENS,
    CompressStep,
    IndexStep,
    Ints,
    PageTable,
    Tokens,
)

K = TypeVar("K")
T = TypeVar("T")

# Entry slots are padded to a multiple of this: the reference operators' block of keys.
ENTRY_PAD = 128


def _once(results: dict[K, T], key: K, make: Callable[[], T]) -> T:
    """The result of `make`, which runs once for each key."""
    made = results.get(key)
    if made is None:
        made = results[key] = make()
    return made


def _tensor(array: Ints, tokens: Tokens) -> Tensor:
    return torch.from_numpy(array).to(tokens.positions.device)


def write_slots(tokens: Tokens, table: PageTable) -> Tensor:
    """Slot of each token's own row: [N] int64."""
    return _once(
        tokens.cache.write_slots,
        table,
        lambda: _tensor(table.slots(tokens.host_sequence, tokens.host_positions), tokens),
    )


def window_slots(tokens: Tokens, table: PageTable, size: int) -> Tensor:
    """Slots of positions p-W+1 .. p: [N,W] int64; -1 before position 0."""

    def make() -> Tensor:
        seen = tokens.host_positions[:, None] + np.arange(1 - size, 1)
        slots = table.slots(tokens.host_sequence[:, None], np.maximum(seen, 0))
        np.copyto(slots, -1, where=seen < 0)
        return _tensor(slots, tokens)

    return _once(tokens.cache.window_slots, (table, size), make)


def complete_slots(tokens: Tokens, table: PageTable, ratio: int) -> Tensor:
    """Slots of the entries that each token sees, in order: [N,K] int64, filled with -1."""

    def make() -> Tensor:
        slots = _entry_slots(tokens, table, ratio)[tokens.host_sequence]
        seen = (tokens.host_positions + 1) // ratio
        np.copyto(slots, -1, where=np.arange(slots.shape[1]) >= seen[:, None])
        return _tensor(slots, tokens)

    return _once(tokens.cache.complete_slots, (table, ratio), make)


def index_step(tokens: Tokens, table: PageTable) -> IndexStep:
    """The C4 entries of each sequence."""
    return _once(
        tokens.cache.index_steps,
        table,
        lambda: IndexStep(
            query_start=tuple(tokens.host_query_start),
            max_entries=tuple(end // 4 for _, end in _chunks(tokens)),
            entry_slots=_tensor(_entry_slots(tokens, table, 4), tokens),
            num_entries=_tensor((tokens.host_positions + 1) // 4, tokens),
        ),
    )


def compress_step(
    tokens: Tokens,
    state_table: PageTable,
    entry_table: PageTable,
    ratio: int,
    max_verify_tokens: int,
) -> CompressStep:
    """The entries of `ratio` tokens that complete, and the state that later steps need.

    Args:
        max_verify_tokens: as in ops.compressor.Compress.
    """
    return _once(
        tokens.cache.compress_steps,
        (entry_table, ratio),
        lambda: _compress_step(tokens, state_table, entry_table, ratio, max_verify_tokens),
    )


def _chunks(tokens: Tokens) -> list[tuple[int, int]]:
    """(start, end) positions of each sequence's tokens; (0, 0) for a sequence without tokens."""
    chunks = []
    for first, last in pairwise(tokens.host_query_start):
        start = int(tokens.host_positions[first]) if last > first else 0
        chunks.append((start, start + last - first))
    return chunks


def _entry_slots(tokens: Tokens, table: PageTable, ratio: int) -> Ints:
    """Slots [B,E] of each sequence's entries after the step, filled with -1."""
    counts = [end // ratio for _, end in _chunks(tokens)]
    width = padded(max(counts, default=0))
    out = np.full((len(counts), width), -1, np.int64)
    if width:
        rows = table.rows_per_page
        pages = table.host_pages[: len(counts), : -(-width // rows)]
        slots = (pages[:, :, None] * rows + np.arange(rows)).reshape(len(counts), -1)
        columns = min(width, slots.shape[1])
        seen = np.arange(columns) < np.array(counts)[:, None]
        np.copyto(out[:, :columns], slots[:, :columns], where=seen)
    return out


def _compress_step(
    tokens: Tokens,
    state_table: PageTable,
    entry_table: PageTable,
    ratio: int,
    max_verify_tokens: int,
) -> CompressStep:
    chunks = _chunks(tokens)
    query_start = tokens.host_query_start
    align, before = STATE_KEPT[ratio]
    # The earliest position at which each sequence may continue: the step may reject drafts, but
    # not the first token.
    settled = [
        end if end - start > max_verify_tokens else min(start + 1, end) for start, end in chunks
    ]
    tails = [count // align * align - before for count in settled]
    kept = [
        (b, first + token - start, token)
        for b, ((start, end), first, tail) in enumerate(
            zip(chunks, query_start, tails, strict=False)
        )
        for token in range(max(start, tail), end)
    ]
    kept += _ends_of_blocks(chunks, query_start, state_table, before, tails)
    entries = [
        (b, entry)
        for b, (start, end) in enumerate(chunks)
        for entry in range(start // ratio, end // ratio)
    ]
    owners, sources, positions = np.array(kept, np.int64).reshape(-1, 3).T
    history, entry_slots, entry_positions = (np.empty(0, np.int64) for _ in range(3))
    mixed = 2 * ratio if ratio == 4 else ratio
    entry_sources = np.empty((0, mixed), np.int64)
    if entries:
        sequence, entry = np.array(entries, np.int64).T
        last_tokens = (entry[:, None] + 1) * ratio + np.arange(-mixed, 0)
        history, entry_sources = _sources(tokens, chunks, state_table, sequence, last_tokens, ratio)
        entry_slots, entry_positions = entry_table.slots(sequence, entry), entry * ratio
    return CompressStep(
        history_slots=_tensor(history, tokens),
        entry_sources=_tensor(entry_sources, tokens),
        entry_slots=_tensor(entry_slots, tokens),
        entry_positions=_tensor(entry_positions, tokens),
        state_sources=_tensor(sources.copy(), tokens),
        state_slots=_tensor(state_table.slots(owners, positions), tokens),
    )


def _ends_of_blocks(
    chunks: list[tuple[int, int]],
    query_start: list[int],
    state_table: PageTable,
    before: int,
    tails: list[int],
) -> list[tuple[int, int, int]]:
    """(sequence, new row, position) of the rows to keep at the ends of blocks within the chunks.

    The list omits positions from `tails` on, because every sequence keeps those rows anyway.
    """
    kept = []
    for b, (start, end) in enumerate(chunks):
        if not before or start // BLOCK_TOKENS == end // BLOCK_TOKENS:
            continue
        for block_end in range((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS, end, BLOCK_TOKENS):
            if state_table.has_page(b, block_end - 1):
                tokens = range(max(start, block_end - before), min(block_end, tails[b]))
                kept += [(b, query_start[b] + token - start, token) for token in tokens]
    return kept


def _sources(
    tokens: Tokens,
    chunks: list[tuple[int, int]],
    state_table: PageTable,
    sequence_M: Ints,
    tokens_MS: Ints,
    ratio: int,
) -> tuple[Ints, Ints]:
    """Slots of the kept rows that entries mix, and indices [M,S] into (kept rows, new rows)."""
    align, before = STATE_KEPT[ratio]
    query_start = tokens.host_query_start
    completing = set(sequence_M.tolist())
    first_kept = [
        max(0, start // align * align - before) if b in completing else start
        for b, (start, _) in enumerate(chunks)
    ]
    history = [
        (b, token)
        for b, ((start, _), first) in enumerate(zip(chunks, first_kept, strict=True))
        for token in range(first, start)
    ]
    # For each sequence: index into (kept rows, new rows) minus position, of kept and of new rows.
    kept_row, new_row = [], []
    count = 0
    for b, ((start, _), first) in enumerate(zip(chunks, first_kept, strict=True)):
        kept_row.append(count - first)
        new_row.append(len(history) + query_start[b] - start)
        count += start - first
    starts = np.array([start for start, _ in chunks], np.int64)[sequence_M, None]
    rows = np.where(
        tokens_MS >= starts,
        tokens_MS + np.array(new_row, np.int64)[sequence_M, None],
        tokens_MS + np.array(kept_row, np.int64)[sequence_M, None],
    )
    np.copyto(rows, -1, where=tokens_MS < 0)
    owners, positions = np.array(history, np.int64).reshape(-1, 2).T
    return state_table.slots(owners, positions), rows


def padded(entries: int) -> int:
    """The next multiple of ENTRY_PAD."""
    return -(-entries // ENTRY_PAD) * ENTRY_PAD


def token_groups(query_start: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Divide a step into groups: (tokens, sequences) slices.

    Adjacent sequences with one token each form one group. Every other sequence is its own group.
    """
    groups: list[tuple[slice, slice]] = []
    for b, (start, end) in enumerate(pairwise(query_start)):
        if groups and end - start == 1:
            tokens, sequences = groups[-1]
            count = tokens.stop - tokens.start
            if count == sequences.stop - sequences.start and sequences.stop == b:
                groups[-1] = (slice(tokens.start, end), slice(sequences.start, b + 1))
                continue
        if end > start:
            groups.append((slice(start, end), slice(b, b + 1)))
    return groups
