"""Mixture of experts of one layer: router, routed experts and the shared expert."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.protocol import StepInputs
from finwhale.ops import Ops
from finwhale.ops.moe import ExpertWeight

SHARED_STREAM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """gate [E,D], bias [E] float32; tid2eid [V,K] int64; one of bias and tid2eid is None."""

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    experts: ExpertWeight
    shared_experts: ExpertWeight


class Moe:
    """x [N,D] -> [N,D]."""

    def __init__(
        self, config: ModelConfig, ops: Ops, weights: MoeWeights, side_streams: SideStreams
    ) -> None:
        self.route_by_score = ops.route_by_score
        self.route_by_hash = ops.route_by_hash
        self.experts = ops.experts
        self.swiglu_mlp = ops.swiglu_mlp
        self.side_streams = side_streams
        self.weights = weights
        self.topk = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.limit = config.swiglu_limit

    def __call__(self, x_ND: Tensor, inputs: StepInputs) -> Tensor:
        shared = self.side_streams.start(SHARED_STREAM, lambda: self.share(x_ND))
        ids, weights = self.route(x_ND, inputs)
        # The shared expert's output is waited for where it is added.
        return self.mix(x_ND, ids, weights, shared, lambda: self.side_streams.join(SHARED_STREAM))

    def share(self, x_ND: Tensor) -> Tensor:
        """What the shared expert gives: [N,D]."""
        return self.swiglu_mlp(x_ND, self.weights.shared_experts, self.limit)

    def route(self, x_ND: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Which experts each token goes to, and their weights: [N,K]."""
        w, positions = self.weights, inputs.tokens.positions
        if w.tid2eid is not None:
            return self.route_by_hash(
                x_ND, w.gate, w.tid2eid, inputs.token_ids, self.scaling, positions
            )
        assert w.bias is not None
        return self.route_by_score(x_ND, w.gate, w.bias, self.topk, self.scaling, positions)

    def mix(
        self,
        x_ND: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor,
        join: Callable[[], None] | None = None,
    ) -> Tensor:
        """The routed experts' outputs and the shared one's, which is there after `join`: [N,D]."""
        w = self.weights.experts
        return self.experts(x_ND, ids, weights, w, self.limit, shared, join)
