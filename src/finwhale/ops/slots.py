"""Slot tables, which the reference operators and the CPU's table use instead of page tables.

The host computes them in numpy once per step and keeps them in the step's cache. The number of
numpy calls does not grow with the number of sequences. Padding tokens (position -1) are not
supported.

Legend: as in paging.py, and W window, E entries of the longest sequence, M entries that complete,
S tokens that an entry mixes, K slots per token.
"""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import TypeVar, TypeVarTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from finwhale.ops.compressor import STATE_KEPT
from finwhale.ops.paging import BLOCK_TOKENS, CompressStep, IndexStep, Ints, PageTable, Tokens

A = TypeVarTuple("A")
T = TypeVar("T")

# Entry slots are padded to a multiple of this: the reference operators' block of keys.
ENTRY_PAD = 128


def _once(make: Callable[[Tokens, Unpack[A]], T]) -> Callable[[Tokens, Unpack[A]], T]:
    """Keep the result of `make` for each of its arguments in the cache of the tokens."""
    name = make.__name__

    @wraps(make)
    def slots(tokens: Tokens, *args: *A) -> T:
        made: T | None = tokens.cache.slots.get((name, *args))
        if made is None:
            made = tokens.cache.slots[name, *args] = make(tokens, *args)
        return made

    return slots


def _tensor(array: Ints, tokens: Tokens) -> Tensor:
    return torch.from_numpy(array).to(tokens.positions.device)


@_once
def write_slots(tokens: Tokens, table: PageTable) -> Tensor:
    """Slot of each token's own row: [N] int64."""
    return _tensor(table.slots(tokens.host_sequence, tokens.host_positions), tokens)


@_once
def window_slots(tokens: Tokens, table: PageTable, size: int) -> Tensor:
    """Slots of positions p-W+1 .. p: [N,W] int64; -1 where windows do not begin yet."""
    last, first = tokens.host_positions[:, None], np.zeros(1, np.int64)
    if tokens.windows_begin is not None:
        first = np.maximum(tokens.windows_begin.cpu().numpy(), 0)[tokens.host_sequence][:, None]
    seen = last + np.arange(1 - size, 1)
    slots = table.slots(tokens.host_sequence[:, None], np.clip(seen, np.minimum(first, last), last))
    np.copyto(slots, -1, where=seen < first)
    return _tensor(slots, tokens)


@_once
def complete_slots(tokens: Tokens, table: PageTable, ratio: int) -> Tensor:
    """Slots of the entries that each token sees, in order: [N,K] int64, filled with -1."""
    slots = _entry_slots(tokens, table, ratio)[tokens.host_sequence]
    seen = (tokens.host_positions + 1) // ratio
    np.copyto(slots, -1, where=np.arange(slots.shape[1]) >= seen[:, None])
    return _tensor(slots, tokens)


@_once
def index_step(tokens: Tokens, table: PageTable) -> IndexStep:
    """The C4 entries of each sequence."""
    return IndexStep(
        query_start=tuple(tokens.host_query_start),
        max_entries=tuple(end // 4 for _, end in _chunks(tokens)),
        entry_slots=entry_slots(tokens, table, 4),
        num_entries=_tensor((tokens.host_positions + 1) // 4, tokens),
    )


@_once
def entry_slots(tokens: Tokens, table: PageTable, ratio: int) -> Tensor:
    """Slots [B,E] int64 of each sequence's entries after the step, filled with -1."""
    return _tensor(_entry_slots(tokens, table, ratio), tokens)


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


@_once
def compress_step(
    tokens: Tokens,
    state_table: PageTable,
    entry_table: PageTable | None,
    ratio: int,
    max_verify_tokens: int,
) -> CompressStep:
    """The entries of `ratio` tokens that complete, and the state that later steps need.

    Args:
        entry_table: None: the entries need no slots.
        max_verify_tokens: as in ops.compressor.Compress.
    """
    sequence, positions, chunks = tokens.host_sequence, tokens.host_positions, _chunks(tokens)
    align, before = STATE_KEPT[ratio]
    # The earliest position at which each sequence may continue: the step may reject drafts, but
    # not the first token.
    settled = [
        end if end - start > max_verify_tokens else min(start + 1, end) for start, end in chunks
    ]
    tails = np.array([count // align * align - before for count in settled], np.int64)
    ending = positions % BLOCK_TOKENS >= BLOCK_TOKENS - before
    kept = positions >= tails[sequence]
    if ending.any():
        kept |= ending & state_table.has_pages(sequence, positions)
    complete = (positions + 1) % ratio == 0
    history, slots, entry_positions = (np.empty(0, np.int64) for _ in range(3))
    entry_sources = np.empty((0, 2 * ratio if ratio == 4 else ratio), np.int64)
    if complete.any():
        owners, last = sequence[complete], positions[complete]
        mixed = last[:, None] + np.arange(1 - entry_sources.shape[1], 1)
        history, entry_sources = _sources(tokens, chunks, state_table, owners, mixed, ratio)
        entry_positions = last + 1 - ratio
        if entry_table is not None:
            slots = entry_table.slots(owners, last // ratio)
    return CompressStep(
        history_slots=_tensor(history, tokens),
        entry_sources=_tensor(entry_sources, tokens),
        entry_slots=_tensor(slots, tokens),
        entry_positions=_tensor(entry_positions, tokens),
        state_sources=_tensor(np.flatnonzero(kept), tokens),
        state_slots=_tensor(state_table.slots(sequence[kept], positions[kept]), tokens),
    )


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
    starts = np.array([start for start, _ in chunks], np.int64)
    completes = np.bincount(sequence_M, minlength=len(starts)) > 0
    first_kept = np.where(completes, np.maximum(0, starts // align * align - before), starts)
    counts = starts - first_kept
    owners = np.repeat(np.arange(len(counts)), counts)
    # For each sequence: index into (kept rows, new rows) minus position, of kept and of new rows.
    kept_row = np.cumsum(counts) - starts
    new_row = len(owners) + np.array(tokens.host_query_start[:-1]) - starts
    of = sequence_M[:, None]
    rows = tokens_MS + np.where(tokens_MS >= starts[of], new_row[of], kept_row[of])
    np.copyto(rows, -1, where=tokens_MS < 0)
    return state_table.slots(owners, np.arange(len(owners)) - kept_row[owners]), rows


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
