"""Linear layers: the contracts. Legend: N tokens, K input width, M output width, G groups."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ACTIVATION_GROUP = 128


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight as an implementation reads it.

    Attributes:
        weight: [M, K]; grouped linears [G, M, K].
        round_input: round the input to E4M3 with one power-of-two scale for each 128 values
            along K, as the model was trained (FP8 and FP4 weights in "as-trained" mode).
    """

    weight: Tensor
    round_input: bool = False


class PrepareLinear(Protocol):
    """Choose how a weight lies in memory: once, on its empty storage, before it is loaded."""

    def __call__(self, w: LinearWeight) -> LinearWeight:
        """Returns the same fields; `weight`, of any strides, is what loading fills."""
        ...


class Linear(Protocol):
    """y = x @ weight^T, accumulated in float32."""

    def __call__(self, x_NK: Tensor, w: LinearWeight) -> Tensor:
        """x [N, K] of any float dtype; returns [N, M] in the weight's dtype."""
        ...


class GroupedLinear(Protocol):
    """y[n, g] = x[n, g] @ weight[g]^T: the first half of the grouped output projection."""

    def __call__(self, x_NGK: Tensor, w: LinearWeight) -> Tensor:
        """x [N, G, K]; returns [N, G, M] in the weight's dtype."""
        ...
