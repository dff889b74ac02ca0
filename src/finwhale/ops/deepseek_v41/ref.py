"""The reference implementation of DeepSeek-V4.1's operators. The package has the legend."""

import torch
from torch import Tensor

from finwhale.number_formats import E2M1_MAX, e2m1_codes, e2m1_values
from finwhale.ops.attention.ref import apply_rope
from finwhale.ops.deepseek_v41 import (
    HashTensors,
    IndexRule,
    Pending,
    RowRounding,
    Selection,
    SharedEntryOps,
)
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.mhc.ref import mhc_post, mixes
from finwhale.ops.norm import RmsNorm
from finwhale.ops.norm.ref import rms_norm
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.rounding import round_e4m3, scaled_fp4, unscaled_fp4
from finwhale.ops.slots import (
    compress_step,
    entry_slots,
    padded,
    token_groups,
    window_slots,
    write_slots,
)

# The least scale of "fp4" rows is the least positive E4M3 value, 2^-9.
LEAST_FP4_AMAX = E2M1_MAX * 2.0**-9
FP4_ROW_GROUP = 16
SCALE_GROUP = 32  # values of Engram's rows that share a scale


def round_fp4(x: Tensor) -> Tensor:
    """x [..., C] as e2m1 with an E4M3 scale for each 16 values; float32, C in whole groups."""
    grouped = x.float().unflatten(-1, (-1, FP4_ROW_GROUP))
    amax = grouped.abs().amax(-1, keepdim=True).clamp_(min=LEAST_FP4_AMAX)
    scale = (amax / E2M1_MAX).to(torch.float8_e4m3fn).float()
    values = grouped / scale
    size = e2m1_values(x.device)[e2m1_codes(values.abs().clamp_(max=E2M1_MAX)).long()]
    return size.copysign_(values).mul_(scale).flatten(-2)


def _rounded(rows: Tensor, rounding: RowRounding) -> Tensor:
    if rounding == "e4m3":
        return round_e4m3(rows, 32)
    if rounding == "fp4":
        return round_fp4(rows)
    return unscaled_fp4(*scaled_fp4(rows)) if rounding == "key" else rows


def store_rows(
    values_NC: Tensor,
    rows: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    ratio: int,
    rounding: RowRounding,
) -> None:
    positions = tokens.positions
    completes = (positions >= 0) & ((positions + 1) % ratio == 0)
    (which,) = completes.nonzero(as_tuple=True)
    number = positions[which] // ratio
    own = apply_rope(values_NC[which].float(), rotary_LR.index_select(0, number * ratio))
    at = rows.table.slots(tokens.host_sequence[which.cpu().numpy()], number.cpu().numpy())
    slots = torch.from_numpy(at).to(positions.device)
    rows.pool.index_copy_(0, slots, _rounded(own, rounding).to(rows.pool.dtype))


def prepare_qkv(
    latents: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor],
    eps: float,
    rows: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    rounding: RowRounding,
    *,
    norm: RmsNorm = rms_norm,
) -> Tensor:
    q_NQ, kv_NC = (norm(x, w, eps) for x, w in zip(latents, norms, strict=True))
    store_rows(kv_NC, rows, rotary_LR, tokens, 1, rounding)
    return q_NQ


def merge_pairs(
    projected_NX: Tensor,
    norm_C: Tensor,
    state: CacheRows,
    tokens: Tokens,
    eps: float,
    max_verify_tokens: int,
) -> Tensor:
    step = compress_step(tokens, state.table, None, 2, max_verify_tokens)
    latents = projected_NX.new_zeros(len(projected_NX), len(norm_C))
    if len(step.entry_sources):
        rows = torch.cat((state.pool.index_select(0, step.history_slots), projected_NX))
        kv, gate = rows[step.entry_sources].chunk(2, -1)
        # Do not use softmax(): with several threads, its bits depend on the shape.
        weight = (gate - gate.amax(1, keepdim=True)).exp_()
        mixed = (weight * kv).sum(1) / weight.sum(1)
        latents[tokens.positions % 2 == 1] = rms_norm(mixed, norm_C, eps)
    kept = projected_NX.index_select(0, step.state_sources)
    state.pool.index_copy_(0, step.state_slots, kept)
    return latents


def index_queries(q_NIJ: Tensor, rotary_LR: Tensor, tokens: Tokens, rule: IndexRule) -> Tensor:
    """The rotated and rounded queries [N,I,J] float32."""
    queries = apply_rope(q_NIJ, tokens.rotation(rotary_LR)).float()
    return _rounded(queries, "key") if rule.round_query else queries


def select_shared(
    q_NIJ: Tensor,
    weights_NI: Tensor,
    keys: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    rule: IndexRule,
    blocks_NB: Tensor | None = None,
) -> Selection:
    queries = index_queries(q_NIJ, rotary_LR, tokens, rule)
    weights = weights_NI * rule.scale
    all_slots = entry_slots(tokens, keys.table, rule.ratio)
    visible = (tokens.positions + 1) // rule.ratio
    longest = int(visible.max()) if len(visible) else 0
    num_blocks = -(-longest // rule.block)
    # Attention adds blocks of slots, whose widths must not depend on the other tokens.
    width = min(rule.topk, padded(longest))
    slots = queries.new_full((len(q_NIJ), width), -1, dtype=torch.int32)
    kept = queries.new_full((len(q_NIJ), min(rule.keeps, num_blocks)), -1, dtype=torch.int32)
    # A sequence's tokens see the same entries, and a decode's token has its own.
    for some, sequences in token_groups(tuple(tokens.host_query_start)):
        for n in range(some.start, some.stop):
            sequence = min(sequences.start + n - some.start, sequences.stop - 1)
            count = int(visible[n])
            if not count:
                continue
            own = all_slots[sequence, :count]
            each = torch.relu(keys.pool.index_select(0, own).float() @ queries[n].T)
            scores = each @ weights[n]
            if blocks_NB is not None:
                chosen = blocks_NB[n][blocks_NB[n] >= 0].long()
                allowed = torch.zeros(num_blocks, dtype=torch.bool, device=own.device)
                allowed[chosen] = True
                allowed = allowed.repeat_interleave(rule.block)[:count]
                scores.masked_fill_(~allowed, -torch.inf)
            best = _best(scores, rule.topk)
            slots[n, : len(best)] = own[best].int()
            if rule.keeps:
                padding = (0, -count % rule.block)
                of_block = torch.nn.functional.pad(scores, padding, value=-torch.inf)
                of_block = of_block.unflatten(0, (-1, rule.block)).amax(1)
                of_block[-1] = torch.inf
                best = _best(of_block, rule.keeps)
                kept[n, : len(best)] = best.int()
    return Selection(slots, kept if rule.keeps else None)


def _best(scores: Tensor, most: int) -> Tensor:
    """Indices of the highest scores above -inf, ascending; the lowest index wins ties."""
    order = scores.sort(descending=True, stable=True).indices[:most]
    return order[scores[order] > -torch.inf].sort().values


def mhc_input(
    last: Pending | None, residual_NHD: Tensor, pre_NH: Tensor, w: MhcWeight, params: MhcParams
) -> tuple[Tensor, Tensor, None]:
    if last is not None:
        x, post, res = last
        assert isinstance(x, Tensor)
        residual_NHD = mhc_post(x, post, res, residual_NHD)
    x_ND = torch.bmm(pre_NH[:, None], residual_NHD.float()).squeeze(1)
    x_ND = rms_norm(x_ND, w.norm, params.rms_eps).to(residual_NHD.dtype)
    return x_ND, residual_NHD, None


def mhc_mixes(
    streams_NHD: Tensor, parts: Tensor | None, w: MhcWeight, params: MhcParams
) -> tuple[Tensor, Tensor, Tensor]:
    return mixes(streams_NHD.float(), w, params)


def recall_ids(ids_N: Tensor, size: int, pad: int, rows: CacheRows, tokens: Tokens) -> Tensor:
    rows.pool.index_copy_(0, write_slots(tokens, rows.table), ids_N[:, None].float())
    slots = window_slots(tokens, rows.table, size).flip(1)
    found = rows.pool[slots.clamp(min=0), 0].long()
    return found.masked_fill_(slots < 0, pad)


def collapse(streams_NHD: Tensor, pre_NH: Tensor) -> Tensor:
    shares = pre_NH[:, :, None] * streams_NHD.float()
    # In this order for any number of tokens.
    return sum(shares.unbind(1), shares.new_zeros(())).to(streams_NHD.dtype)


def hashed_rows(ids_NS: Tensor, hashes: HashTensors) -> Tensor:
    """The numbers [N,X] of the rows that ids address."""
    products = ids_NS * hashes.multipliers
    hashed, parts = products[:, :1], []
    for s, (sizes, starts) in enumerate(zip(hashes.sizes, hashes.starts, strict=True), 1):
        hashed = hashed ^ products[:, s : s + 1]
        parts.append(hashed % sizes + starts)
    return torch.cat(parts, 1)


def look_up(
    ids_NS: Tensor, hashes: HashTensors, rows: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    numbers = hashed_rows(ids_NS, hashes).to(rows.device)
    values = rows[numbers].to(ids_NS.device)
    if scale is not None:
        factors = scale[numbers].to(ids_NS.device).view(torch.float8_e8m0fnu).float()
        grouped = values.float().unflatten(-1, (-1, SCALE_GROUP)) * factors[..., None]
        values = grouped.flatten(-2)
    return values.to(dtype)


def engram_gate(
    residual_NHD: Tensor,
    key_NHD: Tensor,
    value_ND: Tensor,
    q_weight_HD: Tensor,
    k_weight_HD: Tensor,
    eps: float,
) -> Tensor:
    x, key = residual_NHD.float(), key_NHD.float()
    norms = [torch.rsqrt(t.square().mean(-1).add_(eps)) for t in (x, key)]
    product = (x * q_weight_HD.float() * k_weight_HD.float() * key).sum(-1)
    score = product * norms[0] * norms[1] * x.shape[-1] ** -0.5
    gate = torch.sigmoid(score.abs().clamp(min=1e-6).sqrt() * score.sign())
    return (x + gate[..., None] * value_ND.float()[:, None]).to(residual_NHD.dtype)


OPS = SharedEntryOps(
    store_rows=store_rows,
    prepare_qkv=prepare_qkv,
    merge_pairs=merge_pairs,
    select=select_shared,
    mhc_input=mhc_input,
    mhc_mixes=mhc_mixes,
    collapse=collapse,
    recall_ids=recall_ids,
    look_up=look_up,
    engram_gate=engram_gate,
)
