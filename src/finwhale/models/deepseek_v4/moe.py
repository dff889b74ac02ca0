"""Mixture of experts of one layer: router, routed experts and the shared expert."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.deepseek_v4.tensor_parallel import TensorParallel
from finwhale.models.step_inputs import StepInputs
from finwhale.ops import Ops
from finwhale.ops.moe import ExpertWeight, UnreducedExperts

SHARED_STREAM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """gate [E,D]; either bias [E] float32 or tid2eid [V,K] int64, the other one is None."""

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    experts: ExpertWeight
    shared_experts: ExpertWeight


class Moe:
    """Mixture of experts: maps x [N,D] to [N,D].

    The result is the partial sum over this rank's part of every expert's width, except that of
    `of_own_tokens`.

    Args:
        sizes: E, K, the factor of routing weights, and the limit of SwiGLU's inputs.

    Attributes:
        routed: [max tokens, K]: every call writes the chosen experts' ids here; None: no call does.
    """

    routed: Tensor | None = None

    def __init__(
        self,
        ops: Ops,
        ranks: TensorParallel,
        side_streams: SideStreams,
        weights: MoeWeights,
        sizes: tuple[int, int, float, float],
    ) -> None:
        self.route_by_score = ops.route_by_score
        self.route_by_hash = ops.route_by_hash
        self.dispatch = ops.experts_dispatch
        self.compute = ops.experts_compute
        self.combine = ops.experts_combine
        self.swiglu_mlp = ops.swiglu_mlp
        self.side_streams, self.ranks, self.weights = side_streams, ranks, weights
        self.num_experts, self.topk, self.scaling, self.limit = sizes

    def __call__(self, x_ND: Tensor, inputs: StepInputs) -> Tensor:
        terms = self.terms(x_ND, inputs)
        return self.combine(terms.each, terms.ids, terms.shared)

    def terms(self, x_ND: Tensor, inputs: StepInputs) -> UnreducedExperts:
        """The outputs of the experts, which `__call__` adds."""
        shared = self.side_streams.start(SHARED_STREAM, lambda: self.run_shared_expert(x_ND))
        ids, weights = self.choose(x_ND, inputs)
        each = self.run_experts(x_ND, ids, weights)
        self.side_streams.join(SHARED_STREAM)
        return UnreducedExperts(each, ids, shared, each.dtype)

    def of_own_tokens(self, x_RD: Tensor, inputs: StepInputs) -> Tensor:
        """The complete outputs [R,D] of this rank's tokens, in a step that the ranks divide.

        A rank computes its part of every expert for the tokens of all ranks. While these are
        gathered, it runs the shared expert on its own tokens.
        """
        collectives, num_tokens = self.ranks.collectives, len(inputs.token_ids)
        gathered = collectives.start_all_gather_rows(x_RD, num_tokens, "experts")
        shared_RD = self.run_shared_expert(x_RD)
        x_ND = gathered()
        ids, weights = self.choose(x_ND, inputs)
        return self.sum_of_ranks(x_ND, ids, weights, shared_RD).to(x_RD.dtype)

    def sum_of_ranks(
        self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, shared_RD: Tensor
    ) -> Tensor:
        """The outputs [R,D] of this rank's tokens, summed over the ranks.

        Args:
            x_ND, ids_NK, weights_NK: the tokens of all ranks, in the order of the ranks.
            shared_RD: this rank's part of the shared expert's output for its own tokens.
        """
        rank = self.ranks.rank
        rows = [rank.rows(len(x_ND), index) for index in range(rank.size)]

        def run_shared(index: int) -> Tensor:
            return shared_RD if index == rank.index else self.run_shared_expert(x_ND[rows[index]])

        shared = self.side_streams.start(
            SHARED_STREAM, lambda: list(map(run_shared, range(rank.size)))
        )
        each = self.run_experts(x_ND, ids_NK, weights_NK)
        self.side_streams.join(SHARED_STREAM)

        def combined(index: int, some: slice) -> Tensor:
            own = rows[index]
            return self.combine(each[own][some], ids_NK[own][some], shared[index][some])

        shape = len(x_ND), x_ND.shape[1]
        return self.ranks.collectives.reduce_scatter_parts(combined, shape, each.dtype)

    def run_shared_expert(self, x_ND: Tensor) -> Tensor:
        """The output of the shared expert: [N,D]."""
        return self.swiglu_mlp(x_ND, self.weights.shared_experts, self.limit)

    def choose(self, x_ND: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """`route`, and write the ids to `routed` if that is wanted."""
        ids, weights = self.route(x_ND, inputs)
        if self.routed is not None:
            self.routed[: len(ids)].copy_(ids)
        return ids, weights

    def route(self, x_ND: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Choose K experts for each token. Returns their ids and routing weights, both [N,K]."""
        w, positions = self.weights, inputs.tokens.positions
        if w.tid2eid is not None:
            return self.route_by_hash(
                x_ND, w.gate, w.tid2eid, inputs.token_ids, self.scaling, positions
            )
        assert w.bias is not None
        return self.route_by_score(x_ND, w.gate, w.bias, self.topk, self.scaling, positions)

    def run_experts(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The outputs of each token's routed experts: [N,K,D]."""
        pairs = self.dispatch(ids_NK, self.num_experts)
        return self.compute(x_ND, weights_NK, pairs, self.weights.experts, self.limit)


class SharedMoe(Moe):
    """The same among data-parallel ranks: maps x [N,D] of this rank's tokens to complete outputs.

    A rank holds a part of every expert's width, and computes it for the tokens of all ranks. Each
    rank gives `StepInputs.lane_rows` rows of the M; rows without a token are zero.
    """

    def __call__(self, x_ND: Tensor, inputs: StepInputs) -> Tensor:
        ids, weights = self.choose(x_ND, inputs)
        return self._serve(x_ND, ids, weights, inputs.lane_rows)

    def serve_others(self, x_0D: Tensor, lane_rows: int) -> None:
        """Compute this rank's part in a step in which it has no tokens of its own."""
        weights = x_0D.new_empty(0, self.topk, dtype=torch.float32)
        self._serve(x_0D, weights.int(), weights, lane_rows)

    def _serve(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, lane_rows: int) -> Tensor:
        ranks, collectives = self.ranks, self.ranks.collectives
        # An exchange takes contiguous rows.
        rows = [x.contiguous() for x in (x_ND, ids_NK.int(), weights_NK)]
        if added := lane_rows - len(x_ND):
            fills = (0, -1, 0)  # no expert computes an added row
            rows = [pad(x, (0, 0, 0, added), value=v) for x, v in zip(rows, fills, strict=True)]
        num_rows = ranks.rank.size * lane_rows
        if ranks.exchanges_beside(num_rows, x_ND):
            x_LD, *chosen = rows
            gathered = collectives.start_all_gather_rows(x_LD, num_rows, "experts")
            ids_MK, weights_MK = collectives.all_gather_each(chosen)
            shared_LD = self.run_shared_expert(x_LD)
            return self.sum_of_ranks(gathered(), ids_MK, weights_MK, shared_LD)[: len(x_ND)]
        x_MD, ids_MK, weights_MK = collectives.all_gather_each(rows)
        shared = self.side_streams.start(SHARED_STREAM, lambda: self.run_shared_expert(x_MD))
        each = self.run_experts(x_MD, ids_MK, weights_MK)
        self.side_streams.join(SHARED_STREAM)
        partial = self.combine(each, ids_MK, shared)
        return collectives.reduce_scatter_rows(partial)[: len(x_ND)]
