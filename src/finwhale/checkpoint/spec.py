"""The weights that a model needs from a checkpoint: one WeightSpec for each, by official name.

Specs and slices are named tuples: a model has tens of thousands, and frozen data classes take
longer to create and to hash.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from torch import Tensor

Storage = Literal["bf16", "f16", "f32", "i64", "fp8_block", "fp8_block_32", "fp8_row_32", "fp4"]
"""The stored format of a weight. FP8 and FP4 weights also have a `.scale` tensor (formats.py)."""

# Rows and columns of the blocks of FP8 weights.
FP8_BLOCKS: Mapping[Storage, int] = {"fp8_block": 128, "fp8_block_32": 32}


class Slice(NamedTuple):
    """The part of a weight that one rank holds: indices start to stop - 1 along one axis."""

    axis: int
    start: int
    stop: int

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The slice's shape, for a weight of this shape."""
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """The slice of a tensor, as a view."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start)

    def over(self, count: int) -> "Slice":
        """The same slice of a tensor with one element for each `count` elements along the axis."""
        assert self.start % count == 0 and self.stop % count == 0, (self, count)
        return Slice(self.axis, self.start // count, self.stop // count)


class Shard(NamedTuple):
    """How the ranks divide a weight.

    Attributes:
        axis: 0: by rows, 1: by columns.
        of: what the axis counts. A rank with `whole_attention` loads all of what is divided by
            heads or their output groups; one that is `data_parallel` divides experts only.
    """

    axis: int
    of: Literal["heads", "experts", "vocabulary"]


class WeightSpec(NamedTuple):
    """One tensor of the model.

    Attributes:
        name: the official name of the weight; its scales are `scale_name`.
        shape: the logical shape of the whole weight, before packing.
        storage: the weight's format in an official checkpoint of this configuration.
        slice: the part of the weight that this process holds; None: the whole weight.
        shard: how the ranks divide the weight; None: each holds all of it.
        part: the part of the model to which it belongs, for users.
        lookup: the model looks up rows and never reads the whole weight. The ranks of a host share
            it, in host memory and in its stored form; `slice` has the rows that this rank loads.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    slice: Slice | None = None
    shard: Shard | None = None
    part: str = ""
    lookup: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The logical shape of the part that this process holds."""
        return self.shape if self.slice is None else self.slice.shape_in(self.shape)

    @property
    def scale_name(self) -> str:
        """Name of the scale, see `name_of_scale`."""
        return name_of_scale(self.name)

    @property
    def fan_in(self) -> int:
        """The number of input values of the whole projection: the length of the last axis."""
        return self.shape[-1]


def name_of_scale(name: str) -> str:
    """Name of a weight's scale: `x.scale` for `x.weight`."""
    return name.removesuffix(".weight") + ".scale"


Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes) after each weight."""
