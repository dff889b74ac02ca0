"""Rotary position embedding: (cos, sin) tables of the two kinds that the model uses.

Layers without compression: theta = rope_theta. Layers with: theta = compress_rope_theta with YaRN's
frequencies (Peng et al. 2023), without its magnitude factor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.models.deepseek_v4.config import ModelConfig, YarnScaling


def inverse_frequencies(theta: float, width: int, yarn: YarnScaling | None) -> Tensor:
    """[width/2] float32: theta^(-2i/width), interpolated by YaRN where given."""
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


class RotationTables:
    """(cos, sin) for every position: [max_positions, R/2, 2] float32 a kind of layer."""

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device) -> None:
        self.plain = self._table(config, max_positions, compressed=False).to(device)
        self.compressed = self._table(config, max_positions, compressed=True).to(device)

    @staticmethod
    def _table(config: ModelConfig, max_positions: int, *, compressed: bool) -> Tensor:
        inverse = inverse_frequencies(
            config.compress_rope_theta if compressed else config.rope_theta,
            config.qk_rope_head_dim,
            config.rope_scaling if compressed else None,
        )
        angle = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
        return torch.stack((angle.cos(), angle.sin()), -1)

    def for_step(
        self, positions: Tensor, c4_positions: Tensor | None, c128_positions: Tensor | None
    ) -> "Rotations":
        """Rows of the tables for a step's tokens [N] and completing entries [M], int64 each."""
        none = positions[:0]
        return Rotations(
            plain=self.plain.index_select(0, positions),
            compressed=self.compressed.index_select(0, positions),
            c4_entries=self.compressed.index_select(
                0, none if c4_positions is None else c4_positions
            ),
            c128_entries=self.compressed.index_select(
                0, none if c128_positions is None else c128_positions
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotations:
    """(cos, sin) of one step, [.., R/2, 2] float32: of its tokens in both kinds, of its entries."""

    plain: Tensor
    compressed: Tensor
    c4_entries: Tensor
    c128_entries: Tensor
