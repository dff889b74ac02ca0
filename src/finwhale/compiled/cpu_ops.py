"""Operators of the CPU's table as plain torch, which inductor fuses: float32, any number of rows.

They compute the same as the references, but in a form in which shapes stay symbolic and small GEMMs
become loops. (torch would divide even a small GEMM between threads, and wait for them.) GEMMs with
packed weights stay custom operators.

Legend as in the operator families' packages.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.number_formats import E4M3_MAX
from finwhale.ops import Ops
from finwhale.ops.attention import NOPE_GROUP, Complete, Selected, Window
from finwhale.ops.attention.ref import apply_rope
from finwhale.ops.indexer import IndexQueries
from finwhale.ops.linear import ACTIVATION_GROUP, LinearWeight
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.moe import Dispatched, ExpertWeight
from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.rounding import MIN_AMAX, MIN_FP4_AMAX, fp4_group, hadamard
from finwhale.ops.slots import index_step, window_slots, write_slots

# Number of outputs that are adjacent in memory: two vectors of float32.
COLUMNS = 32
_EXPONENT = 0x7F800000
# Rounds up to a power of two, then goes from a group's scale to its lowest exponent, six binades
# below.
_TO_LOWEST = 0x007FFFFF - (6 << 23)
_MAGIC = (20 << 23) + 0x400000
_FP4_UP = 0x3FFFFF
_FP4_MAGIC = (22 << 23) + 0x400000


def traced(registered: Ops) -> Ops:
    """The operator table for tracing on a CPU: this module's operators, and `registered` ones."""

    def rounded(x: Tensor, round_input: bool) -> Tensor:
        return round_e4m3(x, ACTIVATION_GROUP) if round_input else x

    def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
        x_NK = rounded(x_NK, w.round_input)
        return registered.linear(x_NK, replace(w, round_input=False))

    def grouped_linear(x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
        assert scales_NS is None, "a graph's input is not rounded"
        x_NGK = rounded(x_NGK, w.round_input)
        return registered.grouped_linear(x_NGK, replace(w, round_input=False))

    def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
        first, second = LinearWeight(w.w13, w.round_input), LinearWeight(w.w2, w.round_input)
        return linear(clamped_swiglu(linear(x_ND, first), limit), second)

    return replace(
        registered,
        mhc_pre=mhc_pre,
        mhc_post_pre=mhc_post_pre,
        linear=linear,
        grouped_linear=grouped_linear,
        prepare_qkv=prepare_qkv,
        route_by_score=route_by_score,
        prepare_index_queries=prepare_index_queries,
        select_entries=select_entries,
        sparse_attention=sparse_attention,
        route_by_hash=route_by_hash,
        experts_dispatch=experts_dispatch,
        experts_compute=experts_compute,
        experts_combine=experts_combine,
        swiglu_mlp=swiglu_mlp,
    )


def columns(w: ExpertWeight) -> ExpertWeight:
    """Reorder the routed experts' weights for `experts_compute`.

    w13 becomes [E, 2I/32, D, 32] and w2 [E, D/32, I, 32], with rows of zeros to fill the last 32.
    They become float16 if that holds every value.
    """

    def ordered(weight: Tensor) -> Tensor:
        narrow = weight.half()
        weight = narrow if torch.equal(narrow.float(), weight) else weight
        padded: Tensor = F.pad(weight, (0, 0, 0, -weight.shape[1] % COLUMNS))
        blocks: Tensor = padded.unflatten(1, (-1, COLUMNS))
        return blocks.transpose(2, 3).contiguous()

    return replace(w, w13=ordered(w.w13), w2=ordered(w.w2))


def round_e4m3(x: Tensor, group: int) -> Tensor:
    """Like rounding.round_e4m3, for |x| < 2^100, except that a rounded zero is +0. For the method
    see cpu_math.round_e4m3.
    """
    width = x.shape[-1]
    rest = width % group
    if rest:
        parts = [_round_groups(x[..., width - rest :], rest)]
        if width > rest:
            parts.insert(0, _round_groups(x[..., : width - rest], group))
        return torch.cat(parts, -1)
    return _round_groups(x, group)


def _round_groups(x: Tensor, group: int) -> Tensor:
    values = x.unflatten(-1, (-1, group))
    scale = values.abs().amax(-1, keepdim=True).clamp(min=MIN_AMAX) * (1.0 / E4M3_MAX)
    lowest = (scale.view(torch.int32) + _TO_LOWEST) & _EXPONENT
    shift = torch.maximum(values.view(torch.int32) & _EXPONENT, lowest) + _MAGIC
    magic = shift.view(torch.float32)
    rounded: Tensor = ((values + magic) - magic).flatten(-2)
    return rounded


def round_fp4(x: Tensor) -> Tensor:
    """Like rounding.scaled_fp4 and back, for |x| < 2^100. For the method see indexer.cpu."""
    values = x.unflatten(-1, (-1, fp4_group(x.shape[-1])))
    amax = values.abs().amax(-1, keepdim=True).clamp(min=MIN_FP4_AMAX)
    scale = ((amax.view(torch.int32) + _FP4_UP) & _EXPONENT) - (2 << 23)
    shift = torch.maximum(values.view(torch.int32) & _EXPONENT, scale) + _FP4_MAGIC
    magic = shift.view(torch.float32)
    rounded: Tensor = ((values + magic) - magic).flatten(-2)
    return rounded


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D


def _small_gemm(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
    """x weight^T [N,M] for a small M. inductor fuses it with the loop that computes x."""
    return (x_NK[:, None] * weight_MK).sum(-1)


def _sinkhorn(mix_NHH: Tensor, num_iters: int, eps: float) -> Tensor:
    """Like mhc.ref.sinkhorn: u_i <- sum_j mix_ij / v_j + eps u_i, also v; mix_ij / (u_i v_j)."""
    v_NH = mix_NHH.sum(1) + eps
    u_NH = torch.ones_like(v_NH)
    for _ in range(num_iters - 1):
        u_NH = (mix_NHH / v_NH[:, None]).sum(2) + eps * u_NH
        v_NH = (mix_NHH / u_NH[:, :, None]).sum(1) + eps * v_NH
    return mix_NHH / u_NH[:, :, None] / v_NH[:, None]


def mhc_pre(residual_NHD: Tensor, w: MhcWeight, params: MhcParams) -> tuple[Tensor, Tensor, Tensor]:
    H = residual_NHD.shape[1]
    flat = residual_NHD.flatten(1)
    rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + params.rms_eps)
    mixes = _small_gemm(flat, w.fn) * rstd * w.scale + w.base
    gates = torch.sigmoid(mixes[:, : 2 * H])
    logits = mixes[:, 2 * H :].unflatten(1, (H, H))
    mix_NHH = (logits - logits.amax(-1, keepdim=True)).exp()
    mix_NHH = mix_NHH / mix_NHH.sum(-1, keepdim=True) + params.eps
    res_NHH = _sinkhorn(mix_NHH, params.num_iters, params.eps)
    collapsed = ((gates[:, :H] + params.eps)[:, :, None] * residual_NHD).sum(1)
    return rms_norm(collapsed, w.norm, params.rms_eps), gates[:, H:] * 2.0, res_NHH


def mhc_post_pre(
    x_ND: Tensor,
    post_NH: Tensor,
    res_NHH: Tensor,
    residual_NHD: Tensor,
    w: MhcWeight,
    params: MhcParams,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixed = (res_NHH[..., None] * residual_NHD[:, :, None]).sum(1)
    streams_NHD = mixed + post_NH[:, :, None] * x_ND[:, None]
    return *mhc_pre(streams_NHD, w, params), streams_NHD


def prepare_qkv(
    q_lora_NQ: Tensor,
    q_norm_Q: Tensor,
    kv_NC: Tensor,
    kv_norm_C: Tensor,
    rotary_LR: Tensor,
    eps: float,
    round_nope: bool,
    tokens: Tokens,
    pool: Tensor,
    table: PageTable,
) -> Tensor:
    """Reads the rotation and the slots from the step's cache."""
    rotation_NR = tokens.rotation(rotary_LR)
    row = apply_rope(rms_norm(kv_NC, kv_norm_C, eps), rotation_NR)
    if round_nope:
        rope = 2 * rotation_NR.shape[-2]
        row = torch.cat((round_e4m3(row[:, :-rope], NOPE_GROUP), row[:, -rope:]), -1)
    pool.index_copy_(0, write_slots(tokens, table), row)
    return rms_norm(q_lora_NQ, q_norm_Q, eps)


def _scores(x_ND: Tensor, gate_ED: Tensor) -> Tensor:
    """sqrt(softplus(x gate^T)); softplus(z) = max(z, 0) + log(1 + e^-|z|)."""
    z = _small_gemm(x_ND, gate_ED)
    return ((-z.abs()).exp().log1p() + z.clamp(min=0)).sqrt()


def _weights(scores_NE: Tensor, ids_NK: Tensor, scaling: float) -> Tensor:
    chosen = scores_NE.gather(1, ids_NK)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def route_by_score(
    x_ND: Tensor,
    gate_ED: Tensor,
    bias_E: Tensor,
    topk: int,
    scaling: float,
    positions_N: Tensor,
) -> tuple[Tensor, Tensor]:
    scores = _scores(x_ND, gate_ED)
    ids_NK = (scores + bias_E).topk(topk, -1).indices
    return ids_NK, _weights(scores, ids_NK, scaling)


def route_by_hash(
    x_ND: Tensor,
    gate_ED: Tensor,
    tid2eid_VK: Tensor,
    token_ids_N: Tensor,
    scaling: float,
    positions_N: Tensor,
) -> tuple[Tensor, Tensor]:
    ids_NK = tid2eid_VK.index_select(0, token_ids_N)
    return ids_NK, _weights(_scores(x_ND, gate_ED), ids_NK, scaling)


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); gate_up [...,2I]."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return gate / ((-gate).exp() + 1.0) * up.clamp(-limit, limit)


def experts_dispatch(ids_NK: Tensor, num_experts: int) -> Dispatched:
    return Dispatched(ids_NK)


def experts_compute(
    x_ND: Tensor, weights_NK: Tensor, pairs: Dispatched, w: ExpertWeight, limit: float
) -> Tensor:
    """Expects weights from `columns`. Each (token, expert) pair is one loop over the matrix."""
    x_ND = round_e4m3(x_ND, ACTIVATION_GROUP) if w.round_input else x_ND
    width = w.w2.shape[2]
    gate_up = _each(x_ND[:, None], w.w13[pairs.ids])[..., : 2 * width]
    hidden = clamped_swiglu(gate_up, limit) * weights_NK[:, :, None]
    hidden = round_e4m3(hidden, ACTIVATION_GROUP) if w.round_input else hidden
    return _each(hidden, w.w2[pairs.ids])[..., : x_ND.shape[1]]


def experts_combine(
    each_NKD: Tensor,
    ids_NK: Tensor,
    shared_ND: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A step on a CPU has no padding, so no pair is skipped."""
    mixed: Tensor = each_NKD.sum(1)
    return mixed if shared_ND is None else mixed + shared_ND


def _each(x: Tensor, weight_NKBXC: Tensor) -> Tensor:
    """x [N,1,X] or [N,K,X] times the matrix of each pair: [N,K,M]."""
    return (weight_NKBXC.float() * x[:, :, None, :, None]).sum(-2).flatten(-2)


def sparse_attention(
    q_NAC: Tensor,
    rotary_LR: Tensor,
    eps: float,
    tokens: Tokens,
    window: Window,
    entries: Selected | Complete | None,
    sink_A: Tensor,
    scale: float,
    out_NAC: Tensor,
    scales_NS: Tensor | None = None,
) -> None:
    """Expects selected entries, possibly none. Reads the window's slots from the step's cache."""
    assert isinstance(entries, Selected) and scales_NS is None
    rotation_NR = tokens.rotation(rotary_LR)
    q = q_NAC * torch.rsqrt(q_NAC.square().mean(-1, keepdim=True) + eps)
    q = apply_rope(q, rotation_NR) * scale
    slots_NW = window_slots(tokens, window.table, window.size)
    rows_NKC = torch.cat(
        (window.pool[slots_NW.clamp(min=0)], entries.pool[entries.slots.clamp(min=0)]), 1
    )
    missing_NK = torch.cat((slots_NW < 0, entries.slots < 0), 1)
    scores = (q[:, :, None] * rows_NKC[:, None]).sum(-1)
    scores = scores.masked_fill(missing_NK[:, None], -torch.inf)
    maximum = torch.maximum(scores.amax(-1), sink_A)
    weights = (scores - maximum[:, :, None]).exp()
    total = (sink_A - maximum).exp() + weights.sum(-1)
    out = (weights[..., None] * rows_NKC[:, None]).sum(2) / total[:, :, None]
    out_NAC.copy_(apply_rope(out, rotation_NR, inverse=True))


def prepare_index_queries(
    q_NIC: Tensor, rotary_LR: Tensor, tokens: Tokens, topk: int, round_query: bool
) -> IndexQueries:
    """Prepares the queries for any number of entries, which a graph does not know."""
    q = apply_rope(q_NIC, tokens.rotation(rotary_LR))
    return IndexQueries(round_fp4(hadamard(q)) if round_query else q)


def select_entries(
    q_NIC: Tensor | IndexQueries,
    weights_NI: Tensor,
    key_pool: Tensor,
    rotary_LR: Tensor,
    tokens: Tokens,
    table: PageTable,
    topk: int,
    scale: float,
    round_query: bool,
) -> Tensor:
    """Returns slots in order of score, not of position. Reads each token's entries (at least topk
    slots) and their number from the step's cache.
    """
    if isinstance(q_NIC, Tensor):
        q_NIC = prepare_index_queries(q_NIC, rotary_LR, tokens, topk, round_query)
    q = q_NIC.values
    step = index_step(tokens, table)
    keys_NEC = key_pool[step.entry_slots.clamp(min=0)]
    relu = (q[:, :, None] * keys_NEC[:, None]).sum(-1).relu()
    scores = (relu * (weights_NI * scale)[:, :, None]).sum(1)
    entries = torch.arange(scores.shape[1])
    # As in indexer.ref, the lowest entry wins among equal scores, and -0 equals 0.
    bits = scores.masked_fill(entries >= step.num_entries[:, None], -torch.inf) + 0.0
    order = bits.view(torch.int32).to(torch.int64)
    order = torch.where(order < 0, order ^ 0x7FFFFFFF, order)
    keys = (order << 32) | (0xFFFFFFFF - entries)
    chosen = 0xFFFFFFFF - (keys.topk(topk, 1).values & 0xFFFFFFFF)
    slots = step.entry_slots.gather(1, chosen)
    return slots.masked_fill(chosen >= step.num_entries[:, None], -1).int()
