"""Mixture of experts, the definition. Legend in the package's docstring."""

from collections.abc import Callable

import torch
from torch import Tensor

from finwhale.ops.linear import ACTIVATION_GROUP
from finwhale.ops.linear.ref import ROW_TILE, matmul_rows
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.rounding import round_e4m3


def prepare_experts(w: ExpertWeight) -> ExpertWeight:
    return w


def finish_experts(w: ExpertWeight) -> ExpertWeight:
    return w


def _scores(x_ND: Tensor, gate_ED: Tensor) -> Tensor:
    """sqrt(softplus(x gate^T)) in float32; softplus(z) = max(z, 0) + log(1 + e^-|z|)."""
    z = matmul_rows(x_ND.float(), gate_ED.float())
    return torch.exp(-z.abs()).log1p_().add_(z.clamp(min=0)).sqrt_()


def _weights(scores_NE: Tensor, ids_NK: Tensor, scaling: float) -> Tensor:
    chosen = scores_NE.gather(1, ids_NK)
    return chosen.div_(chosen.sum(-1, keepdim=True).add_(1e-20)).mul_(scaling)


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


def _clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32; gate_up [...,2I]."""
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=limit)
    silu = gate / torch.exp(-gate).add_(1.0)
    return silu.mul_(up.clamp(-limit, limit))


def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
    x = round_e4m3(x_ND, ACTIVATION_GROUP) if w.round_input else x_ND
    hidden = _clamped_swiglu(matmul_rows(x.to(w.w13.dtype), w.w13), limit)
    if w.round_input:
        hidden = round_e4m3(hidden, ACTIVATION_GROUP)
    return matmul_rows(hidden.to(w.w2.dtype), w.w2)


def experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    w: ExpertWeight,
    limit: float,
    shared_ND: Tensor | None = None,
    join: Callable[[], None] | None = None,
) -> Tensor:
    """Rows are sorted by expert, each expert's padded to a multiple of ROW_TILE rows."""
    if join is not None:
        join()
    num_tokens, topk = ids_NK.shape
    assigned: dict[int, list[int]] = {}
    for position, expert in enumerate(ids_NK.flatten().tolist()):
        if expert >= 0:
            assigned.setdefault(expert, []).append(position)
    if not assigned:
        zeros = x_ND.new_zeros(x_ND.shape, dtype=w.w2.dtype)
        return zeros if shared_ND is None else zeros.add_(shared_ND)
    order = sorted(assigned)
    sizes = [-(-len(assigned[expert]) // ROW_TILE) * ROW_TILE for expert in order]
    tokens: list[int] = []
    place = [-1] * (num_tokens * topk)
    for expert, size in zip(order, sizes, strict=True):
        for row, position in enumerate(assigned[expert], start=len(tokens)):
            place[position] = row
        tokens += [position // topk for position in assigned[expert]]
        tokens += [0] * (size - len(assigned[expert]))

    x = x_ND.index_select(0, torch.tensor(tokens, device=x_ND.device))
    if w.round_input:
        x = round_e4m3(x, ACTIVATION_GROUP)
    gate_up = _matmul_each(x.to(w.w13.dtype), w.w13, order, sizes)
    hidden = _clamped_swiglu(gate_up, limit)
    if w.round_input:
        hidden = round_e4m3(hidden, ACTIVATION_GROUP)
    out = _matmul_each(hidden.to(w.w2.dtype), w.w2, order, sizes)

    place_NK = torch.tensor(place, device=x_ND.device)
    rows = out.index_select(0, place_NK.clamp(min=0)).view(num_tokens, topk, -1).float()
    weights = weights_NK.masked_fill(place_NK.view(num_tokens, topk) < 0, 0.0)
    result = torch.bmm(weights[:, None], rows).squeeze(1).to(w.w2.dtype)
    return result if shared_ND is None else result.add_(shared_ND)


def _matmul_each(x: Tensor, weight_EMK: Tensor, order: list[int], sizes: list[int]) -> Tensor:
    """Rows of x in runs of `sizes`, each times its expert's weight^T; one after the other."""
    out = x.new_empty(x.shape[0], weight_EMK.shape[1])
    runs = zip(order, x.split(sizes), out.split(sizes), strict=True)
    for expert, rows, target in runs:
        torch.mm(rows, weight_EMK[expert].t(), out=target)
    return out
