"""The reference implementation of mixture of experts. The package's docstring has the legend."""

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.ops.moe import Dispatched, ExpertWeight
from finwhale.ops.rounding import round_e4m3


def prepare_experts(w: ExpertWeight) -> ExpertWeight:
    return w


def finish_experts(w: ExpertWeight) -> ExpertWeight:
    return w


def _scores(x_ND: Tensor, gate_ED: Tensor) -> Tensor:
    """sqrt(softplus(x gate^T)) in float32; softplus(z) = max(z, 0) + log(1 + e^-|z|)."""
    z = F.linear(x_ND.float(), gate_ED.float())
    return torch.exp(-z.abs()).log1p_().add_(z.clamp(min=0)).sqrt_()


def _weights(scores_NE: Tensor, ids_NK: Tensor, scaling: float) -> Tensor:
    chosen = scores_NE.gather(1, ids_NK)
    return chosen.div_(chosen.sum(-1, keepdim=True).add_(1e-20)).mul_(scaling)


def route_by_score(
    x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor, topk: int, scaling: float, positions_N: Tensor
) -> tuple[Tensor, Tensor]:
    scores = _scores(x_ND, gate_ED)
    # topk guarantees no order among equals.
    ids_NK = (scores + bias_E).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
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
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32; gate_up [...,2I]."""
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=limit)
    silu = gate / torch.exp(-gate).add_(1.0)
    return silu.mul_(up.clamp(-limit, limit))


def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
    x = round_e4m3(x_ND, w.input_group) if w.input_group else x_ND
    hidden = clamped_swiglu(F.linear(x.to(w.w13.dtype), w.w13), limit)
    if w.input_group:
        hidden = round_e4m3(hidden, w.input_group)
    return F.linear(hidden.to(w.w2.dtype), w.w2)


def dispatch(ids_NK: Tensor, num_experts: int) -> Dispatched:
    return Dispatched(ids_NK)


def compute(
    x_ND: Tensor, weights_NK: Tensor, pairs: Dispatched, w: ExpertWeight, limit: float
) -> Tensor:
    """Run one expert after the other on its tokens; the output of skipped pairs is 0."""
    x = round_e4m3(x_ND, w.input_group) if w.input_group else x_ND
    x = x.to(w.w13.dtype)
    out_NKD = x.new_zeros(*pairs.ids.shape, x.shape[1], dtype=w.w2.dtype)
    for expert in pairs.ids.unique().tolist():
        if expert < 0:
            continue
        token, k = (pairs.ids == expert).nonzero(as_tuple=True)
        hidden = clamped_swiglu(F.linear(x[token], w.w13[expert]), limit)
        hidden *= weights_NK[token, k, None]
        if w.input_group:
            hidden = round_e4m3(hidden, w.input_group)
        out_NKD[token, k] = F.linear(hidden.to(w.w2.dtype), w.w2[expert])
    return out_NKD


def combine(
    each_NKD: Tensor,
    ids_NK: Tensor,
    shared_ND: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    used_NKD = each_NKD.masked_fill((ids_NK < 0)[:, :, None], 0.0)
    result = used_NKD.float().sum(1).to(out_dtype or each_NKD.dtype)
    return result if shared_ND is None else result.add_(shared_ND)
