"""Chooses the tokens that each layer of a step computes: bounded replay, and the end of prompts.

A sequence that resumes after H cached tokens computes the last of these again, to fill its windows.
The layers from the last KV source on compute only the end of a prompt (step_inputs.Prompts). The
host knows the numbers of these tokens, so nothing here waits for the device.

Legend: N tokens, B sequences, M tokens of the tail.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.step_inputs import Prompts, StepInputs
from finwhale.ops.paging import StepCache, Tokens


@dataclass(frozen=True, slots=True)
class StepParts:
    """The tokens that the layers of a step compute.

    Attributes:
        inputs: with windows that begin where the sequence's windows have rows.
        recalling: the tokens for Engram's ids, which begin with the replay.
        writing: the tokens for entries: one that does not write them has position -1.
        tail: what the layers from first_tail_layer on compute; None: the same.
    """

    inputs: StepInputs
    recalling: Tokens
    writing: Tokens
    tail: "Tail | None" = None


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens at the ends of prompts, and those of decodes.

    Attributes:
        rows: [M] int64: these tokens among the N of the step.
        parts: the layers after the first one have only these.
    """

    rows: Tensor
    parts: StepParts


def step_parts(inputs: StepInputs, config: DeepseekV41Config) -> StepParts:
    tokens, prompts, window = inputs.tokens, inputs.prompts, config.sliding_window
    if prompts is None:
        return StepParts(inputs, tokens, tokens)
    written = tokens.positions >= prompts.cached[tokens.sequence]
    return StepParts(
        replace(inputs, tokens=_changed(tokens, windows_begin=prompts.cached - window)),
        _changed(tokens, windows_begin=prompts.cached - config.replay_tokens),
        _changed(tokens, positions=tokens.positions.masked_fill(~written, -1)),
        _tail(inputs, prompts, window),
    )


def _tail(inputs: StepInputs, prompts: Prompts, window: int) -> Tail:
    """The tokens at `window` positions before tail_end, and after them."""
    tokens, first_B = inputs.tokens, prompts.tail_end - window
    counts = [max(0, min(length, after + window)) for length, after in prompts.chunks]
    inside = tokens.positions >= first_B[tokens.sequence]
    before = torch.nn.functional.pad(inside.cumsum(0), (1, 0))  # each token, and the step's end
    number = torch.arange(1, 1 + sum(counts), device=before.device)
    rows = torch.searchsorted(before[1:], number)  # where `before` reaches each number
    own = _changed(
        tokens,
        positions=tokens.positions[rows],
        sequence=tokens.sequence[rows],
        query_start=before[tokens.query_start].int(),
        max_query=max(counts),
        windows_begin=first_B,
    )
    own_inputs = replace(inputs, token_ids=inputs.token_ids[rows], tokens=own)
    return Tail(rows, StepParts(own_inputs, own, own))


def _changed(tokens: Tokens, **changes: Any) -> Tokens:
    return replace(tokens, cache=StepCache(), **changes)
