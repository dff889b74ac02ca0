"""The weights that a model needs from a checkpoint: one WeightSpec for each, by official name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Storage = Literal["bf16", "f16", "f32", "i64", "fp8_block", "fp4"]
"""The stored format of a weight; "fp8_block" and "fp4" (formats.py) have a `.scale` tensor too."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of the model.

    Attributes:
        name: the official name of the weight; its scales are `scale_name`.
        shape: the logical shape, before packing.
        storage: the weight's format in an official checkpoint of this configuration.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage

    @property
    def scale_name(self) -> str:
        """Name of the scale: `x.scale` for `x.weight`."""
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def fan_in(self) -> int:
        """The number of input values of the projection, which is the length of the last axis."""
        return self.shape[-1]


Select = Callable[[WeightSpec], bool]
"""Returns whether this process needs a weight."""

Progress = Callable[[int, int], object]
"""Called with (bytes done, bytes in all) after each weight."""
