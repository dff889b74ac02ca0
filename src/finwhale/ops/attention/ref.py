"""The reference implementation of sparse attention. The package's docstring has the legend."""

import torch
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP, AllEntries, RowForm, TopkEntries, Window
from finwhale.ops.norm.ref import rms_norm
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.rounding import round_e4m3, scaled_e4m3
from finwhale.ops.slots import complete_slots, window_slots, write_slots

KEY_BLOCK = 128
# The most values of one gather of key rows. This bounds memory for chunks of any length. On a CPU,
# the values also stay in the processor's cache; on a GPU, 1 GiB is enough to keep it busy.
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
    """Round the nope part of rows [..., C] for storage: E4M3, a scale for each 64 values."""
    return torch.cat((round_e4m3(row[..., :-rope_width], NOPE_GROUP), row[..., -rope_width:]), -1)


def prepare_query(q_NAC: Tensor, rotation_NR: Tensor, eps: float | None) -> Tensor:
    """Per-head RMSNorm without weight unless eps is None, then rope: [N,A,C], a new tensor."""
    q = q_NAC.float()
    if eps is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True).add_(eps))
    return apply_rope(q, rotation_NR).to(q_NAC.dtype)


def store_window_rows(kv_NC: Tensor, form: RowForm, tokens: Tokens, window: CacheRows) -> None:
    row = apply_rope(rms_norm(kv_NC.float(), form.norm, form.eps), tokens.rotation(form.rotary))
    if form.round_nope:
        row = round_row(row, 2 * form.rotary.shape[-2])
    window.pool.index_copy_(0, write_slots(tokens, window.table), row.to(window.pool.dtype))


def prepare_qkv(
    q_lora_NQ: Tensor,
    q_norm_Q: Tensor,
    kv_NC: Tensor,
    form: RowForm,
    tokens: Tokens,
    window: CacheRows,
) -> Tensor:
    store_window_rows(kv_NC, form, tokens, window)
    return rms_norm(q_lora_NQ, q_norm_Q, form.eps)


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
    rotation_NR = tokens.rotation(rotary_LR)
    q_NAC = prepare_query(q_NAC, rotation_NR, eps)
    seen = window_slots(tokens, window.rows.table, window.size)
    pools = [(window.rows.pool, slots) for slots in seen.split(KEY_BLOCK, 1)]
    slots_NK = visible_slots(tokens, entries)
    if entries is not None and slots_NK is not None:
        pools += [(entries.rows.pool, slots) for slots in slots_NK.split(KEY_BLOCK, 1)]
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
    out_NAC.copy_(apply_rope(out_NAC, rotation_NR, inverse=True))


def write_rounded(o_NAC: Tensor, out_NAC: Tensor, scales_NS: Tensor) -> None:
    """Round attention's output o [N,A,C] to E4M3 and write it with its scales.

    Args:
        out_NAC: [N,A,C] E4M3.
        scales_NS: [N,S] float32: one scale for each A C / S values of a token.
    """
    o_NX = o_NAC.flatten(1)
    values, scales = scaled_e4m3(o_NX, o_NX.shape[1] // scales_NS.shape[1])
    out_NAC.copy_(values.view(o_NAC.shape))
    scales_NS.copy_(scales)


def visible_slots(tokens: Tokens, entries: TopkEntries | AllEntries | None) -> Tensor | None:
    """Slots [N,K] of the entries that each token sees, filled with -1; None: no entry yet."""
    if entries is None:
        return None
    if isinstance(entries, TopkEntries):
        slots = entries.slots
    else:
        slots = complete_slots(tokens, entries.rows.table, entries.ratio)
    return slots if slots.shape[1] else None


def _attend(
    q_NAC: Tensor, pools: list[tuple[Tensor, Tensor]], sink_A: Tensor, out_NAC: Tensor
) -> None:
    """Attention over blocks of at most KEY_BLOCK keys.

    Sums run block by block, so that a block without valid rows changes no bit. The result then does
    not depend on the padding of slots up to the longest sequence of the batch.
    """
    if q_NAC.shape[0] == 1 and q_NAC.device.type == "cpu":
        # With several threads, torch gives a single matrix other bits than a batch of two or more.
        twice = q_NAC.new_empty(2, *q_NAC.shape[1:])
        both = [(rows_PC, slots_NK.expand(2, -1)) for rows_PC, slots_NK in pools]
        _attend(q_NAC.expand(2, -1, -1), both, sink_A, twice)
        out_NAC.copy_(twice[:1])
        return
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
