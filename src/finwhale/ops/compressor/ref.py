"""The reference implementation of compressors. The package's docstring has the legend."""

import torch
from torch import Tensor

from finwhale.ops.attention.ref import apply_rope, round_row
from finwhale.ops.compressor import CompressorWeight, CompressPart
from finwhale.ops.norm.ref import rms_norm
from finwhale.ops.paging import CompressStep, Tokens
from finwhale.ops.rounding import rotate_to_fp4
from finwhale.ops.slots import compress_step


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
    # Do not use softmax(): with several threads, its bits depend on the shape.
    weight = (gate - gate.amax(1, keepdim=True)).exp_()
    total = weight.sum(1)
    return weight.mul_(kv).sum(1).div_(total)


def compress(
    parts: tuple[CompressPart, ...],
    tokens: Tokens,
    rotary_LR: Tensor,
    eps: float,
    max_verify_tokens: int,
) -> None:
    for part in parts:
        state_table, entry_table = part.state.table, part.entries.table
        step = compress_step(tokens, state_table, entry_table, part.weight.ratio, max_verify_tokens)
        if step.entry_slots.shape[0]:
            rotation = rotary_LR.index_select(0, step.entry_positions)
            entry = _entries(part, step, rotation, eps).to(part.entries.pool.dtype)
            part.entries.pool.index_copy_(0, step.entry_slots, entry)
        if step.state_slots.shape[0]:
            kept = part.projected.index_select(0, step.state_sources)
            part.state.pool.index_copy_(0, step.state_slots, kept)


def _entries(part: CompressPart, step: CompressStep, rotation_MR: Tensor, eps: float) -> Tensor:
    """The entries that complete, rotated and rounded: [M,C]."""
    rows = part.projected
    if step.history_slots.shape[0]:
        rows = torch.cat((part.state.pool.index_select(0, step.history_slots), rows))
    sources = step.entry_sources
    mixed = _mix(
        rows.index_select(0, sources.clamp(min=0).flatten()).view(*sources.shape, -1),
        sources < 0,
        part.weight,
    )
    entry = apply_rope(rms_norm(mixed, part.weight.norm, eps), rotation_MR)
    if part.rounding == "nope":
        return round_row(entry, 2 * rotation_MR.shape[-2])
    if part.rounding == "key":
        return rotate_to_fp4(entry)
    return entry
