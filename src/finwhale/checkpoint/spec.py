"""What a model wants from a checkpoint: one WeightSpec a logical tensor, in official names."""

from dataclasses import dataclass
from typing import Literal

Storage = Literal["bf16", "f16", "f32", "i64", "fp8_block", "fp4"]
"""How a weight is stored; "fp8_block" and "fp4" (formats.py) have a `.scale` tensor beside it."""

QUANTISED: tuple[Storage, ...] = ("fp8_block", "fp4")
PLAIN: tuple[Storage, ...] = ("bf16", "f16", "f32")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the model.

    Attributes:
        name: the official name of the weight; its scales are `scale_name`.
        shape: the logical shape, before packing.
        storage: how an official checkpoint of this configuration stores it.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage

    @property
    def scale_name(self) -> str:
        """`x.scale` for `x.weight`."""
        return scale_name(self.name)

    @property
    def fan_in(self) -> int:
        """Length of the last axis: what one output value sums over in a projection."""
        return self.shape[-1]


def scale_name(weight_name: str) -> str:
    """The name of the scales of a quantised weight."""
    return weight_name.removesuffix(".weight") + ".scale"
