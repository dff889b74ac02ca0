"""Assembles a rank's weights: writes each loaded weight into its tensors.

A start and an update use the same code, an update on a copy in host memory.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from finwhale.checkpoint.formats import (
    e8m0_bytes,
    e8m0_to_float32,
    fp8_scale_shape,
    scale_to_float32,
)
from finwhale.checkpoint.spec import FP8_BLOCKS, Storage, WeightSpec, name_of_scale
from finwhale.checkpoint.stored import StoredWeight
from finwhale.collection import no_collection
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import CheckpointError
from finwhale.ops import Ops
from finwhale.ops.moe import ExpertWeight
from finwhale.weights.allocation import Allocation, Target, WeightForm
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.table import WeightList
from finwhale.weights.tree import routed_experts, tensors_of, with_leaves, with_routed_experts

C = TypeVar("C")
W = TypeVar("W")


class WeightStream(Protocol):
    """Reads the weights of a checkpoint, in any order."""

    @property
    def storages(self) -> Mapping[str, Storage]: ...
    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        """Yield each weight's specification and stored values.

        Args:
            destinations: where the bytes of some weights and of the lookup tables go. If the stream
                has written a weight there itself, it yields None instead of the values.
            ranks: the ranks that iterate together, if they can read for each other.
        """


class Assembler(Allocation, Generic[W]):
    """A rank's weights during loading, one weight after the other, in any order.

    Args:
        make: calls this object's methods for every weight, and returns the model's weights.
    """

    def __init__(
        self, make: Callable[[WeightList], W], form: WeightForm, device: torch.device
    ) -> None:
        super().__init__(form, device)
        self._read_directly: list[str] = []
        with no_collection():
            self._weights = make(self)
            self._add_scale_destinations()
            self._waiting = set(self._targets)

    def fill(self, stream: WeightStream, ranks: JointRanks | None = None) -> W:
        """Add every weight of `stream`, one at a time, and return the loaded weights.

        Args:
            ranks: the ranks that load together, if they can read for each other.

        Raises:
            CheckpointError: a tensor occurs twice, is unknown, or is missing.
        """
        with no_collection():
            for spec, stored in stream.into(self.destinations, ranks):
                self.add(spec, stored)
        return self.finish()

    def add(self, spec: WeightSpec, stored: StoredWeight | None) -> None:
        """Copy a stored weight to its targets; None: its bytes have gone to its destination.

        Raises:
            CheckpointError: the weight occurs twice, is unknown, or has invalid values.
        """
        name = spec.name
        if name not in self._waiting:
            raise CheckpointError(f"tensor {name} occurs twice or is not in this model")
        assert spec.slice == self.specs[name].slice, "a stream of another rank"
        self._waiting.remove(name)
        if stored is None:
            self._read_directly.append(name)
        else:
            for target in self._targets[name]:
                self._write(name, stored, target)

    def _write(self, name: str, stored: StoredWeight, target: Target) -> None:
        stored = stored.sliced(target.part)
        if target.scale is None:
            # Without a scale, `copy_` converts, which avoids a second, float32 embedding.
            dtype = torch.float32 if stored.scale is not None else stored.data.dtype
            values = stored.dequantise(dtype, self._device)
            if target.convert is not None:
                values = target.convert(values)
            target.data.copy_(values.view(target.data.shape))
            return
        assert stored.scale is not None
        if target.scale.dtype == torch.uint8:  # codes and exponents in their stored form
            assert stored.storage in ("fp4", "fp8_row_32")
            self.destinations[name].copy_(stored.data.view(torch.uint8).reshape(-1))
            scales = self.destinations[name_of_scale(name)]
            scales.copy_(e8m0_bytes(stored.scale).reshape(-1))
        else:
            assert stored.storage in FP8_BLOCKS
            target.data.copy_(stored.data)
            target.scale.copy_(scale_to_float32(stored.scale))

    def finish(self) -> W:
        """The loaded weights. Raises CheckpointError if one is missing."""
        if self._waiting:
            waiting = self._waiting
            raise CheckpointError(f"{len(waiting)} tensors are missing, such as {min(waiting)}")
        self._convert_scales()
        self._copy_from_destinations()
        if self._device.type == "cuda":
            # Free the temporary tensors of loading now. Otherwise converting the experts allocates
            # small tensors in their segments, and each one keeps up to a gigabyte reserved.
            torch.cuda.empty_cache()
        return with_routed_experts(self._weights, self._ops.finish_experts)

    def finish_unfilled(self) -> W:
        """The weights without their values, on the meta device."""
        return with_routed_experts(self._weights, self._ops.finish_experts)

    def _convert_scales(self) -> None:
        """Convert the scales of FP8 weights that were read directly."""
        read = set(self._read_directly)
        arrived = [name for name in self._scales if name in read]
        if arrived:
            parts = [self.destinations[name_of_scale(name)] for name in arrived]
            values = e8m0_to_float32(torch.cat(parts).view(torch.float8_e8m0fnu))
            targets = [self._scales[name].view(-1) for name in arrived]
            torch._foreach_copy_(targets, values.split([len(part) for part in parts]))

    def _copy_from_destinations(self) -> None:
        """Write the other targets of weights that were read directly into their first one."""
        for name in self._read_directly:
            first, *others = self._targets[name]
            for target in others:
                shape, scale = self.specs[name].local_shape, None
                storage = self._storage(self.specs[name])
                if name in self._scales:
                    exponents = self.destinations[name_of_scale(name)]
                    scale = exponents.view(torch.float8_e8m0fnu)
                    scale = scale.view(fp8_scale_shape(shape, FP8_BLOCKS[storage]))
                self._write(name, StoredWeight(first.data.view(shape), scale, storage), target)

    def finish_part(self, device: torch.device, current: W) -> tuple[W, frozenset[int]]:
        """The weights of an update, some of which may be missing.

        A tensor that contains several weights must have all of them, or none.

        Args:
            device: the device on which the operators convert the experts. The results return to the
                device of the other weights.
            current: the weights that are updated; the result has the same tensors in the same
                order. Missing experts are taken from them, because the operators may convert
                experts to other tensors than those that were loaded.

        Returns:
            The weights, and the ids (`id`) of the tensors in them that are complete.

        Raises:
            CheckpointError: a tensor has only some of its weights.
        """
        memories = {
            name: {_memory(part) for t in targets for part in (t.data, t.scale) if part is not None}
            for name, targets in self._targets.items()
        }
        arrived = set[int]().union(*(memories[n] for n in memories.keys() - self._waiting))
        for name in sorted(self._waiting):
            if memories[name] & arrived:
                raise CheckpointError(
                    f"the update lacks {name}, which shares a packed tensor with weights that it "
                    "has: send them together"
                )
        complete: set[int] = set()
        running = iter(routed_experts(current))

        def convert(experts: ExpertWeight) -> ExpertWeight:
            known, halves = next(running), (experts.w13, experts.w2)
            if not all(_memory(half) in arrived for half in halves):
                if any(_memory(half) in arrived for half in halves):
                    raise CheckpointError("the update has only some matrices of a layer's experts")
                return known
            home = experts.w13.device
            there = with_leaves(experts, Tensor, lambda t: t.to(device))
            done = with_leaves(self._ops.finish_experts(there), Tensor, lambda t: t.to(home))
            complete.update(map(id, tensors_of(done)))
            return done

        weights = with_routed_experts(self._weights, convert)
        complete.update(id(t) for t in tensors_of(weights) if _memory(t) in arrived)
        return weights, frozenset(complete)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bytes_of(
    assembler: Callable[[C, WeightForm, torch.device], Assembler[W]],
    config: C,
    dtype: torch.dtype,
    ops: Ops,
    rank: Rank = ALONE,
) -> int:
    """Bytes of a rank's weights in the operator table's memory layout."""
    form = WeightForm(ops=ops, dtype=dtype, round_activations=True, rank=rank)
    return assembler(config, form, torch.device("meta")).num_bytes
