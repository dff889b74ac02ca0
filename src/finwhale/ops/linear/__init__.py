"""Linear layers: the contracts. Legend: N tokens, K input width, M output width, G groups."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ACTIVATION_GROUP = 128


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight as an implementation reads it.

    Attributes:
        weight: [M, K]; grouped linears [G, M, K]. E4M3 where there is a scale.
        round_input: round the input to E4M3 with one power-of-two scale for each 128 values
            along K, as the model was trained (FP8 and FP4 weights in "as-trained" mode). With an
            E4M3 weight and no rounding, the input is multiplied as bfloat16.
        scale: float32 [.., ceil(M/128), ceil(K/128)]: of each block of 128x128 of an E4M3 weight.
        out_dtype: of the result; None: the weight's dtype, of E4M3 weights bfloat16.
    """

    weight: Tensor
    round_input: bool = False
    scale: Tensor | None = None
    out_dtype: torch.dtype | None = None


class PrepareLinear(Protocol):
    """Choose how a weight lies in memory: once, on its empty storage, before it is loaded."""

    def __call__(self, w: LinearWeight) -> LinearWeight:
        """Returns the same fields; `weight`, of any strides, is what loading fills."""
        ...


class Linear(Protocol):
    """y = x @ weight^T, accumulated in float32."""

    def __call__(self, x_NK: Tensor, w: LinearWeight) -> Tensor:
        """x [N, K] of any float dtype; rows may be strided; returns [N, M]."""
        ...


class GroupedInput(Protocol):
    """Memory for the input of a grouped linear, in the form that the table's product reads."""

    def __call__(
        self, like_NX: Tensor, head_dim: int, w: LinearWeight
    ) -> tuple[Tensor, Tensor | None]:
        """For N tokens, written a head of head_dim values at a time: x [N, G, K] of like's dtype
        and None; or E4M3 and float32 scales [N, S], one for each 128 of a token's G K values.
        """
        ...


class GroupedLinear(Protocol):
    """y[n, g] = x[n, g] @ weight[g]^T: the first half of the grouped output projection."""

    def __call__(self, x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
        """x [N, G, K]; returns [N, G, M]. With scales, x is rounded already, and both lie in memory
        that the table's GroupedInput gave.
        """
        ...
