"""Sparse attention, the definition. Legend in the package's docstring."""

import torch
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP
from finwhale.ops.norm.ref import rms_norm
from finwhale.ops.rounding import round_e4m3

KEY_BLOCK = 128
# Values that one gather of key rows may hold: it bounds memory, whatever the chunk's length. On a
# CPU it also keeps them in the cache; on a GPU it is the 1 GiB that fills it with work.
MAX_GATHERED = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def apply_rope(x: Tensor, rotation: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the interleaved pairs of x's last R values. x [N,...,C]; rotation [N,R/2,2] float32.

    (a, b) -> (a cos - b sin, b cos + a sin), in float32; the inverse has -sin. Returns x's dtype.
    """
    width = 2 * rotation.shape[-2]
    for _ in range(x.dim() - 2):
        rotation = rotation.unsqueeze(1)
    cos, sin = rotation.unbind(-1)
    if inverse:
        sin = -sin
    pairs = x[..., -width:].float().unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    if x.shape[-1] == width:
        return rotated.to(x.dtype)
    return torch.cat((x[..., :-width], rotated.to(x.dtype)), -1)


def round_row(row: Tensor, rope_width: int) -> Tensor:
    """Round the nope part of rows [..., C] as it is stored: E4M3, a scale for each 64 values."""
    return torch.cat((round_e4m3(row[..., :-rope_width], NOPE_GROUP), row[..., -rope_width:]), -1)


def prepare_query(q_NAC: Tensor, rotation_NR: Tensor, eps: float) -> Tensor:
    q = q_NAC.float()
    q = q * torch.rsqrt(q.square().mean(-1, keepdim=True).add_(eps))
    return apply_rope(q, rotation_NR).to(q_NAC.dtype)


def store_window(
    kv_NC: Tensor,
    norm_C: Tensor,
    rotation_NR: Tensor,
    eps: float,
    round_nope: bool,
    rows_PC: Tensor,
    slots_N: Tensor,
) -> None:
    row = apply_rope(rms_norm(kv_NC.float(), norm_C, eps), rotation_NR)
    if round_nope:
        row = round_row(row, 2 * rotation_NR.shape[-2])
    rows_PC.index_copy_(0, slots_N, row.to(rows_PC.dtype))


def sparse_attention(
    q_NAC: Tensor,
    window_rows_PC: Tensor,
    window_slots_NW: Tensor,
    entry_rows_PC: Tensor | None,
    entry_slots_NK: Tensor | None,
    sink_A: Tensor,
    scale: float,
    out_NAC: Tensor,
) -> None:
    pools = [(window_rows_PC, slots) for slots in window_slots_NW.split(KEY_BLOCK, 1)]
    if entry_rows_PC is not None and entry_slots_NK is not None:
        pools += [(entry_rows_PC, slots) for slots in entry_slots_NK.split(KEY_BLOCK, 1)]
    num_keys = sum(slots.shape[1] for _, slots in pools)
    step = max(1, MAX_GATHERED[q_NAC.device.type] // (num_keys * q_NAC.shape[2]))
    for start in range(0, q_NAC.shape[0], step):
        block = slice(start, start + step)
        _attend(
            q_NAC[block].float() * scale,
            [(rows, slots[block]) for rows, slots in pools],
            sink_A,
            out_NAC[block],
        )


def _attend(
    q_NAC: Tensor, pools: list[tuple[Tensor, Tensor]], sink_A: Tensor, out_NAC: Tensor
) -> None:
    """Attention over blocks of at most KEY_BLOCK keys.

    Sums run block by block, so that a block without valid rows changes no bit: the result does
    not depend on how far the longest sequence of the batch made the others pad their slots.
    """
    gathered, scores = [], []
    maximum = sink_A[None, :, None]
    for rows_PC, slots_NK in pools:
        rows = rows_PC.index_select(0, slots_NK.clamp(min=0).flatten()).float()
        rows = rows.view(*slots_NK.shape, -1)
        score = torch.bmm(q_NAC, rows.transpose(1, 2))
        score.masked_fill_((slots_NK < 0)[:, None], -torch.inf)
        maximum = torch.maximum(maximum, score.amax(-1, keepdim=True))
        gathered.append(rows)
        scores.append(score)
    total = torch.exp(sink_A[None, :, None] - maximum)
    out = torch.zeros_like(q_NAC)
    for rows, score in zip(gathered, scores, strict=True):
        weight = score.sub_(maximum).exp_()
        total = total + weight.sum(-1, keepdim=True)
        out.baddbmm_(weight, rows)
    out_NAC.copy_(out.div_(total))


def inverse_rope(o_NAC: Tensor, rotation_NR: Tensor) -> Tensor:
    return apply_rope(o_NAC, rotation_NR, inverse=True)
