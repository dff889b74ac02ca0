"""Chunks of sequences to the tensors that one forward reads.

Built with numpy on the host, with a number of numpy calls that does not grow with the number of
sequences, then copied to the device in one transfer. Legend as in ops/paging.py.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.rank.host_transfer import send
from finwhale.engine.rank.static_inputs import aligned
from finwhale.models.protocol import CacheGroup, StepInputs
from finwhale.ops.paging import PageTable, Tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's inputs, and the rows of its tokens whose logits are wanted ([M] int64): of each
    chunk that completes its sequence, the last known token's and its drafts'.
    """

    inputs: StepInputs
    logits_rows: Tensor


class BatchBuilder:
    """Builds batches for one model's cache groups on one device.

    Args:
        sampled: [num_seqs] int64 on the device: the ids that the step before chose, row by row;
            left out where no token is ever pending.
    """

    def __init__(
        self, groups: Items[CacheGroup], device: torch.device, sampled: Tensor | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.device = device
        self.sampled = sampled

    def build(self, chunks: Items[Chunk]) -> Batch:
        """The inputs of the chunks, in their order; logits of each that completes."""
        lengths = [c.end - c.start for c in chunks]
        query_start = list(accumulate(lengths, initial=0))
        token_ids = [t for c in chunks for t in c.ids]
        if query_start[-1] == len(chunks):
            positions = np.array([c.start for c in chunks], np.int64)
            sequence = np.arange(len(chunks), dtype=np.int32)
        else:
            positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
            sequence = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
        tables = [_table(group, chunks) for group in self.groups]
        ids, places, rows, pending, sampled_rows, sequences, starts, *paged = send(
            self.device,
            np.array(token_ids, np.int64),
            positions,
            _logits_rows(chunks),
            np.array(
                [e - 1 for c, e in zip(chunks, query_start[1:], strict=True) if c.pending], np.int64
            ),
            np.array([c.sequence.sampled_row for c in chunks if c.pending], np.int64),
            sequence,
            np.array(query_start, np.int32),
            *(array for table in tables for array in table),
        )
        if len(pending):
            assert self.sampled is not None
            ids.index_copy_(0, pending, self.sampled.index_select(0, sampled_rows))
        return Batch(
            inputs=StepInputs(
                token_ids=ids,
                tokens=Tokens(
                    positions=places,
                    sequence=sequences,
                    query_start=starts,
                    max_len=max(c.end for c in chunks),
                    max_query=max(lengths),
                ),
                tables={
                    group.name: PageTable(pages, first, group.rows_per_page)
                    for group, pages, first in zip(
                        self.groups, paged[::2], paged[1::2], strict=True
                    )
                },
            ),
            logits_rows=rows,
        )

    def logits_rows(self, chunks: Items[Chunk]) -> Tensor:
        """Rows of the step's tokens whose logits are wanted: [M] int64."""
        (rows,) = send(self.device, _logits_rows(chunks))
        return rows


def _logits_rows(chunks: Items[Chunk]) -> NDArray[np.int64]:
    ends = accumulate(c.end - c.start for c in chunks)
    rows = [r for c, e in zip(chunks, ends, strict=True) for r in range(e - c.num_logits, e)]
    return np.array(rows, np.int64)


def _table(group: CacheGroup, chunks: Items[Chunk]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(pages [B,P], first [B]) of a step's sequences in one group."""
    tables = [c.sequence.tables[group.name] for c in chunks]
    # Rows that begin where loads may be wide, as those of captured steps do: the same kernels.
    width = aligned(max(1, *(len(table.pages) for table in tables)))
    pages = np.array([t.pages + [0] * (width - len(t.pages)) for t in tables], np.int32)
    return pages, np.array([table.first for table in tables], np.int32)
