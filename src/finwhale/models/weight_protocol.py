"""What the engine needs of a model's weights: their specifications, sizes and loading."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from finwhale.checkpoint.destinations import Destinations
from finwhale.checkpoint.joint import JointRanks
from finwhale.checkpoint.loading import StoredWeight
from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.distributed.rank import ALONE, Rank
from finwhale.ops import Ops


class WeightStream(Protocol):
    """Reads the weights of a checkpoint, in any order."""

    @property
    def storages(self) -> Mapping[str, Storage]: ...
    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        """Yield each weight's specification and stored values.

        Args:
            destinations: where the bytes of some weights go. If the stream has written a weight to
                its destination itself, it yields None instead of the values.
            ranks: the ranks that iterate together, if they can read for each other.
        """
        ...


class WeightSpecs(Protocol):
    def __call__(self, config: Any, rank: Rank = ALONE) -> Mapping[str, WeightSpec]:
        """Every tensor of a checkpoint by its official name, with the slice that `rank` holds."""
        ...


class WeightBytes(Protocol):
    def __call__(self, config: Any, dtype: torch.dtype, ops: Ops, ranks: int = 1) -> int:
        """Bytes of one rank's weights in the memory layout of the operator table `ops`.

        Args:
            dtype: dtype of the activations.
        """
        ...


class WeightLoading(Protocol):
    """A rank's weights during loading, one tensor after the other, in any order.

    Attributes:
        num_bytes: bytes of all weights, as they are before `fill` brings some into another form.
    """

    @property
    def num_bytes(self) -> int: ...

    def fill(self, stream: WeightStream, ranks: JointRanks | None = None) -> Any:
        """Add every weight of `stream`, one at a time, and return the loaded weights.

        Args:
            ranks: the ranks that load together, if they can read for each other.

        Raises:
            CheckpointError: a tensor is missing, unknown to the model, or occurs twice.
        """
        ...

    def add(self, spec: WeightSpec, stored: StoredWeight | None) -> None:
        """Copy a stored weight to its targets.

        Raises:
            CheckpointError: the weight occurs twice, is unknown, or has invalid values.
        """
        ...

    def finish_unfilled(self) -> Any:
        """The weights without values: on torch's meta device, where tensors have no memory."""
        ...

    def finish_part(self, device: torch.device, current: Any) -> tuple[Any, frozenset[int]]:
        """The weights, some of which may be missing.

        Args:
            device: the device on which the operators convert weights to their final form.
            current: the weights that are updated; the result has the same tensors in the same
                order.

        Returns:
            The weights (see `fill`), and the ids of the tensors in them that are complete.

        Raises:
            CheckpointError: a tensor has only some of the weights that it is made of.
        """
        ...


class BeginLoading(Protocol):
    def __call__(
        self,
        config: Any,
        *,
        storages: Mapping[str, Storage],
        dtype: torch.dtype,
        device: torch.device,
        round_activations: bool,
        round_wo_a: bool,
        ops: Ops,
        rank: Rank,
    ) -> WeightLoading:
        """Allocate a rank's weights, which the caller then fills.

        Args:
            config: the whole model's configuration.
            storages: the stored format of each weight.
        """
        ...


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in nested data classes, tuples and lists, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    parts: Sequence[object] = ()
    if is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, tuple | list):
        parts = value
    return [tensor for part in parts for tensor in tensors_of(part)]
