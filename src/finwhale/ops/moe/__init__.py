"""Mixture of experts: the contracts.

Source: DeepSeek-V4 technical report, section 2.1. Legend: N tokens, D hidden, E experts, K experts
a token, I the experts' intermediate width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Experts' weights as an implementation reads them.

    Attributes:
        w13: [E,2I,D], or [2I,D] for one expert that all tokens share: w1 (gate), then w3 (up).
            FP4: uint8 [E,2I,D/2], two e2m1 codes a byte, the low nibble first.
        w2: [E,D,I], or [D,I]; FP4: uint8 [E,D,I/2].
        round_input: round what enters w13 and w2 to E4M3, one power-of-two scale for each 128.
        scale13, scale2: FP4: uint8 exponents (E8M0) [E,2I,D/32] and [E,D,I/32]; E4M3: float32, one
            for each block of 128x128; None for plain weights.
    """

    w13: Tensor
    w2: Tensor
    round_input: bool = False
    scale13: Tensor | None = None
    scale2: Tensor | None = None


class PrepareExperts(Protocol):
    """Choose how experts lie in memory: once, on their empty storage, before they are loaded."""

    def __call__(self, w: ExpertWeight) -> ExpertWeight:
        """Returns the same fields; `w13` and `w2`, of any strides, are what loading fills."""
        ...


class FinishExperts(Protocol):
    """Turn loaded routed experts into what `experts` reads: once, in place."""

    def __call__(self, w: ExpertWeight) -> ExpertWeight:
        """Returns the weights to use from now on; `w` must not be used any more."""
        ...


class RouteByScore(Protocol):
    """The K experts with the highest score + bias; score = sqrt(softplus(x gate^T))."""

    def __call__(
        self,
        x_ND: Tensor,
        gate_ED: Tensor,
        bias_E: Tensor,
        topk: int,
        scaling: float,
        positions_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """gate [E,D] of any float dtype, bias [E] float32. Returns ids [N,K] of an integer dtype
        and weights [N,K] float32: the chosen scores, normalised to sum 1, times scaling. A token
        at position -1 is padding: its ids may be -1.
        """
        ...


class RouteByHash(Protocol):
    """The experts that a table gives each token id, weighted by their scores as above."""

    def __call__(
        self,
        x_ND: Tensor,
        gate_ED: Tensor,
        tid2eid_VK: Tensor,
        token_ids_N: Tensor,
        scaling: float,
        positions_N: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """tid2eid [V,K] int64, token_ids [N] int64. Returns ids [N,K] and weights [N,K]."""
        ...


class Experts(Protocol):
    """sum_k w2_k(weight_k * silu(min(w1_k x, limit)) * clamp(w3_k x, -limit, limit)).

    The weight multiplies the hidden values in float32. With `w.round_input` they are then rounded
    to E4M3, one scale for each 128; w2's outputs are added without weights. This is the order of
    the authors' inference code. Weighting w2's outputs instead rounds other values.
    """

    def __call__(
        self,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        w: ExpertWeight,
        limit: float,
        shared_ND: Tensor | None = None,
        join: Callable[[], None] | None = None,
    ) -> Tensor:
        """x [N,D], ids [N,K] of an integer dtype, weights [N,K] float32. A pair with id -1 is
        skipped and adds exactly 0. `shared`, the shared expert's output, is added; it may be
        written. `join` is called once, before the current stream is given what reads `shared`.
        Returns [N,D] in the dtype of plain weights, else of x.
        """
        ...


class SwigluMlp(Protocol):
    """The shared expert: w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit)), no weight."""

    def __call__(self, x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
        """Returns [N,D] in the weights' dtype."""
        ...
