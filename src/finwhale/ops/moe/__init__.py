"""Mixture of experts: the contracts.

Source: DeepSeek-V4 technical report, section 2.1. Legend: N tokens, D hidden, E experts, K experts
a token, I the experts' intermediate width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Experts' weights as an implementation reads them.

    Attributes:
        w13: [E,2I,D], or [2I,D] for one expert that all tokens share: w1 (gate), then w3 (up).
        w2: [E,D,I], or [D,I].
        round_input: round what enters w13 and w2 to E4M3, one power-of-two scale for each 128.
    """

    w13: Tensor
    w2: Tensor
    round_input: bool = False


class PrepareExperts(Protocol):
    """Choose how experts lie in memory: once, on their empty storage, before they are loaded."""

    def __call__(self, w: ExpertWeight) -> ExpertWeight:
        """Returns the same fields; `w13` and `w2`, of any strides, are what loading fills."""
        ...


class RouteByScore(Protocol):
    """The K experts with the highest score + bias; score = sqrt(softplus(x gate^T))."""

    def __call__(
        self, x_ND: Tensor, gate_ED: Tensor, bias_E: Tensor, topk: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """gate [E,D] and bias [E] float32. Returns ids [N,K] int64 and weights [N,K] float32: the
        chosen scores, normalised to sum 1, times scaling.
        """
        ...


class RouteByHash(Protocol):
    """The experts that a table gives each token id, weighted by their scores as above."""

    def __call__(
        self, x_ND: Tensor, gate_ED: Tensor, tid2eid_VK: Tensor, token_ids_N: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """tid2eid [V,K] int64, token_ids [N] int64. Returns ids [N,K] and weights [N,K]."""
        ...


class Experts(Protocol):
    """sum_k weight_k * w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit)) of the experts."""

    def __call__(
        self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, w: ExpertWeight, limit: float
    ) -> Tensor:
        """x [N,D]; an id of -1 skips. Returns [N,D] in the weights' dtype."""
        ...


class SwigluMlp(Protocol):
    """The shared expert: the same with one expert, for every token."""

    def __call__(self, x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
        """Returns [N,D] in the weights' dtype."""
        ...
