"""Assigns named tensors, which arrive in any order, to a model's weights, and checks each one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.checkpoint.formats import find_nan
from finwhale.checkpoint.names import official_tensors
from finwhale.checkpoint.reader import TensorInfo
from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.checkpoint.stored import (
    DTYPE_NAMES,
    Mismatch,
    StoredWeight,
    has_scale,
    scale_mismatch,
    storage_of,
)
from finwhale.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Announced:
    """The description of a tensor that a sender will send."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def meta(self) -> Tensor:
        """A tensor of this dtype and shape, without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Incoming:
    """The tensors of a weight update.

    Args:
        specs: every weight of the model by name, each with the slice that this process holds.
        ignored: prefixes of names to ignore.
        storages: the format in which each weight must be stored; None: any that loading accepts.
    """

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        ignored: Mapping[str, str],
        storages: Mapping[str, Storage] | None,
    ) -> None:
        self._specs, self._storages = specs, storages
        self._ignored = tuple(ignored)
        self._of_scale = {spec.scale_name: spec.name for spec in specs.values()}
        self._arrived: set[str] = set()
        # Weights that wait for their scales, and scales that wait for their weights.
        self._waiting: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> Iterator[tuple[WeightSpec, StoredWeight]]:
        """Add one tensor, under an official or a transformers name; yields the complete weights.

        A tensor that must wait for its scale or weight is copied. Values of a meta tensor are not
        checked.

        Raises:
            CheckpointError: the model has no such tensor, it arrived before, or it has a wrong
                shape, dtype or value.
        """
        for official, _, part in official_tensors(name, tuple(tensor.shape)):
            yield from self._add(official, tensor if part is None else tensor[part])

    def _add(self, name: str, tensor: Tensor) -> Iterator[tuple[WeightSpec, StoredWeight]]:
        if name.startswith(self._ignored):
            return
        weight = name if name in self._specs else self._of_scale.get(name)
        if weight is None:
            raise CheckpointError(f"the model has no tensor {name}")
        if name in self._arrived:
            raise CheckpointError(f"tensor {name} arrived twice")
        if self._specs[weight].lookup:
            raise CheckpointError(f"{name} is a lookup table: leave it out, or update from files")
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}, which is not supported")
        spec = self._specs[weight]
        if name != weight and weight in self._arrived and weight not in self._waiting:
            raise CheckpointError(f"{weight} arrived without scales, so {name} cannot be used")
        self._arrived.add(name)
        data = tensor if name == weight else self._waiting.pop(weight, None)
        if data is None:
            self._waiting[name] = tensor.clone()
            return
        storage = storage_of(spec, _info(weight, data))
        if isinstance(storage, Mismatch):
            raise CheckpointError(f"the update does not fit the model: {storage}")
        wanted = None if self._storages is None else self._storages[weight]
        if wanted not in (None, storage):
            raise CheckpointError(
                f"{weight} is stored as {storage}, but the kernels' memory is laid out for "
                f"{wanted}, as in the loaded checkpoint"
            )
        scale = None
        if has_scale(storage):
            scale = tensor if name != weight else self._waiting.pop(spec.scale_name, None)
            if scale is None:
                self._waiting[name] = tensor.clone()
                return
            mismatch = scale_mismatch(spec, _info(spec.scale_name, scale), storage)
            if mismatch is not None:
                raise CheckpointError(f"the update does not fit the model: {mismatch}")
        elif name != weight or spec.scale_name in self._waiting:
            raise CheckpointError(f"{weight} is stored as {storage}, so it has no scales")
        fault = None if data.is_meta else find_nan(data, scale)
        if fault is not None:
            raise CheckpointError(f"{weight} holds {fault}")
        yield spec, StoredWeight(data, scale, storage).sliced(spec.slice)

    def check_complete(self, *, partial: bool) -> None:
        """Raise CheckpointError if a scale or, unless `partial`, a weight is missing."""
        for name in self._waiting:
            other = self._of_scale.get(name) or self._specs[name].scale_name
            raise CheckpointError(f"the update has {name} without {other}")
        needed = (name for name, spec in self._specs.items() if not (partial or spec.lookup))
        missing = [name for name in needed if name not in self._arrived]
        if missing:
            raise CheckpointError(
                f"the update lacks {len(missing)} of {len(self._specs)} weights, such as "
                f"{missing[0]}"
            )


def _info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, tensor.dtype, tuple(tensor.shape), tensor.nbytes, "", name, 0)
