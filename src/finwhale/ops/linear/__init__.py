"""Linear layers: the contracts. Legend: N tokens, K input width, M output width, G groups."""

from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class RoundedInput:
    """The input of a grouped linear, rounded to E4M3 by the operator that produces it.

    Attributes:
        min_tokens: steps of fewer tokens take the input unrounded.
        empty: number of tokens to uninitialised E4M3 values [N, G, K] and float32 scales
            [N, S], one for each 128 of a token's G K values, in the layout that the GEMM reads.
    """

    min_tokens: int
    empty: Callable[[int], tuple[Tensor, Tensor]]


class GroupedForm(Protocol):
    """Decide in which form a grouped linear takes its input: once for each weight."""

    def __call__(self, w: LinearWeight, head_dim: int) -> RoundedInput | None:
        """head_dim: values that the input's producer writes, and could round, at a time. None:
        always unrounded [N, G, K], in the dtype of the activations.
        """
        ...


class GroupedLinear(Protocol):
    """y[n, g] = x[n, g] @ weight[g]^T: the first half of the grouped output projection."""

    def __call__(self, x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
        """x [N, G, K]; returns [N, G, M]. With scales, x is rounded already, and both lie in memory
        from `RoundedInput.empty`.
        """
        ...
