"""What a model wants from a checkpoint: one WeightSpec a weight, in official names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Storage = Literal["bf16", "f16", "f32", "i64", "fp8_block", "fp4"]
"""How a weight is stored; "fp8_block" and "fp4" (formats.py) have a `.scale` tensor beside it."""


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
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def fan_in(self) -> int:
        """Length of the last axis: what one output value sums over in a projection."""
        return self.shape[-1]


Select = Callable[[WeightSpec], bool]
"""Whether this process wants a weight."""

Progress = Callable[[int, int], object]
"""Called with (bytes done, bytes in all) after each weight."""
