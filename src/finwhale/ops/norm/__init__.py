"""RMSNorm: the contract."""

from typing import Protocol

from torch import Tensor


class RmsNorm(Protocol):
    """y = x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __call__(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x [..., D] of any float dtype, weight [D] float32; returns x's shape and dtype."""
