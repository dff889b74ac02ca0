"""Mixture of experts: the contracts.

A router chooses experts. Then `dispatch` orders the (token, expert) pairs, `compute` computes each
pair's output, and `combine` adds a token's pairs and the shared expert's output.

Source: DeepSeek-V4 technical report, section 2.1. Legend: N tokens, D hidden, E experts, K experts
per token, I the experts' intermediate width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# The kernels keep an FP4 value exactly if its group's exponent is at most this much less than its
# row's largest one (experts_layout.py): E4M3 holds FP4 values times 2^-5 to 2^6 as normal numbers.
EXPONENT_SPREAD = 11


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """The weights of experts, in the form that an implementation reads.

    Attributes:
        w13: [E,2I,D], or [2I,D] for one expert that all tokens share: w1 (gate), then w3 (up).
            FP4: uint8 [E,2I,D/2], two e2m1 codes per byte, the low nibble first.
        w2: [E,D,I], or [D,I]; FP4: uint8 [E,D,I/2].
        input_group: round the inputs of w13 and w2 to E4M3, with one power-of-two scale for so many
            values; 0: do not round them.
        scale13, scale2: FP4: uint8 exponents (E8M0) [E,2I,D/32] and [E,D,I/32]; E4M3: float32, one
            for each block of BxB; None for plain weights.
        scale_block: B.
    """

    w13: Tensor
    w2: Tensor
    input_group: int = 0
    scale13: Tensor | None = None
    scale2: Tensor | None = None
    scale_block: int = 128


class PrepareExperts(Protocol):
    """Choose the experts' memory layout: called once, with empty storage, before loading."""

    def __call__(self, w: ExpertWeight) -> ExpertWeight:
        """Returns the same fields; loading fills the returned `w13` and `w2`, of any strides."""


class FinishExperts(Protocol):
    """Convert loaded routed experts to the form that `compute` reads: called once, in place."""

    def __call__(self, w: ExpertWeight) -> ExpertWeight:
        """Returns the weights to use from now on; `w` must not be used any more."""


class RouteByScore(Protocol):
    """Choose the K experts with the highest score + bias; score = sqrt(softplus(x gate^T)).

    The lowest index wins ties.
    """

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


class RouteByHash(Protocol):
    """Choose each token's experts from a table by token id; weights as in RouteByScore."""

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


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The (token, expert) pairs of a step, in the order in which `compute` processes them.

    An implementation that orders the pairs returns a subclass that contains the order.

    Attributes:
        ids: [N,K] of an integer dtype: the expert of each pair; -1: the pair is skipped.
    """

    ids: Tensor


class ExpertsDispatch(Protocol):
    """Order the (token, expert) pairs by expert, before the experts' other operators run."""

    def __call__(self, ids_NK: Tensor, num_experts: int) -> Dispatched:
        """Returns the argument for `compute` of the same table."""


class ExpertsCompute(Protocol):
    """w2_k(weight_k * silu(min(w1_k x, limit)) * clamp(w3_k x, -limit, limit)) for each pair.

    The weight multiplies the hidden values in float32. With `w.input_group`, they are then rounded
    to E4M3, with one scale for so many values. This is the order of the authors' inference code;
    multiplying w2's outputs by the weight instead would round other values.
    """

    def __call__(
        self, x_ND: Tensor, weights_NK: Tensor, pairs: Dispatched, w: ExpertWeight, limit: float
    ) -> Tensor:
        """x [N,D], routing weights [N,K] float32, pairs from `dispatch` of the same table.

        Returns each pair's output [N,K,D] in the weights' dtype, or in x's dtype if the weights are
        quantised. The values of a skipped pair are undefined.
        """


class ExpertsCombine(Protocol):
    """Sum over k of each token's pairs, in order of k, plus the shared expert's output."""

    def __call__(
        self,
        each_NKD: Tensor,
        ids_NK: Tensor,
        shared_ND: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """each [N,K,D] from `compute`, ids [N,K]. A pair with id -1 adds exactly 0. `each` and
        `shared` may be overwritten. Returns [N,D] in out_dtype, by default the dtype of `each`.
        """


@dataclass(frozen=True, slots=True)
class UnreducedExperts:
    """Represents the result of `ExpertsCombine`, for an operator that adds the terms itself.

    Attributes:
        each, ids, shared: the arguments of `ExpertsCombine`; no operator may overwrite them.
        dtype: dtype of the sum.
    """

    each: Tensor
    ids: Tensor
    shared: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the sum: (N, D)."""
        return self.each.shape[0], self.each.shape[2]


class SwigluMlp(Protocol):
    """The shared expert, which has no routing weight:
    w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit)).
    """

    def __call__(self, x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
        """Returns [N,D] in the weights' dtype."""
