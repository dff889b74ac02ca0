"""Decode steps that verify drafts and make new ones, each with inputs from the previous step.

In a step the model processes a token and some drafts of every sequence (`verify`), and the sampler
chooses a token after each of them. The draft head then processes the same tokens and makes K more
drafts after the last accepted draft (`draft`). The tokens and positions of the next step stay on
the device, so the host can launch that step before it knows them. Sequences may have different
numbers of drafts. The step is padded to a captured number of sequences and of tokens. On a GPU,
`verify` and `draft` are one captured graph each for a batch size, a width and a K.

Legend: B sequences of a step (padded to a captured size), W the width (the step's tokens for each
sequence, on average and rounded up), N tokens (B * W in a captured step), H residual streams, D
hidden, X tokens of this rank's part of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from finwhale.engine.plan.executor import DeviceDrafts
from finwhale.engine.plan.step_plan import DraftPlan, LargestLane, SamplingSettings, StepPlan
from finwhale.engine.steps.draft_noise import StaticDraftNoise
from finwhale.engine.steps.graphs import Captured, GraphMemory
from finwhale.engine.steps.host_transfer import send
from finwhale.engine.steps.inputs import NO_STEP, StaticInputs, one_token_each
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.cache import CacheGroup, PagedCache
from finwhale.models.protocol import Model
from finwhale.models.step_inputs import DraftStart, Inline, Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.drafts import PlannedTokens, VerifiedStep

# Page tables have columns for at least this many tokens of a step.
ROOM = 32


# A step whose result are logits [N,X] float32 and residual streams [N,H,D].
Verification = Captured[StepInputs, tuple[Tensor, Tensor]]


class VerificationSteps:
    """The steps in which every sequence verifies its drafts and gets K new ones, captured or not.

    Args:
        largest: the kinds and the sizes of steps.
        memory: the memory pool of the captured graphs; None: the host launches every kernel.

    Attributes:
        step: the last step; None: it did not run here.
        lengths: number of tokens of each of its sequences: one, then the drafts.
        first: [B] int64: the index of each sequence's first token in the step.
        advanced: [B,..] int64: by how many tokens each sequence is ahead of the host's plan.
        confidences: confidences [count,K] float32 in the drafts of the last call of `draft`; empty:
            the head gives none.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        groups: Sequence[CacheGroup],
        tables: SlotTables,
        ops: Ops,
        largest: StepLimits,
        memory: GraphMemory | None = None,
    ) -> None:
        assert model.draft_head is not None
        device, max_len, kinds = model.device, largest.max_len, largest.draft_kinds
        sizes = largest.verify_graphs or (largest.num_seqs,)
        self._model, self._head, self._cache = model, model.draft_head, cache
        self._device, self._memory, self._max_len = device, memory, max_len
        self._continue_tokens, self._accept_drafts = ops.continue_tokens, ops.accept_drafts
        self.description = DeviceDrafts(
            sizes=() if memory is None else sizes,
            plain_sizes=() if memory is None else largest.decode_graphs,
            max_seqs=sizes[-1],
            kinds=kinds,
        )
        # The most tokens of a sequence, and of the largest step.
        rows, longest = sizes[-1], 1 + max(drafts for _, drafts in kinds)
        tokens = rows * max(width for width, _ in kinds)
        self._no_row, self._longest = rows, longest
        self._static = StaticInputs(max(tokens, ROOM), rows, groups, tables, max_len, device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        # For each row of the last step: its next tokens, and by how many tokens it is ahead of the
        # host's plan, repeated. The last row belongs to no sequence: it carries nothing over.
        self._last = integers(2, rows + 1, longest)
        self._carried, self.advanced = self._last[0], self._last[1]
        self._confidences = torch.zeros(rows, longest - 1, dtype=torch.float32, device=device)
        self._gives_confidences = False
        self.confidences: list[Tensor] = []
        # For each token, the index in _carried of its id; the last row of _carried stands for ids
        # from the host. For each sequence, the index of its first token, and the indices of the
        # tokens that have a draft after them; a missing draft has an index beyond all tokens.
        self._sources = integers(tokens).fill_(rows * longest)
        self.first = integers(rows)
        self._token_indices = integers(rows, longest - 1).fill_(tokens)
        self._sent_layout: tuple[object, ...] = ()
        self._positions, self._chosen = integers(tokens), integers(tokens)
        self._noise = StaticDraftNoise(rows, longest - 1, device)
        self._ordinal = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # The graphs of `verify` by B and N, and those of `draft` by B, N and K.
        self._verifying: dict[tuple[int, int], Verification] = {}
        self._drafting: dict[tuple[int, int, int], Captured[int, None]] = {}
        self.step: Verification | None = None
        self.lengths: tuple[int, ...] = ()
        self._lane_seqs = 0
        if memory is not None:
            self._capture_all(memory)

    def padded(self, largest: LargestLane, drafts: int) -> tuple[int, int]:
        """The numbers of sequences and of tokens to which a step is padded on every rank.

        Args:
            drafts: how many drafts each sequence gets after the step.
        """
        if self._memory is None:
            return largest.num_seqs, largest.num_tokens
        width = self.description.width(largest.num_seqs, largest.num_tokens, drafts)
        assert width is not None
        size = self.description.padded(largest.num_seqs, width)
        return size, size * width

    @torch.inference_mode()
    def run_padding(self, largest: LargestLane) -> bool:
        """Run a step without sequences; returns False, and runs nothing, if it is not captured."""
        if self._memory is None:
            return False
        drafts = largest.drafts[0][0] if largest.drafts else 0
        sizes = self.padded(largest, drafts)
        self._static.fill(NO_STEP, decode=True)
        self._send_layout((), None, *sizes)
        self._noise.fill((), {})
        self._verifying[sizes].replay()
        self._drafting[*sizes, drafts].replay()
        return True

    def forget(self) -> None:
        """Record that the next step does not continue the last one."""
        self.step = None

    @torch.inference_mode()
    def verify(self, plan: StepPlan, settings: Mapping[int, SamplingSettings]) -> Tensor:
        """Run the model's forward: logits [sum(plan.lengths), X] float32, until the next step.

        Args:
            settings: the settings of the plan's slots.
        """
        assert plan.draft is not None
        size, self.lengths = len(plan.slots), plan.lengths
        num_tokens = sum(plan.lengths)
        largest = plan.largest or LargestLane(num_tokens, size, False)
        self._lane_seqs, lane_rows = self.padded(largest, plan.draft.propose[0])
        if self._memory is not None:
            size, num_tokens = self._lane_seqs, lane_rows
        self._static.fill(plan, decode=False)
        self._send_layout(plan.lengths, plan.draft.previous_rows, size, num_tokens)
        self._noise.fill(plan.slots, settings)
        if self._memory is None:
            self.step = None  # free its logits
            further = 0 if plan.draft.previous_rows is None else self._longest - 1
            max_len = min(self._max_len, further + max(plan.ends))
            inputs = replace(self._inputs(size, num_tokens, max_len), lane_rows=lane_rows)
            self.step = Captured(inputs, self._verify(inputs, Inline()))
        else:
            self.step = self._verifying[size, num_tokens]
            self.step.replay()
        return self.step.out[0][: sum(plan.lengths)]

    @torch.inference_mode()
    def tokens_ahead(self) -> Tensor:
        """Number of tokens by which each row of the logits is ahead of its chunk: int64."""
        return self.advanced.view(-1).index_select(0, self._sources[: sum(self.lengths)])

    @torch.inference_mode()
    def draft(self, chosen: Tensor, plan: DraftPlan) -> Tensor:
        """Count the accepted drafts, and make the next ones.

        Args:
            chosen: int64: the tokens sampled from the logits.

        Returns:
            [count, K] int64: a copy of the new drafts.
        """
        step, count = self.step, len(self.lengths)
        assert step is not None
        num_drafts = plan.propose[0]
        _copied(chosen, out=self._chosen[: len(chosen)])
        graph = self._drafting.get((*_sizes(step.inputs), num_drafts))
        if graph is None:
            self._draft(step, num_drafts, Inline())
        else:
            graph.replay()
        drafts = _copied(self._carried[:count, 1 : 1 + num_drafts])
        self.confidences = []
        if num_drafts and self._gives_confidences:
            self.confidences.append(_copied(self._confidences[:count, :num_drafts]))
        return drafts

    def _send_layout(
        self,
        lengths: Sequence[int],
        previous_rows: Sequence[int] | None,
        size: int,
        num_tokens: int,
    ) -> None:
        """Send the indices of the step's tokens and drafts, if they differ from the last step's."""
        layout = (lengths, previous_rows, size, num_tokens)
        if layout == self._sent_layout:
            return
        most = self._longest
        starts = np.concatenate([[0], np.cumsum(lengths)])
        sources = np.full(num_tokens, self._no_row * most, np.int64)
        # A padding sequence begins at the last token, which is padding too.
        first = np.full(size, num_tokens - 1, np.int64)
        first[: len(lengths)] = starts[:-1]
        token_indices = first[:, None] + np.arange(most - 1)
        missing = np.ones(token_indices.shape, bool)
        missing[: len(lengths)] = np.arange(1, most) >= np.array(lengths)[:, None]
        token_indices[missing] = len(self._positions)
        if previous_rows is not None:
            rows = np.repeat(np.array(previous_rows, np.int64) * most, lengths)
            offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
            sources[: starts[-1]] = rows + offsets
        sent = send(self._device, sources, first, token_indices)
        parts = self._sources[:num_tokens], self.first[:size], self._token_indices[:size]
        for part, values in zip(parts, sent, strict=True):
            part.copy_(values)
        self._sent_layout = layout

    def _inputs(self, size: int, num_tokens: int, max_len: int) -> StepInputs:
        most = 1 if num_tokens == size else self._longest
        positions = self._positions[:num_tokens]
        return self._static.inputs(num_tokens, size, most, max_len, positions)

    def _verify(self, inputs: StepInputs, segments: Segments) -> tuple[Tensor, Tensor]:
        """Run the model's forward after the last step; returns logits and residual streams."""
        self._take_over(inputs)
        return self._model.forward_with_logits(inputs, self._cache, segments)

    def _take_over(self, inputs: StepInputs) -> None:
        """Take ids and positions from the host, or from the last step where a row is linked."""
        num_tokens = len(inputs.token_ids)
        ids, sources, positions = self._static.planned_tokens(num_tokens)
        planned = PlannedTokens(
            ids_S=ids, sources_N=sources, positions_N=positions, links_N=self._sources[:num_tokens]
        )
        self._continue_tokens(planned, self._last, inputs.token_ids, inputs.tokens.positions)

    def _draft(self, step: Verification, num_drafts: int, segments: Segments) -> None:
        inputs, (_, streams) = step.inputs, step.out
        size, num_tokens = _sizes(inputs)
        chosen = self._chosen[:num_tokens]
        hidden = self._head(inputs, streams, chosen, self._cache, segments)
        last, positions = self._accept(inputs)
        if not num_drafts:
            return
        start = DraftStart(
            hidden=hidden.index_select(0, last),
            newest_ids=self._carried[:size, 0],
            tokens=one_token_each(positions, self._max_len, self._ordinal),
            tables=inputs.tables,
            lane_rows=max(size, self._lane_seqs),
        )
        choose = self._noise.choose_drafts(self._model.sample, start.tokens.positions)
        drafts = self._head.draft(start, num_drafts, self._cache, segments, choose)
        self._carried[:size, 1 : 1 + num_drafts].copy_(drafts.ids.T)
        if drafts.confidences is not None:
            self._gives_confidences = True
            self._confidences[:size, :num_drafts].copy_(drafts.confidences.T)

    def _accept(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Note each sequence's accepted drafts and its newest token.

        Returns:
            [B] int64: the index and the position of each sequence's last accepted token.
        """
        size, num_tokens = _sizes(inputs)
        step = VerifiedStep(
            ids_N=inputs.token_ids,
            positions_N=inputs.tokens.positions,
            first_B=self.first[:size],
            token_indices_BP=self._token_indices[:size],
        )
        chosen = self._chosen[:num_tokens]
        return self._accept_drafts(chosen, step, self._carried[:size], self.advanced[:size])

    def _capture_all(self, memory: GraphMemory) -> None:
        for size, width in self.description.captured():
            self._capture(self._inputs(size, size * width, self._max_len), width, memory)
        memory.end_captures()
        # No sequence continues from the warm-up's tokens.
        self._carried.zero_()
        self.advanced.zero_()

    @torch.inference_mode()
    def _capture(self, inputs: StepInputs, width: int, memory: GraphMemory) -> None:
        numbers = [drafts for other, drafts in self.description.kinds if other == width]
        sizes = _sizes(inputs)

        def warm_up() -> None:
            step = Captured(inputs, self._verify(inputs, Inline()))
            for drafts in numbers:
                self._draft(step, drafts, Inline())

        def record() -> None:
            step = self._verifying[sizes] = memory.record(self._verify, inputs)
            for drafts in numbers:
                self._drafting[*sizes, drafts] = memory.record(partial(self._draft, step), drafts)

        is_first = all(tokens != width * size for size, tokens in self._verifying)
        memory.capture(record, warm_up if is_first else None)


def _sizes(inputs: StepInputs) -> tuple[int, int]:
    """B and N of a step."""
    return len(inputs.tokens.query_start) - 1, len(inputs.token_ids)


def _copied(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy a tensor with a kernel, which a GPU starts 2 us sooner than a copy of its memory."""
    return torch.add(tensor, 0, out=out)
