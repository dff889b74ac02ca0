"""Builds the input tensors of one forward from a step plan.

The host builds the arrays with numpy and copies them to the device in one transfer. The number of
numpy calls does not grow with the number of sequences. ops/paging.py has the legend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.engine.plan.pages import BlockTable
from finwhale.engine.plan.step_plan import PENDING, StepPlan
from finwhale.engine.rank.host_transfer import send
from finwhale.engine.rank.slot_tables import SlotTables
from finwhale.engine.rank.static_inputs import aligned
from finwhale.models.cache import CacheGroup
from finwhale.models.step_inputs import StepInputs
from finwhale.ops.paging import PageTable, Tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of a step.

    Attributes:
        logits_rows: [M] int64: the rows of the step's tokens whose logits are wanted.
    """

    inputs: StepInputs
    logits_rows: Tensor


class BatchBuilder:
    """Builds batches for one model's cache groups on one device.

    Args:
        tables: the page tables of the plans' slots.
        sampled: [num_seqs] int64 on the device: the ids sampled in the previous step, row by row.
            None: no token is ever pending.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        tables: SlotTables,
        device: torch.device,
        sampled: Tensor | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.tables = tables
        self.device = device
        self.sampled = sampled

    def build(self, plan: StepPlan) -> Batch:
        """Build the inputs of a step."""
        count = len(plan.slots)
        token_ids = np.array(plan.token_ids, np.int64)
        ends, ordinal = plan.ends, np.arange(count, dtype=np.int32)
        if len(token_ids) == count:
            positions, sequence = np.array(plan.starts, np.int64), ordinal
        else:
            spans = zip(plan.starts, ends, strict=True)
            positions = np.concatenate([np.arange(start, end) for start, end in spans])
            sequence = np.repeat(ordinal, plan.lengths)
        tables = [self.tables[slot] for slot in plan.slots]
        paged = [_pages_and_first([t[group.name] for t in tables]) for group in self.groups]
        ids, sent_positions, rows, pending, sampled_rows, sequences, starts, *sent = send(
            self.device,
            token_ids,
            positions,
            np.array(plan.logits_rows, np.int64),
            np.flatnonzero(token_ids == PENDING),
            np.array(plan.pending_rows, np.int64),
            sequence,
            np.array(plan.query_start, np.int32),
            *(array for pair in paged for array in pair),
        )
        if len(pending):
            assert self.sampled is not None
            ids.index_copy_(0, pending, self.sampled.index_select(0, sampled_rows))
        return Batch(
            inputs=StepInputs(
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
                    for group, pages, first in zip(self.groups, sent[::2], sent[1::2], strict=True)
                },
            ),
            logits_rows=rows,
        )

    def logits_rows(self, plan: StepPlan) -> Tensor:
        """Rows of the step's tokens whose logits are wanted: [M] int64."""
        (rows,) = send(self.device, np.array(plan.logits_rows, np.int64))
        return rows


def _pages_and_first(tables: Sequence[BlockTable]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(pages [B,P], first [B]) of a step's sequences in one group."""
    # Rows are aligned for wide loads, as in captured steps, so that the same kernels run.
    width = aligned(max(1, *(len(table.pages) for table in tables)))
    pages = np.array([t.pages + [0] * (width - len(t.pages)) for t in tables], np.int32)
    return pages, np.array([table.first for table in tables], np.int32)
