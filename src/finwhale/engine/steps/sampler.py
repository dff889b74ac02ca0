"""Samples a step's tokens on the device, from a sampling plan and the slots' settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.engine.plan.step_plan import (
    AllowedRows,
    PenaltyRows,
    SamplingPlan,
    SamplingSettings,
    SlotAdmission,
)
from finwhale.engine.steps.host_transfer import send, send_named
from finwhale.ops.sampling import (
    AllowedTokens,
    Bias,
    Filters,
    LogprobRows,
    Penalties,
    Sample,
    SampledTokens,
    SamplingBatch,
)

# A bias that makes its token the most likely one for any finite logits.
CERTAIN = 1e30


@dataclass(frozen=True, slots=True)
class _SlotInputs:
    """Inputs of the operator that depend only on the slots and their order; reused between steps.

    Attributes:
        random_rows: the rows that are not greedy; `filters` has one entry for each.
    """

    slots: tuple[int, ...] | None = None
    random_rows: Sequence[int] = ()
    filters: Filters | None = None
    bias: Bias | None = None
    logprobs: tuple[LogprobRows, ...] = ()


class Sampler:
    """Samples tokens for the slots.

    A sequence's tokens depend only on its settings and its logits, not on the other rows of a step
    or on its slot.

    Args:
        sample_logits: samples from the model's logits (Model.sample).
        vocab_size: size of the whole vocabulary.

    Attributes:
        settings: the settings of each slot.
    """

    def __init__(self, sample_logits: Sample, vocab_size: int) -> None:
        self.sample_logits, self._vocab_size = sample_logits, vocab_size
        self.settings: dict[int, SamplingSettings] = {}
        self._slot_inputs = _SlotInputs()

    def admit(self, admitted: Sequence[SlotAdmission], freed: Sequence[int] = ()) -> None:
        """Free slots, then store the settings of new sequences."""
        for slot in freed:
            self.settings.pop(slot, None)
        for slot, settings in admitted:
            self.settings[slot] = settings
        if admitted:
            self._slot_inputs = _SlotInputs()

    def sample(
        self, plan: SamplingPlan, logits_SX: Tensor, ahead: Callable[[], Tensor] | None = None
    ) -> SampledTokens:
        """Launch the sampling of one token for each row.

        Args:
            logits_SX: [S,X] float32, this rank's logits of each row of the plan; not changed.
            ahead: returns for each row a number to add to the position in the plan: [S] int64 on
                the device. Called only if a row draws.
        """
        assert len(logits_SX) == len(plan.slots), "one row of logits for each row of the plan"
        return self.sample_logits(logits_SX, self._batch(plan, logits_SX.device, ahead))

    def score(self, logits_SX: Tensor, token_ids: Sequence[int], num_top: int) -> SampledTokens:
        """Find the log-probabilities of given tokens, one for each row.

        Log-probabilities are those of the raw logits. So a bias can make the operator choose the
        given token without changing them.

        Args:
            num_top: number of most likely tokens to return for each row.
        """
        count = len(token_ids)
        sent = send_named(
            logits_SX.device,
            rows_N=np.arange(count),
            ids_N=np.array(token_ids, np.int64),
            values_N=np.full(count, CERTAIN, np.float32),
        )
        wanted = LogprobRows(rows_G=sent["rows_N"], num_top=min(num_top, self._vocab_size))
        return self.sample_logits(logits_SX, SamplingBatch(bias=Bias(**sent), logprobs=(wanted,)))

    def _batch(
        self, plan: SamplingPlan, device: torch.device, ahead: Callable[[], Tensor] | None
    ) -> SamplingBatch:
        inputs = self._slot_inputs
        if inputs.slots != plan.slots:
            inputs = self._slot_inputs = self._make_slot_inputs(plan.slots, device)
        positions_R = None
        if inputs.filters is not None:
            positions_R = _positions(inputs.random_rows, plan, ahead, device)
        return SamplingBatch(
            filters=inputs.filters,
            positions_R=positions_R,
            penalties=self._penalties(plan.slots, plan.penalties, device),
            bias=inputs.bias,
            allowed=_allowed(plan.allowed, device),
            logprobs=inputs.logprobs,
        )

    def _make_slot_inputs(self, slots: tuple[int, ...], device: torch.device) -> _SlotInputs:
        vocab_size = self._vocab_size
        settings = [self.settings[slot] for slot in slots]
        wanted: dict[int, list[int]] = {}
        for row, one in enumerate(settings):
            if one.logprobs is not None:
                wanted.setdefault(min(one.logprobs, vocab_size), []).append(row)
        logprobs = tuple(
            LogprobRows(rows_G=send(device, np.array(rows, np.int64))[0], num_top=num)
            for num, rows in sorted(wanted.items())
        )
        random_rows = [row for row, one in enumerate(settings) if not one.greedy]
        return _SlotInputs(
            slots=slots,
            random_rows=random_rows,
            filters=_filters(settings, random_rows, vocab_size, device),
            bias=_bias(settings, device),
            logprobs=logprobs,
        )

    def _penalties(
        self, slots: Sequence[int], found: PenaltyRows | None, device: torch.device
    ) -> Penalties | None:
        if found is None:
            return None
        settings = [self.settings[slots[row]] for row in found.rows]

        def spread(values: Sequence[float], dtype: type) -> NDArray[Any]:
            return np.repeat(np.array(values, dtype), found.lengths)

        sent = send_named(
            device,
            rows_N=spread(found.rows, np.int64),
            ids_N=found.token_ids,
            counts_N=found.counts,
            repetition_N=spread([s.repetition_penalty for s in settings], np.float32),
            frequency_N=spread([s.frequency_penalty for s in settings], np.float32),
            presence_N=spread([s.presence_penalty for s in settings], np.float32),
        )
        return Penalties(**sent)


def _positions(
    random_rows: Sequence[int],
    plan: SamplingPlan,
    ahead: Callable[[], Tensor] | None,
    device: torch.device,
) -> Tensor:
    """The positions of the rows that draw: the plan's, plus the numbers that `ahead` returns."""
    planned = np.array(plan.positions, np.int64)
    if ahead is None:
        return send(device, planned)[0]
    planned_R, rows_R = send(device, planned, np.array(random_rows, np.int64))
    return planned_R + ahead().index_select(0, rows_R)


def draw_arrays(
    rows: Sequence[SamplingSettings],
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """The temperature, seed and index of rows that draw, as `Filters` expects them."""
    return (
        np.array([s.temperature for s in rows], np.float32),
        # The 64 lowest bits of any integer.
        np.array([s.seed & (1 << 64) - 1 for s in rows], np.uint64).view(np.int64),
        np.array([s.index for s in rows], np.int64),
    )


def _filters(
    settings: Sequence[SamplingSettings],
    random_rows: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> Filters | None:
    if not random_rows:
        return None
    rows = [settings[row] for row in random_rows]
    top_k = {i: s.top_k for i, s in enumerate(rows) if 0 < s.top_k < vocab_size}
    top_p = {i: s.top_p for i, s in enumerate(rows) if s.top_p < 1}
    fields = ("temperature_R", "seeds_R", "indices_R")
    arrays: dict[str, NDArray[Any]] = dict(zip(fields, draw_arrays(rows), strict=True))
    if len(rows) < len(settings):
        arrays["rows_R"] = np.array(random_rows, np.int64)
    if any(s.min_p for s in rows):
        arrays["min_p_R"] = np.array([s.min_p for s in rows], np.float32)
    if top_k:
        arrays["top_k_rows_K"] = np.array(list(top_k), np.int64)
        arrays["top_k_K"] = np.array(list(top_k.values()), np.int64)
    if top_p:
        arrays["top_p_rows_P"] = np.array(list(top_p), np.int64)
        arrays["top_p_P"] = np.array(list(top_p.values()), np.float64)
    sent: dict[str, Any] = {"rows_R": None, **send_named(device, **arrays)}
    return Filters(max_top_k=max(top_k.values(), default=0), **sent)


def _bias(settings: Sequence[SamplingSettings], device: torch.device) -> Bias | None:
    entries = [
        (row, token_id, value)
        for row, one in enumerate(settings)
        for token_id, value in one.logit_bias
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    sent = send_named(
        device,
        rows_N=np.array(rows, np.int64),
        ids_N=np.array(ids, np.int64),
        values_N=np.array(values, np.float32),
    )
    return Bias(**sent)


def _allowed(found: AllowedRows | None, device: torch.device) -> AllowedTokens | None:
    if found is None:
        return None
    rows = np.array(found.rows, np.int64)
    return AllowedTokens(**send_named(device, rows_G=rows, words_GW=found.words))
