"""Sparse attention on a CPU, in numpy. Legend in the package's docstring."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.attention import NOPE_GROUP, AllEntries, RowForm, TopkEntries, Window
from finwhale.ops.attention.ref import visible_slots, write_rounded
from finwhale.ops.cpu_math import F32, constant, view
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.slots import window_slots, write_slots

Slots = NDArray[np.integer[Any]]

KEY_BLOCK = 128
# The first C128 entries are a block of their own: a context below 4,224 tokens needs no other.
FIRST_ENTRIES = 32
# The most values of one gather of key rows: they are read twice, so they should stay in the cache.
MAX_GATHERED = 2**18


def store_window_rows(kv_NC: Tensor, form: RowForm, tokens: Tokens, window: CacheRows) -> None:
    turn = cpu_math.turns(tokens.rotation(form.rotary))
    row = cpu_math.rms_norm(kv_NC.numpy(), view(form.norm), form.eps)
    cpu_math.rotate(row, turn)
    if form.round_nope:
        round_nope_part(row, 2 * turn.shape[1])
    view(window.pool)[view(write_slots(tokens, window.table))] = row


def prepare_qkv(
    q_lora_NQ: Tensor,
    q_norm_Q: Tensor,
    kv_NC: Tensor,
    form: RowForm,
    tokens: Tokens,
    window: CacheRows,
) -> Tensor:
    store_window_rows(kv_NC, form, tokens, window)
    return torch.from_numpy(cpu_math.rms_norm(q_lora_NQ.numpy(), view(q_norm_Q), form.eps))


def round_nope_part(row_NC: F32, rope_width: int) -> None:
    """Round the nope part of rows in place: E4M3, a scale for each 64 values."""
    nope = row_NC[:, :-rope_width]
    nope[...] = cpu_math.round_e4m3(nope, NOPE_GROUP)


def sparse_attention(
    q_NAC: Tensor,
    rotary_LR: Tensor,
    eps: float | None,
    tokens: Tokens,
    window: Window,
    entries: TopkEntries | AllEntries | None,
    sink_A: Tensor,
    scale: float,
    out_NAC: Tensor,
    scales_NS: Tensor | None = None,
) -> None:
    if scales_NS is not None:
        whole_NAC = torch.empty_like(q_NAC)
        sparse_attention(q_NAC, rotary_LR, eps, tokens, window, entries, sink_A, scale, whole_NAC)
        write_rounded(whole_NAC, out_NAC, scales_NS)
        return
    turn = cpu_math.turns(tokens.rotation(rotary_LR))
    raw: F32 = q_NAC.numpy()
    q = raw.copy() if eps is None else np.multiply(raw, cpu_math.inverse_rms(raw, eps))
    cpu_math.rotate(q, turn)
    np.multiply(q, constant(scale), q)
    out: F32 = out_NAC.numpy()
    sink: F32 = view(sink_A)
    rows, row_step = cpu_math.rows(window.rows.pool)
    indices = view(window_slots(tokens, window.rows.table, window.size)) * row_step
    blocks = [(rows, part) for part in _split(indices, (0,))]
    entry_slots = visible_slots(tokens, entries)
    if entries is not None and entry_slots is not None:
        slots = view(entry_slots)
        starts: tuple[int, ...] = (0,)
        if isinstance(entries, AllEntries):
            starts = (0, FIRST_ENTRIES)
            if tokens.max_len // entries.ratio <= FIRST_ENTRIES:
                slots = slots[:, :FIRST_ENTRIES]
        rows, row_step = cpu_math.rows(entries.rows.pool)
        blocks += [(rows, part) for part in _split(slots * row_step, starts)]
    num_tokens, heads, width = q.shape
    num_keys = sum(indices.shape[1] for _, indices in blocks)
    step = max(1, MAX_GATHERED // (num_keys * width))

    def run(tokens: slice) -> None:
        for start in range(tokens.start, tokens.stop, step):
            some = slice(start, min(start + step, tokens.stop))
            _attend(q[some], [(rows, indices[some]) for rows, indices in blocks], sink, out[some])

    if num_tokens <= step:
        _attend(q, blocks, sink, out)
    else:
        cpu_math.split_rows(num_tokens, 2 * num_keys * heads * width, run)
    cpu_math.rotate(out, np.conjugate(turn))


def _split(slots_NK: Slots, starts: tuple[int, ...]) -> list[Slots]:
    """Blocks that begin at `starts` and at every multiple of KEY_BLOCK.

    A token's blocks always have the same widths, and slots of -1 pad the last one. Blocks of only
    -1 change no bit, so the longest sequence of the batch does not matter.
    """
    width = slots_NK.shape[1]
    bounds = [*(s for s in starts if s < width), *range(KEY_BLOCK, width, KEY_BLOCK), width]
    return [slots_NK[:, start:end] for start, end in pairwise(bounds)]


def _attend(q_NAC: F32, blocks: list[tuple[F32, Slots]], sink_A: F32, out_NAC: F32) -> None:
    """Attention over blocks of keys, whose sums are added in order, as in the reference.

    blocks: (array of rows, index of each row that the tokens see; negative: none).
    """
    num_tokens, heads, _ = q_NAC.shape
    indices_NK = blocks[0][1]
    if len(blocks) > 1:
        indices_NK = np.concatenate([indices for _, indices in blocks], axis=1)
    weights_NAK = np.empty((num_tokens, heads, indices_NK.shape[1]), np.float32)
    gathered: list[tuple[F32, F32]] = []
    end = 0
    for rows_PC, block_indices_NK in blocks:
        # A negative index reads row 0, whose weight becomes 0.
        rows_NKC = rows_PC.take(block_indices_NK, 0, mode="clip")
        start, end = end, end + rows_NKC.shape[1]
        part = weights_NAK[:, :, start:end]
        cpu_math.matmul(q_NAC, rows_NKC.swapaxes(1, 2), part)
        gathered.append((part, rows_NKC))
    missing_NK = np.less(indices_NK, 0)
    if missing_NK.any():
        np.copyto(weights_NAK, -np.inf, where=missing_NK[:, None])
    maximum = np.maximum.reduce(weights_NAK, -1)
    np.maximum(maximum, sink_A, out=maximum)
    np.subtract(weights_NAK, maximum[:, :, None], weights_NAK)
    np.exp(weights_NAK, weights_NAK)
    total = np.subtract(sink_A, maximum)
    np.exp(total, total)
    weight, rows_NKC = gathered[0]
    np.add(total, np.add.reduce(weight, -1), total)
    cpu_math.matmul(weight, rows_NKC, out_NAC)
    for weight, rows_NKC in gathered[1:]:
        np.add(total, np.add.reduce(weight, -1), total)
        np.add(out_NAC, cpu_math.matmul(weight, rows_NKC), out_NAC)
    np.divide(out_NAC, total[:, :, None], out_NAC)
