"""Drafting in steps that the host plans one by one: steps with prefill, and all steps on a CPU.

After each forward of the model the draft head processes the same tokens, each with the token that
follows it. It then drafts after the last accepted token. The device decides which drafts of the
step are accepted, so the next drafts do not wait for the host.

Legend: N tokens of the step, M rows whose logits are wanted, B sequences that get drafts, G of them
with equal numbers of drafts, K the most drafts of a sequence, H residual streams, D hidden,
X tokens of this rank's part of the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.config import DraftTokens
from finwhale.engine.plan.step_plan import SamplingSettings, StepPlan
from finwhale.engine.steps.draft_noise import choose_drafts
from finwhale.engine.steps.host_transfer import send
from finwhale.engine.steps.inputs import Batch, one_token_each
from finwhale.errors import FinwhaleError
from finwhale.models.cache import PagedCache
from finwhale.models.protocol import DraftHead, ModelConfig
from finwhale.models.step_inputs import DraftStart, Inline
from finwhale.ops.paging import PageTable
from finwhale.ops.sampling import Sample


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of the model whose tokens the draft head has not processed yet.

    Attributes:
        batch: the step's inputs; None: a graph has them, and the draft head needs none.
        streams: residual streams [N,H,D].
        logits: [M,X] float32: this rank's logits of the tokens that the plan wants.
    """

    batch: Batch | None
    streams: Tensor
    logits: Tensor


def check_can_draft(draft_tokens: DraftTokens, config: ModelConfig) -> None:
    """Raise FinwhaleError if the checkpoint has no draft head for that many drafts."""
    most = config.max_draft_tokens
    if draft_tokens == 0 or (most and (draft_tokens == "auto" or draft_tokens <= most)):
        return
    if config.draft_head is None:
        raise FinwhaleError("draft_tokens: this checkpoint has no draft head to draft with: use 0")
    raise FinwhaleError(
        f'draft_tokens must be 0 to {most} or "auto" with this checkpoint, got {draft_tokens}'
    )


class Drafter:
    """Makes drafts with a draft head.

    Args:
        sample: samples from the model's logits (Model.sample).

    Attributes:
        confidences: confidences [K,B] float32 in the drafts of the last call of `propose`; empty:
            the head gives none.
    """

    def __init__(
        self, head: DraftHead, sample: Sample, cache: PagedCache, device: torch.device
    ) -> None:
        self._head, self._sample, self._cache, self._device = head, sample, cache, device
        self._segments = Inline()
        self.confidences: list[Tensor] = []

    @torch.inference_mode()
    def propose(
        self,
        forward: Forward,
        plan: StepPlan,
        chosen_M: Tensor | None,
        settings: Mapping[int, SamplingSettings],
    ) -> Tensor | None:
        """Run the draft head on a step's tokens, and make as many drafts as the plan says.

        Args:
            chosen_M: int64: the tokens sampled from the logits; None: none were sampled.
            settings: the settings of the plan's slots.

        Returns:
            int64 [K,B]: drafts of the chunks that get any, in order. A chunk that gets fewer than K
            drafts is filled with zeros. None: no chunk gets drafts.
        """
        assert forward.batch is not None and plan.draft is not None
        inputs, rows = forward.batch.inputs, forward.batch.logits_rows
        (following,) = send(self._device, _following(plan))
        if chosen_M is not None:
            following.index_copy_(0, rows, chosen_M)
        hidden = self._head(inputs, forward.streams, following, self._cache, self._segments)
        propose, ends = plan.draft.propose, plan.ends
        chunk_indices = [index for index, count in enumerate(propose) if count]
        groups = dict.fromkeys(filter(None, propose), 0)
        if plan.largest is not None:
            groups = dict(plan.largest.drafts)
        if not chunk_indices or chosen_M is None:
            self._serve_drafts(groups)
            return None
        last_B = self._last_rows(plan, chosen_M)
        counts = [propose[index] for index in chunk_indices]
        max_len = max(ends[index] + propose[index] for index in chunk_indices)
        out = chosen_M.new_zeros(max(counts), len(counts))
        self.confidences = []
        # One call of the head makes equally many drafts for all its chunks. Most steps need one.
        for count, most in sorted(groups.items()):
            group = [i for i, other in enumerate(counts) if other == count]
            if not group:
                self._head.serve_others(count, most)
                continue
            group_G, chunk_indices_G = send(
                self._device,
                np.array(group, np.int64),
                np.array([chunk_indices[i] for i in group], np.int64),
            )
            last_G = last_B.index_select(0, group_G)
            rows_G = rows.index_select(0, last_G)
            positions_G = inputs.tokens.positions.index_select(0, rows_G)
            start = DraftStart(
                hidden=hidden.index_select(0, rows_G),
                newest_ids=chosen_M.index_select(0, last_G),
                tokens=one_token_each(positions_G, max_len),
                tables={"window": _rows(inputs.tables["window"], chunk_indices_G)},
                lane_rows=most,
            )
            slots = [plan.slots[chunk_indices[i]] for i in group]
            choose = choose_drafts(self._sample, [settings[slot] for slot in slots], positions_G)
            drafts = self._head.draft(start, count, self._cache, self._segments, choose)
            for row, ids in zip(out, drafts.ids, strict=False):
                row.index_copy_(0, group_G, ids)
            if drafts.confidences is not None:
                if not self.confidences:
                    self.confidences = [torch.zeros_like(out, dtype=torch.float32)]
                for row, values in zip(self.confidences[0], drafts.confidences, strict=False):
                    row.index_copy_(0, group_G, values)
        return out

    @torch.inference_mode()
    def serve_others(self, lane_rows: int, drafts: Mapping[int, int]) -> None:
        """Take part in a step in which this data-parallel rank has no tokens.

        Args:
            lane_rows: see StepInputs.
            drafts: the most sequences of a rank, by the number of drafts that each gets.
        """
        self._head.serve_others_tokens(lane_rows)
        self._serve_drafts(drafts)

    def _serve_drafts(self, groups: Mapping[int, int]) -> None:
        """Take part in the drafts of other ranks: the most sequences by number of drafts."""
        for count, most in sorted(groups.items()):
            if most:
                self._head.serve_others(count, most)

    def _last_rows(self, plan: StepPlan, chosen_M: Tensor) -> Tensor:
        """[B]: row of the last accepted token of each chunk that gets drafts."""
        assert plan.draft is not None
        drafts, propose = plan.draft.drafts, plan.draft.propose
        most = max(map(len, drafts))
        starts = accumulate(plan.num_logits, initial=0)
        first = [at for count, at in zip(propose, starts, strict=False) if count]
        expected = [
            [*ids, *[-1] * (most - len(ids))]
            for ids, count in zip(drafts, propose, strict=True)
            if count
        ]
        first_B, expected_BK = send(
            self._device,
            np.array(first, np.int64),
            np.array(expected, np.int64).reshape(len(first), most),
        )
        if not most:
            return first_B
        steps = torch.arange(most, device=self._device)
        indices = (first_B[:, None] + steps).clamp_(max=len(chosen_M) - 1)
        right = chosen_M[indices] == expected_BK
        return first_B + right.cumprod(1).sum(1)


def _following(plan: StepPlan) -> NDArray[np.int64]:
    """The token after each token of a step; arbitrary if that token is not sampled yet."""
    assert plan.draft is not None
    ids = np.roll(np.array(plan.token_ids, np.int64), -1)
    ids[np.array(plan.query_start[1:]) - 1] = plan.draft.next_ids
    return ids


def _rows(table: PageTable, indices_B: Tensor) -> PageTable:
    return PageTable(
        table.pages.index_select(0, indices_B),
        table.first.index_select(0, indices_B),
        table.rows_per_page,
    )
