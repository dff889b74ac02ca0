"""Mixture of experts of one layer: router, routed experts and the shared expert."""

from dataclasses import dataclass

from torch import Tensor, nn

from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.ops import Ops
from finwhale.ops.moe import ExpertWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """gate [E,D] and bias [E] float32; tid2eid [V,K] int64; one of bias and tid2eid is None."""

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    experts: ExpertWeight
    shared_experts: ExpertWeight


class Moe(nn.Module):
    """x [N,D] -> [N,D]."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: MoeWeights) -> None:
        super().__init__()
        self.route_by_score = ops.route_by_score
        self.route_by_hash = ops.route_by_hash
        self.experts = ops.experts
        self.swiglu_mlp = ops.swiglu_mlp
        self.weights = weights
        self.topk = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.limit = config.swiglu_limit

    def forward(self, x_ND: Tensor, token_ids_N: Tensor) -> Tensor:
        w = self.weights
        if w.tid2eid is not None:
            ids, weights = self.route_by_hash(x_ND, w.gate, w.tid2eid, token_ids_N, self.scaling)
        else:
            assert w.bias is not None
            ids, weights = self.route_by_score(x_ND, w.gate, w.bias, self.topk, self.scaling)
        routed = self.experts(x_ND, ids, weights, w.experts, self.limit)
        return routed.add_(self.swiglu_mlp(x_ND, w.shared_experts, self.limit))
