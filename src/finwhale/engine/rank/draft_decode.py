"""Decode steps that verify and draft, each of which takes its input from the one before it.

In a step the model processes a token and K drafts of every sequence (`verify`), and the sampler
chooses a token after each of them. The draft head then processes the same tokens and makes K more
drafts after the last accepted draft (`draft`). The tokens and positions of the next step stay on
the device, so the host can launch that step before it knows them. On a GPU, each half is one
captured graph for a batch size and a K.

Legend: B sequences of a step (padded to a captured size), W = 1 + K, N = B * W tokens, H residual
streams, D hidden, X tokens of this rank's part of the vocabulary.
"""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from finwhale.engine.plan.step_plan import DraftPlan, SamplingSettings, StepPlan
from finwhale.engine.rank.draft_noise import StaticDraftNoise
from finwhale.engine.rank.graphs import WARM_UP_STEPS, GraphMemory, Recorder
from finwhale.engine.rank.host_transfer import send
from finwhale.engine.rank.slot_tables import SlotTables
from finwhale.engine.rank.static_inputs import StaticInputs
from finwhale.models.protocol import (
    CacheGroup,
    DraftStart,
    Inline,
    Model,
    PagedCache,
    Segments,
    StepInputs,
)
from finwhale.ops.paging import PageTable, Tokens

# Page tables have columns for at least this many tokens of a step: drafts and those after them.
ROOM = 32


def verification_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture. Fewer than for plain decodes: each graph holds W rows of logits."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(384, 1025, 128)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class _Step:
    """The graphs of a batch size and a K, with the tensors that they read and write.

    Attributes:
        inputs: inputs of the model's forward.
        verifying, drafting: the two graphs; None: nothing is captured.
        logits: [N,X] float32.
        streams: residual streams [N,H,D].
    """

    inputs: StepInputs
    verifying: torch.cuda.CUDAGraph | None
    drafting: torch.cuda.CUDAGraph | None
    logits: Tensor
    streams: Tensor


class Verifications:
    """Runs steps in which every sequence verifies K drafts and gets K new ones.

    Args:
        drafts: the values of K.
        sizes: batch sizes, ascending; the last is the largest batch.
        max_len: the longest sequence, drafts included.
        memory: the memory pool of the captured graphs; None: the host launches every kernel.

    Attributes:
        ids: [B,W] int64: the known token and the drafts of the last step; None: the last step did
            not run here.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        groups: Items[CacheGroup],
        tables: SlotTables,
        *,
        drafts: Items[int],
        sizes: Items[int],
        max_len: int,
        device: torch.device,
        memory: GraphMemory | None = None,
    ) -> None:
        assert model.draft_head is not None
        self._model, self._head, self._cache = model, model.draft_head, cache
        self._device, self._memory, self._max_len = device, memory, max_len
        self.sizes, self.drafts = list(sizes), sorted(drafts)
        rows, width = self.sizes[-1], 1 + self.drafts[-1]
        self._no_row = rows
        self._static = StaticInputs(max(rows * width, ROOM), rows, groups, tables, max_len, device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        # For each row of the last step: its next tokens, and by how many tokens it is ahead of what
        # the host knew. The last row belongs to no sequence: a row linked to it carries nothing
        # over.
        self._carried, self._advanced = integers(rows + 1, width), integers(rows + 1)
        self._links = integers(rows).fill_(rows)
        self._sent_links: list[int] = []
        self._positions, self._chosen = integers(rows * width), integers(rows * width)
        self._noise = StaticDraftNoise(rows, width - 1, device)
        self._ordinal = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._captured: dict[tuple[int, int], _Step] = {}
        self._step: _Step | None = None
        self._count = 0
        if memory is not None:
            self._capture_all(memory)

    @property
    def ids(self) -> Tensor | None:
        if self._step is None:
            return None
        ids = self._step.inputs.token_ids
        return ids.view(-1, self._step.inputs.tokens.max_query)[: self._count]

    def forget(self) -> None:
        """The next step does not continue the last one."""
        self._step = None

    @torch.inference_mode()
    def verify(self, plan: StepPlan, settings: Mapping[int, SamplingSettings]) -> Tensor:
        """Run the model's forward: logits [count * W, X] float32, valid until the next step.

        Args:
            settings: of the plan's slots.
        """
        assert plan.draft is not None
        count, width = len(plan.slots), plan.lengths[0]
        self._count = count
        if self._memory is not None:
            size = self.sizes[bisect.bisect_left(self.sizes, count)]
        else:
            size = count
        self._static.fill(plan, decode=False)
        self._link(plan.draft, size)
        self._noise.fill(plan.slots, settings)
        if self._memory is None:
            self._step = None  # free its logits
            further = 0 if plan.draft.links is None else width - 1
            max_len = min(self._max_len, further + max(plan.ends))
            inputs = self._inputs(size, width, max_len)
            self._step = _Step(inputs, None, None, *self._verify(inputs, Inline()))
        else:
            self._step = self._captured[size, width]
            assert self._step.verifying is not None
            self._step.verifying.replay()
        return self._step.logits[: count * width]

    @torch.inference_mode()
    def further(self) -> Tensor:
        """[count] int64: number of tokens by which each sequence is ahead of its chunk."""
        return self._advanced.index_select(0, self._links[: self._count])

    @torch.inference_mode()
    def draft(self, chosen: Tensor) -> Tensor:
        """Count the accepted drafts, and make the next ones.

        Args:
            chosen: [count * W] int64: the tokens sampled from the logits.

        Returns:
            [count, K] int64: a copy of the new drafts.
        """
        step = self._step
        assert step is not None
        width = step.inputs.tokens.max_query
        self._chosen[: len(chosen)].copy_(chosen)
        if step.drafting is None:
            self._draft(step, Inline())
        else:
            step.drafting.replay()
        return self._carried[: self._count, 1:width].clone()

    def _link(self, draft: DraftPlan, size: int) -> None:
        links = list(draft.links or ())
        links += [self._no_row] * (size - len(links))
        if links != self._sent_links:
            (sent,) = send(self._device, np.array(links, np.int64))
            self._links[:size].copy_(sent)
            self._sent_links = links

    def _inputs(self, size: int, width: int, max_len: int) -> StepInputs:
        given = self._static.inputs(size * width, decode=False)
        return StepInputs(
            token_ids=given.token_ids,
            tokens=Tokens(
                positions=self._positions[: size * width],
                sequence=given.tokens.sequence,
                query_start=given.tokens.query_start[: size + 1],
                max_len=max_len,
                max_query=width,
            ),
            tables={name: _first_rows(table, size) for name, table in given.tables.items()},
        )

    def _verify(self, inputs: StepInputs, segments: Segments) -> tuple[Tensor, Tensor]:
        """The step's logits and residual streams; it continues where the last step ended."""
        self._take_over(inputs)
        streams = self._model(inputs, self._cache, segments)
        return self._model.compute_logits(streams), streams

    def _take_over(self, inputs: StepInputs) -> None:
        """Take ids and positions from the host, or from the last step where a row is linked."""
        width = inputs.tokens.max_query
        ids = inputs.token_ids.view(-1, width)
        links = self._links[: len(ids)]
        self._static.gather_ids(len(inputs.token_ids))
        carried = self._carried.index_select(0, links)[:, :width]
        ids.copy_(torch.where((links == self._no_row)[:, None], ids, carried))
        given = self._static.inputs(len(inputs.token_ids), decode=False).tokens.positions
        further = self._advanced.index_select(0, links)[:, None]
        torch.add(given.view(-1, width), further, out=inputs.tokens.positions.view(-1, width))

    def _draft(self, step: _Step, segments: Segments) -> None:
        inputs, width = step.inputs, step.inputs.tokens.max_query
        size = len(inputs.token_ids) // width
        chosen = self._chosen[: size * width]
        hidden = self._head(inputs, step.streams, chosen, self._cache, segments)
        right = chosen.view(size, width)[:, :-1] == inputs.token_ids.view(size, width)[:, 1:]
        accepted = right.cumprod(1).sum(1)
        last = self._ordinal[:size] * width + accepted
        self._advanced[:size].copy_(accepted)
        self._carried[:size, 0].copy_(chosen.index_select(0, last))
        if width == 1:
            return
        start = DraftStart(
            hidden=hidden.index_select(0, last),
            newest_ids=self._carried[:size, 0],
            tokens=Tokens(
                positions=inputs.tokens.positions.index_select(0, last),
                sequence=self._ordinal[:size],
                query_start=self._ordinal[: size + 1],
                max_len=self._max_len,
                max_query=1,
            ),
            tables=inputs.tables,
        )
        choose = self._noise.choose_drafts(self._model.sample, start.tokens.positions)
        drafts = self._head.draft(start, width - 1, self._cache, segments, choose)
        for place, ids in enumerate(drafts.ids, start=1):
            self._carried[:size, place].copy_(ids)

    def _capture_all(self, memory: GraphMemory) -> None:
        # The largest first: the smaller graphs then fit into the memory that it leaves in the pool.
        for size in reversed(self.sizes):
            for count in reversed(self.drafts):
                inputs = self._inputs(size, 1 + count, self._max_len)
                torch.cuda.synchronize(self._device)
                with torch.cuda.stream(memory.stream):
                    self._captured[size, 1 + count] = self._capture(inputs, memory)
        torch.cuda.synchronize(self._device)
        # No sequence continues from the warm-up's tokens.
        self._carried.zero_()
        self._advanced.zero_()

    @torch.inference_mode()
    def _capture(self, inputs: StepInputs, memory: GraphMemory) -> _Step:
        for _ in range(WARM_UP_STEPS):
            step = _Step(inputs, None, None, *self._verify(inputs, Inline()))
            self._draft(step, Inline())
        del step
        torch.cuda.synchronize(self._device)
        if not self._captured:
            # A capture cannot use memory that torch cached during the warm-up.
            torch.cuda.empty_cache()
        verifying, drafting = Recorder(False, memory.pool), Recorder(False, memory.pool)
        logits, streams = verifying.record(self._verify, inputs)
        step = _Step(inputs, None, None, logits, streams)
        drafting.record(self._draft, step)
        return replace(step, verifying=verifying.whole, drafting=drafting.whole)


def _first_rows(table: PageTable, size: int) -> PageTable:
    return PageTable(table.pages[:size], table.first[:size], table.rows_per_page)
