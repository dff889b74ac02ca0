"""Mixture of experts on a CPU. Legend in the package's docstring."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_gemm import Gemm, gemm, gemms
from finwhale.ops.cpu_math import F32, I64, constant, view
from finwhale.ops.moe import Dispatched, ExpertWeight


def prepare_experts(w: ExpertWeight) -> ExpertWeight:
    """Store the weights as [E,D,2I] and [E,I,D], the order in which a GEMV reads them."""
    w13, w2 = (
        torch.empty_like(weight.mT, memory_format=torch.contiguous_format)
        for weight in (w.w13, w.w2)
    )
    return ExpertWeight(w13.mT, w2.mT, w.input_group)


def _scores(x_ND: Tensor, gate_ED: Tensor) -> F32:
    """sqrt(softplus(x gate^T)); softplus(z) = log(e^0 + e^z)."""
    scores = cpu_math.matmul_rows(x_ND.numpy(), view(gate_ED).T)
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
    x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor, topk: int, scaling: float, positions_N: Tensor
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


def _swiglu(
    gate_up: Tensor, w: ExpertWeight, limit: float, weights_P1: F32 | None = None
) -> Tensor:
    """The input of w2: the hidden values, times each row's routing weight, then rounded."""
    hidden = _clamped_swiglu(gate_up.numpy(), limit)
    if weights_P1 is not None:
        np.multiply(hidden, weights_P1, hidden)
    if w.input_group:
        hidden = cpu_math.round_e4m3(hidden, w.input_group)
    return torch.from_numpy(hidden)


def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
    if w.input_group:
        x_ND = torch.from_numpy(cpu_math.round_e4m3(x_ND.numpy(), w.input_group))
    return gemm(w.w2)(_swiglu(gemm(w.w13)(x_ND), w, limit))


@dataclass(frozen=True, slots=True)
class HostPairs(Dispatched):
    """Pairs in order of the experts, without pairs of id -1.

    Attributes:
        order: [P]: the index of each pair in the flattened ids^T [K,N].
        experts: the experts that have pairs, ascending.
        counts: number of pairs of each expert in `experts`.
    """

    order: I64
    experts: list[int]
    counts: list[int]

    def multiply(self, rows_PX: Tensor, matrices: tuple[Gemm, ...]) -> Tensor:
        """Each pair's row times its expert's matrix."""
        parts = rows_PX.split(self.counts) if self.counts else (rows_PX,)
        return torch.cat(
            [matrices[e](part) for e, part in zip(self.experts or (0,), parts, strict=True)]
        )


def dispatch(ids_NK: Tensor, num_experts: int) -> HostPairs:
    flat = ids_NK.numpy().T.ravel()
    skipped, *counts = np.bincount(flat + 1, minlength=1).tolist()
    return HostPairs(
        ids_NK,
        order=flat.argsort(kind="stable")[skipped:],
        experts=[e for e, count in enumerate(counts) if count],
        counts=[count for count in counts if count],
    )


def compute(
    x_ND: Tensor, weights_NK: Tensor, pairs: Dispatched, w: ExpertWeight, limit: float
) -> Tensor:
    """Gather one row for each pair, with the rows of an expert adjacent."""
    assert isinstance(pairs, HostPairs)
    x: F32 = x_ND.numpy()
    if w.input_group:
        x = cpu_math.round_e4m3(x, w.input_group)
    num_tokens, width = x.shape
    rows = torch.from_numpy(x.take(pairs.order % num_tokens, 0))
    weights: F32 = weights_NK.numpy().T.ravel().take(pairs.order)
    hidden = _swiglu(pairs.multiply(rows, gemms(w.w13)), w, limit, weights[:, None])
    each = np.empty((pairs.ids.numel(), width), np.float32)
    each[pairs.order] = pairs.multiply(hidden, gemms(w.w2)).numpy()
    return torch.from_numpy(each.reshape(pairs.ids.shape[1], num_tokens, width)).transpose(0, 1)


def combine(
    each_NKD: Tensor,
    ids_NK: Tensor,
    shared_ND: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Add whole arrays in order of k, so a token's sum does not depend on the other tokens."""
    each: F32 = each_NKD.transpose(0, 1).numpy()
    skipped = ids_NK.numpy().T < 0
    if skipped.any():
        each[skipped] = 0.0
    result: F32 = np.add.reduce(each, 0)
    if shared_ND is not None:
        np.add(result, shared_ND.numpy(), result)
    return torch.from_numpy(result).to(out_dtype or torch.float32)
