"""Mixture of experts on a CPU, in numpy. Legend in the package's docstring."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import host
from finwhale.ops.host import F32, I64, constant, view
from finwhale.ops.linear import ACTIVATION_GROUP
from finwhale.ops.moe import ExpertWeight

# Up to this many pairs of a token and an expert, one product a pair beats grouping them.
FEW_PAIRS = 64


@dataclass(frozen=True, slots=True)
class TransposedExperts(ExpertWeight):
    """Weights that lie in memory as [E,D,2I] and [E,I,D]: one matrix an expert, as views."""

    matrices: tuple[tuple[F32, F32], ...] = ()


def prepare_experts(w: ExpertWeight) -> ExpertWeight:
    if w.w13.device.type == "meta":
        return w
    w13, w2 = (
        torch.empty_like(weight.mT, memory_format=torch.contiguous_format)
        for weight in (w.w13, w.w2)
    )
    return TransposedExperts(w13.mT, w2.mT, w.round_input, matrices=_matrices(w13.mT, w2.mT))


def _matrices(w13: Tensor, w2: Tensor) -> tuple[tuple[F32, F32], ...]:
    """([D,2I], [I,D]) of each expert."""
    first, second = w13.mT.numpy(), w2.mT.numpy()
    if first.ndim == 2:
        return ((first, second),)
    return tuple(zip(first, second, strict=True))


def _matrices_of(w: ExpertWeight) -> tuple[tuple[F32, F32], ...]:
    return w.matrices if isinstance(w, TransposedExperts) else _matrices(w.w13, w.w2)


def _scores(x_ND: Tensor, gate_ED: Tensor) -> F32:
    """sqrt(softplus(x gate^T)); softplus(z) = log(e^0 + e^z)."""
    scores = host.matmul_rows(x_ND.numpy(), view(gate_ED).T)
    np.logaddexp(scores, constant(0.0), scores)
    np.sqrt(scores, scores)
    return scores


def _weights(scores_NE: F32, ids_NK: I64, scaling: float) -> F32:
    num_tokens, num_experts = scores_NE.shape
    flat_NK = ids_NK
    if num_tokens > 1:
        flat_NK = ids_NK + np.arange(0, num_tokens * num_experts, num_experts)[:, None]
    chosen: F32 = scores_NE.take(flat_NK)
    total = np.add.reduce(chosen, axis=-1, keepdims=True)
    np.add(total, constant(1e-20), total)
    np.divide(chosen, total, chosen)
    np.multiply(chosen, constant(scaling), chosen)
    return chosen


def route_by_score(
    x_ND: Tensor,
    gate_ED: Tensor,
    bias_E: Tensor,
    topk: int,
    scaling: float,
    positions_N: Tensor,
) -> tuple[Tensor, Tensor]:
    scores = _scores(x_ND, gate_ED)
    order = np.add(scores, view(bias_E))
    np.negative(order, order)
    ids = np.ascontiguousarray(order.argsort(axis=-1, kind="stable")[:, :topk])
    return torch.from_numpy(ids), torch.from_numpy(_weights(scores, ids, scaling))


def route_by_hash(
    x_ND: Tensor,
    gate_ED: Tensor,
    tid2eid_VK: Tensor,
    token_ids_N: Tensor,
    scaling: float,
    positions_N: Tensor,
) -> tuple[Tensor, Tensor]:
    ids: I64 = view(tid2eid_VK).take(view(token_ids_N), 0)
    weights = _weights(_scores(x_ND, gate_ED), ids, scaling)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def _clamped_swiglu(gate_up: F32, limit: float) -> F32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); gate_up [...,2I]."""
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    np.minimum(gate, constant(limit), out=gate)
    np.maximum(gate, constant(-80.0), out=gate)  # silu is 0 from there on, and e^80 is finite
    hidden = np.negative(gate)
    np.exp(hidden, hidden)
    np.add(hidden, constant(1.0), hidden)
    np.divide(gate, hidden, hidden)
    np.minimum(up, constant(limit), out=up)
    np.maximum(up, constant(-limit), out=up)
    np.multiply(hidden, up, hidden)
    return hidden


def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
    ((w13, w2),) = _matrices_of(w)
    x: F32 = x_ND.numpy()
    if w.round_input:
        x = host.round_e4m3(x, ACTIVATION_GROUP)
    hidden = _clamped_swiglu(host.matmul_rows(x, w13), limit)
    if w.round_input:
        hidden = host.round_e4m3(hidden, ACTIVATION_GROUP)
    return torch.from_numpy(host.matmul_rows(hidden, w2))


def experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    w: ExpertWeight,
    limit: float,
    shared_ND: Tensor | None = None,
) -> Tensor:
    """One row a (token, expert) pair; an expert's pairs come one after the other."""
    matrices = _matrices_of(w)
    x: F32 = x_ND.numpy()
    ids: I64 = ids_NK.numpy()
    if w.round_input:
        x = host.round_e4m3(x, ACTIVATION_GROUP)
    num_tokens, topk = ids.shape
    run_pairs = _few_pairs if ids.size <= FEW_PAIRS else _many_pairs
    gate_up = np.empty((ids.size, matrices[0][0].shape[1]), np.float32)
    run_pairs(x, topk, ids, [first for first, _ in matrices], gate_up)
    hidden = _clamped_swiglu(gate_up, limit)
    if w.round_input:
        hidden = host.round_e4m3(hidden, ACTIVATION_GROUP)
    out = np.empty((ids.size, x.shape[1]), np.float32)
    run_pairs(hidden, 1, ids, [second for _, second in matrices], out)
    result = np.matmul(weights_NK.numpy()[:, None], out.reshape(num_tokens, topk, x.shape[1]))
    result = result.reshape(x.shape)
    if shared_ND is not None:
        np.add(result, shared_ND.numpy(), result)
    return torch.from_numpy(result)


def _few_pairs(x: F32, pairs_a_row: int, ids: I64, matrices: list[F32], out_PM: F32) -> None:
    """out[p] = x[p // pairs_a_row] @ matrices[id of p], 0 where the id is -1."""
    experts = ids.ravel().tolist()
    inputs, outputs = list(x), list(out_PM)
    order = (
        range(len(experts)) if len(x) == 1 else sorted(range(len(experts)), key=experts.__getitem__)
    )
    for pair in order:
        expert = experts[pair]
        if expert >= 0:
            inputs[pair // pairs_a_row].dot(matrices[expert], outputs[pair])
        else:
            outputs[pair].fill(0.0)


def _many_pairs(x: F32, pairs_a_row: int, ids: I64, matrices: list[F32], out_PM: F32) -> None:
    """The same, an expert at a time."""
    flat = ids.ravel()
    order = flat.argsort(kind="stable")
    bounds = flat.take(order).searchsorted(np.arange(len(matrices) + 1)).tolist()
    out_PM[order[: bounds[0]]] = 0.0
    for matrix, start, end in zip(matrices, bounds[:-1], bounds[1:], strict=True):
        if start < end:
            pairs = order[start:end]
            out_PM[pairs] = host.matmul_rows(x.take(pairs // pairs_a_row, 0), matrix)
