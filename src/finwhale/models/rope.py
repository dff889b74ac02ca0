"""Rotary position embedding: the model's two kinds of (cos, sin) tables.

Layers without compression use theta = rope_theta. Compressed layers use theta = compress_rope_theta
with YaRN's frequencies (Peng et al. 2023), without its magnitude factor.
"""

import math

import torch
from torch import Tensor

from finwhale.models.rope_config import YarnScaling


def inverse_frequencies(theta: float, width: int, yarn: YarnScaling | None) -> Tensor:
    """[width/2] float32: theta^(-2i/width), interpolated by YaRN unless `yarn` is None."""
    inverse = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if yarn is None or yarn.factor == 1.0:
        return inverse

    def correction(num_rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    return inverse / yarn.factor * interpolated + inverse * (1 - interpolated)


class RotaryTables:
    """(cos, sin) of every position: [max_positions, R/2, 2] float32 for each kind of layer. R is
    `width`, the rotated values of a row; thetas: rope_theta and compress_rope_theta.
    """

    def __init__(
        self,
        width: int,
        thetas: tuple[float, float],
        scaling: YarnScaling | None,
        max_positions: int,
        device: torch.device,
    ) -> None:
        def table(theta: float, yarn: YarnScaling | None) -> Tensor:
            inverse = inverse_frequencies(theta, width, yarn)
            angle = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
            return torch.stack((angle.cos(), angle.sin()), -1).to(device)

        self.plain, self.compressed = table(thetas[0], None), table(thetas[1], scaling)

    def limit(self, max_positions: int) -> None:
        """Keep the tables of the first max_positions positions only."""
        if max_positions < len(self.plain):
            self.plain = self.plain[:max_positions].clone()
            self.compressed = self.compressed[:max_positions].clone()
