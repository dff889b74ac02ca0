"""Linear layers: the contracts. Legend: N tokens, K input width, M output width, G groups."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

KERNEL_GROUP = 128  # the group of inputs and the block of weights that kernels for GPUs support


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight in the form that an implementation reads.

    Attributes:
        weight: [M, K]; grouped linears [G, M, K]. E4M3 if there is a scale.
        input_group: round the input to E4M3 with one power-of-two scale for so many values along
            K, as the model was trained (FP8 and FP4 weights in "as-trained" mode); 0: do not round.
            With an E4M3 weight and no rounding, the input is multiplied as bfloat16.
        scale: float32 [.., ceil(M/B), ceil(K/B)]: one for each BxB block of an E4M3 weight.
        out_dtype: dtype of the result; None: the weight's dtype, or bfloat16 for E4M3 weights.
        scale_block: B.
    """

    weight: Tensor
    input_group: int = 0
    scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_block: int = 128

    def rows(self, start: int, stop: int) -> "LinearWeight":
        """Rows of a weight [M, K], or groups of one [G, M, K], as views.

        Rows that share a scale are not separated: `start` is a multiple of the block.
        """
        scale = self.scale
        if scale is not None:
            each = 1 if scale.dim() == 3 else self.scale_block
            assert start % each == 0, (start, scale.shape)
            scale = scale[start // each : -(-stop // each)]
        return replace(self, weight=self.weight[start:stop], scale=scale)


class PrepareLinear(Protocol):
    """Choose a weight's memory layout: called once, with its empty storage, before loading."""

    def __call__(self, w: LinearWeight) -> LinearWeight:
        """Returns the same fields; loading fills the returned `weight`, of any strides."""


class Linear(Protocol):
    """y = x @ weight^T, accumulated in float32."""

    def __call__(self, x_NK: Tensor, w: LinearWeight) -> Tensor:
        """x [N, K] of any float dtype; rows may be strided; returns [N, M]."""


@dataclass(frozen=True, slots=True)
class RoundedInput:
    """The input of a grouped linear, rounded to E4M3 by the operator that produces it.

    Attributes:
        min_tokens: steps with fewer tokens use an unrounded input.
        empty: function of the number of tokens; returns uninitialised E4M3 values [N, G, K] and
            float32 scales [N, S], one for each group of a token's G K values, in the GEMM's layout.
    """

    min_tokens: int
    empty: Callable[[int], tuple[Tensor, Tensor]]


class GroupedForm(Protocol):
    """Choose the form of a grouped linear's input: called once for each weight."""

    def __call__(self, w: LinearWeight, head_dim: int) -> RoundedInput | None:
        """head_dim: number of values that the input's producer writes, and can round, at a time.

        Returns None if the input is always unrounded: [N, G, K] in the dtype of the activations.
        """


class GroupedLinear(Protocol):
    """y[n, g] = x[n, g] @ weight[g]^T: the first half of the grouped output projection."""

    def __call__(self, x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
        """x [N, G, K]; returns [N, G, M]. With scales, x is already rounded, and
        `RoundedInput.empty` has allocated both.
        """
