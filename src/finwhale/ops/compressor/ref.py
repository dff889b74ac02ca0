"""Compressors, the definition. Legend in the package's docstring."""

from typing import Literal

import torch
from torch import Tensor

from finwhale.ops.attention.ref import apply_rope, round_row
from finwhale.ops.compressor import CompressorWeight, CompressStep
from finwhale.ops.linear import ACTIVATION_GROUP
from finwhale.ops.norm.ref import rms_norm
from finwhale.ops.rounding import round_e4m3


def _mix(rows_MSX: Tensor, missing_MS: Tensor, w: CompressorWeight) -> Tensor:
    """The gated average of S tokens for each entry: [M,S,X] -> [M,C]."""
    width = w.norm.shape[0]
    if w.ratio == 4:
        before, own = rows_MSX[:, :4], rows_MSX[:, 4:]
        kv = torch.cat((before[..., :width], own[..., width : 2 * width]), 1)
        gate = torch.cat((before[..., 2 * width : 3 * width], own[..., 3 * width :]), 1)
    else:
        kv, gate = rows_MSX[..., :width], rows_MSX[..., width:]
    gate = (gate + w.ape).masked_fill_(missing_MS[..., None], -torch.inf)
    return (gate.softmax(1).mul_(kv)).sum(1)


def compress(
    projected_NX: Tensor,
    w: CompressorWeight,
    step: CompressStep,
    rotation_MR: Tensor,
    eps: float,
    rounding: Literal["none", "nope", "whole"],
    state_rows_PX: Tensor,
    entry_rows_PC: Tensor,
) -> None:
    if step.entry_slots.shape[0]:
        rows = projected_NX
        if step.history_slots.shape[0]:
            rows = torch.cat((state_rows_PX.index_select(0, step.history_slots), rows))
        sources = step.entry_sources
        mixed = _mix(
            rows.index_select(0, sources.clamp(min=0).flatten()).view(*sources.shape, -1),
            sources < 0,
            w,
        )
        entry = apply_rope(rms_norm(mixed, w.norm, eps), rotation_MR)
        if rounding == "nope":
            entry = round_row(entry, 2 * rotation_MR.shape[-2])
        elif rounding == "whole":
            entry = round_e4m3(entry, ACTIVATION_GROUP)
        entry_rows_PC.index_copy_(0, step.entry_slots, entry.to(entry_rows_PC.dtype))
    if step.state_slots.shape[0]:
        kept = projected_NX.index_select(0, step.state_sources)
        state_rows_PX.index_copy_(0, step.state_slots, kept)
