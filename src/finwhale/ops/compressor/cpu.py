"""Compressors on a CPU, in numpy. Legend in the package's docstring."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.attention.cpu import round_nope_part
from finwhale.ops.compressor import CompressPart
from finwhale.ops.cpu_math import F32, I64, view
from finwhale.ops.indexer.cpu import rotate_to_fp4
from finwhale.ops.paging import CompressStep, Tokens
from finwhale.ops.slots import compress_step

# The most values that are gathered from projected rows at once.
MAX_GATHERED = 2**20


def _mix(rows_MSX: F32, missing_MS: NDArray[np.bool], ape_SC: F32, ratio: int) -> F32:
    """The gated average of S tokens for each entry: [M,S,X] -> [M,C]."""
    width = ape_SC.shape[1]
    if ratio == 4:
        kv = np.concatenate((rows_MSX[:, :4, :width], rows_MSX[:, 4:, width : 2 * width]), 1)
        gate = np.concatenate(
            (rows_MSX[:, :4, 2 * width : 3 * width], rows_MSX[:, 4:, 3 * width :]), 1
        )
    else:
        kv, gate = rows_MSX[..., :width], rows_MSX[..., width:]
    gate = np.add(gate, ape_SC)
    np.copyto(gate, -np.inf, where=missing_MS[..., None])
    np.subtract(gate, np.maximum.reduce(gate, axis=1, keepdims=True), gate)
    np.exp(gate, gate)
    total = np.add.reduce(gate, axis=1)
    np.multiply(gate, kv, gate)
    mixed: F32 = np.add.reduce(gate, axis=1)
    np.divide(mixed, total, mixed)
    return mixed


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
        projected: F32 = part.projected.numpy()
        if step.entry_slots.shape[0]:
            entry = _entries(part, projected, step, rotary_LR, eps)
            view(part.entries.pool)[view(step.entry_slots)] = entry
        if step.state_slots.shape[0]:
            kept = projected.take(view(step.state_sources), 0)
            view(part.state.pool)[view(step.state_slots)] = kept


def _entries(
    part: CompressPart, projected: F32, step: CompressStep, rotary_LR: Tensor, eps: float
) -> F32:
    """The entries that complete, rotated and rounded: [M,C]."""
    rows = projected
    if step.history_slots.shape[0]:
        rows = np.concatenate((view(part.state.pool)[view(step.history_slots)], rows))
    sources: I64 = view(step.entry_sources)
    turn = cpu_math.turns(rotary_LR)[view(step.entry_positions)]
    ape, norm = view(part.weight.ape), view(part.weight.norm)
    entry = np.empty((sources.shape[0], norm.shape[0]), np.float32)
    block = max(1, MAX_GATHERED // (sources.shape[1] * rows.shape[1]))
    for start in range(0, sources.shape[0], block):
        some = sources[start : start + block]
        gathered = rows.take(some, 0, mode="clip")
        entry[start : start + block] = _mix(gathered, some < 0, ape, part.weight.ratio)
    entry = cpu_math.rms_norm(entry, norm, eps)
    cpu_math.rotate(entry, turn)
    if part.rounding == "nope":
        round_nope_part(entry, 2 * turn.shape[1])
    elif part.rounding == "key":
        entry = rotate_to_fp4(entry[:, None])[:, 0]
    return entry
