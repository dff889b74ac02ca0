"""Assembles a rank's weights: allocates them, and writes each loaded weight into its tensors.

A model's table (table.py) allocates memory before loading. Each weight has targets, so experts and
fused projections never exist twice. Operator tables that support packed weights get the stored FP8
and FP4 codes with their scales; other tables get the dequantised values. A start and an update use
the same code, an update on a copy in host memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from finwhale.checkpoint.collection import no_collection
from finwhale.checkpoint.formats import (
    FP4_BLOCK,
    FP8_BLOCK,
    e8m0_bytes,
    e8m0_to_float32,
    fp8_scale_shape,
    scale_to_float32,
)
from finwhale.checkpoint.spec import Slice, Storage, WeightSpec, name_of_scale
from finwhale.checkpoint.stored import PLAIN_STORAGES, StoredWeight
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import CheckpointError
from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.table import Convert, WeightList
from finwhale.weights.tree import routed_experts, tensors_of, with_routed_experts

# Unquantised weights of at least this size that need no conversion are read directly into their
# final memory. Smaller ones are not, because each direct read costs a separate check of the values
# after the last byte has arrived.
LARGE_BYTES = 2**20
# Tensors on these devices share allocations. The first has FIRST_SLAB_BYTES, and each later one
# twice as many, up to SLAB_BYTES. Ranks that load together map each other's allocations, which
# takes a millisecond for each.
SLAB_DEVICES = ("cuda",)
FIRST_SLAB_BYTES = 2**24
SLAB_BYTES = 2**28
SLAB_ALIGN = 256

W = TypeVar("W")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """How a rank holds a model's weights.

    Attributes:
        ops: the operator table that reads the weights and chooses their memory layout.
        dtype: dtype of the projections that the checkpoint stores in FP8, FP4 or bf16. Norms,
            router, compressors, sinks and mHC are float32.
        round_activations: round the inputs of FP8 and FP4 projections to E4M3.
        round_wo_a: with round_activations, also round the input of wo_a.
        storages: the stored format of each weight; None: the model's table says it.
    """

    ops: Ops
    dtype: torch.dtype
    round_activations: bool
    round_wo_a: bool = True
    rank: Rank = ALONE
    storages: Mapping[str, Storage] | None = None


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


class Slabs:
    """Allocates tensors that share a few large allocations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # the rest of each allocation, newest last
        self._size = FIRST_SLAB_BYTES

    def allocate(self, num_bytes: int) -> None:
        """Make an allocation, in which the next tensors lie as long as they fit."""
        self._free.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def empty(self, num_bytes: int) -> Tensor:
        """A uint8 tensor [num_bytes] without values."""
        size = -(-num_bytes // SLAB_ALIGN) * SLAB_ALIGN
        fits = (i for i in reversed(range(len(self._free))) if len(self._free[i]) >= size)
        at = next(fits, None)
        if at is None:
            self.allocate(max(size, self._size))
            self._size = min(2 * self._size, SLAB_BYTES)
            at = -1
        memory = self._free[at]
        if size == len(memory):
            del self._free[at]
        else:
            self._free[at] = memory[size:]
        return memory[:num_bytes]


class Target(NamedTuple):
    """A place in the assembled weights for the values of one weight.

    Attributes:
        data: the values: of any strides, dequantised; E4M3; or uint8: FP4 codes of many experts,
            each of which has a destination.
        scale: float32 scales of E4M3 values, or the exponents of all FP4 codes.
        part: the slice of the loaded weight; None: all of it.
        convert: maps dequantised values to those of `data`; None: only the dtype changes.
    """

    data: Tensor
    scale: Tensor | None = None
    part: Slice | None = None
    convert: Convert | None = None


class Assembler(WeightList, Generic[W]):
    """A rank's weights during loading, one weight after the other, in any order.

    On the "meta" device it allocates nothing, and `num_bytes` is the size of the weights.

    Args:
        make: calls this object's methods for every weight, and returns the model's weights.

    Attributes:
        num_bytes: bytes of all weights, before `finish` brings some into another form.
        destinations: by name of a weight or scale, where its bytes can be read directly. `finish`
            converts the E8M0 scales of FP8 weights; other tensors here need no conversion.
    """

    def __init__(
        self, make: Callable[[WeightList], W], form: WeightForm, device: torch.device
    ) -> None:
        super().__init__(form.rank)
        self.dtype, self.packed = form.dtype, form.ops.capabilities.quantised_weights
        self.destinations = Destinations()
        self.num_bytes = 0
        self._form, self._ops, self._device = form, form.ops, device
        self._storages = form.storages
        self._slabs = Slabs(device) if device.type in SLAB_DEVICES else None
        self._targets: dict[str, tuple[Target, ...]] = {}
        # By name of an FP8 weight in `destinations`: the float32 tensor of its converted scales.
        self._scales: dict[str, Tensor] = {}
        self._read_directly: list[str] = []
        with no_collection():
            self._weights = make(self)
            self._add_scale_destinations()
            self._waiting = set(self._targets)

    # --- The calls of a model's table -------------------------------------------------------------

    def tensor(
        self,
        spec: WeightSpec,
        dtype: torch.dtype = torch.float32,
        *,
        shape: tuple[int, ...] | None = None,
        convert: Convert | None = None,
    ) -> Tensor:
        """See WeightList."""
        tensor = self._empty(shape or spec.local_shape, dtype)
        self._add_target(spec, Target(tensor, convert=convert))
        return tensor

    def projection(self, *specs: WeightSpec) -> LinearWeight:
        """See WeightList."""
        if not (self.packed and self._are_fp8(specs)):
            return self._stacked(specs, self.dtype, round_input=self._form.round_activations)
        rows = [spec.local_shape[0] for spec in specs]
        weight, scale = self._empty_fp8((sum(rows), specs[0].local_shape[1]))
        self._add_fp8(specs, weight, scale)
        round_input = self._form.round_activations
        return self._ops.prepare_linear(LinearWeight(weight, round_input, scale, self.dtype))

    def matrix(
        self, *specs: WeightSpec, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> LinearWeight:
        """See WeightList."""
        return self._stacked(specs, dtype, out_dtype=out_dtype)

    def grouped(self, spec: WeightSpec, rows: int) -> LinearWeight:
        """See WeightList."""
        shape = spec.local_shape
        groups = shape[0] // rows
        round_input = self._form.round_activations and self._form.round_wo_a
        if self.packed and self._are_fp8([spec]) and rows % FP8_BLOCK == 0:
            weight, scale = self._empty_fp8((shape[0], shape[1]))
            self._add_fp8([spec], weight, scale)
            weight, scale = (part.unflatten(0, (groups, -1)) for part in (weight, scale))
            return self._ops.prepare_linear(LinearWeight(weight, round_input, scale, self.dtype))
        storage = self._empty((groups, rows, shape[1]), self.dtype)
        w = self._ops.prepare_linear(LinearWeight(storage, round_input))
        self._add_target(spec, Target(w.weight))
        return w

    def experts(self, specs: Sequence[WeightSpec], count: int | None = None) -> ExpertWeight:
        """See WeightList."""
        round_input = self._form.round_activations
        width, hidden = specs[0].local_shape
        if self.packed and count is not None:
            names = [spec.name for spec in specs]
            if self._are_fp4(names, specs[0]):
                return self._fp4_experts(names, specs, count)
        if self.packed and count is None and self._are_fp8(specs):
            w13, scale13 = self._empty_fp8((2 * width, hidden))
            w2, scale2 = self._empty_fp8((hidden, width))
            self._add_fp8(specs[:2], w13, scale13)
            self._add_fp8(specs[2:], w2, scale2)
            return self._ops.prepare_experts(ExpertWeight(w13, w2, round_input, scale13, scale2))
        lead = () if count is None else (count,)
        w13 = self._empty((*lead, 2 * width, hidden), self.dtype)
        w2 = self._empty((*lead, hidden, width), self.dtype)
        w = self._ops.prepare_experts(ExpertWeight(w13, w2, round_input))
        all13, all2 = ([w.w13], [w.w2]) if count is None else (w.w13.unbind(), w.w2.unbind())
        parts = zip(all13, all2, strict=True)
        self._add_targets(specs, (part for w13, w2 in parts for part in (*w13.chunk(2), w2)))
        return w

    # --- Allocation -------------------------------------------------------------------------------

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._slabs is None:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        else:
            tensor = self._slabs.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.num_bytes += tensor.nbytes
        return tensor

    def _empty_fp8(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        weight = self._empty(shape, torch.float8_e4m3fn)
        return weight, self._empty(fp8_scale_shape(shape), torch.float32)

    def _storage(self, spec: WeightSpec) -> Storage:
        return spec.storage if self._storages is None else self._storages[spec.name]

    def _are_fp8(self, specs: Sequence[WeightSpec]) -> bool:
        """Whether all weights are FP8 and no scale block crosses a boundary of their stack."""
        return all(self._storage(spec) == "fp8_block" for spec in specs) and all(
            spec.local_shape[0] % FP8_BLOCK == 0 for spec in specs[:-1]
        )

    def _are_fp4(self, names: Iterable[str], like: WeightSpec) -> bool:
        """Whether all experts are FP4. like: the spec of one of them."""
        if self._storages is None:
            return like.storage == "fp4"
        return set(map(self._storages.__getitem__, names)) == {"fp4"}

    def _stacked(
        self,
        specs: Sequence[WeightSpec],
        dtype: torch.dtype,
        *,
        round_input: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        rows = [spec.local_shape[0] for spec in specs]
        stacked = self._empty((sum(rows), specs[0].local_shape[1]), dtype)
        w = self._ops.prepare_linear(LinearWeight(stacked, round_input, out_dtype=out_dtype))
        self._add_targets(specs, w.weight.split(rows))
        return w

    def _add_targets(self, specs: Iterable[WeightSpec], tensors: Iterable[Tensor]) -> None:
        for spec, tensor in zip(specs, tensors, strict=True):
            self._add_target(spec, Target(tensor))

    def _add_target(self, spec: WeightSpec, target: Target) -> bool:
        """Add a target of one weight. Returns whether the weight has a destination there."""
        name, data = spec.name, target.data
        loaded = self.specs.setdefault(name, spec)
        if spec.slice != loaded.slice:
            target = target._replace(part=spec.slice)
        others = self._targets.get(name, ())
        self._targets[name] = (*others, target)
        if others or target.part is not None or not data.is_contiguous():
            return False
        if target.scale is None:
            same = self._storage(spec) == PLAIN_STORAGES.get(data.dtype)
            if not same or target.convert is not None or data.nbytes < LARGE_BYTES:
                return False
        self.destinations.add(name, data)
        return True

    def _add_fp8(self, specs: Sequence[WeightSpec], weight: Tensor, scale: Tensor) -> None:
        """Add the targets of FP8 weights that are stacked along the rows."""
        start = 0
        for spec in specs:
            stop = start + spec.local_shape[0]
            of_part = scale[start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
            if self._add_target(spec, Target(weight[start:stop], of_part)):
                self._scales[spec.name] = of_part
            start = stop

    def _fp4_experts(
        self, names: Sequence[str], specs: Sequence[WeightSpec], count: int
    ) -> ExpertWeight:
        """Allocate FP4 codes and exponents in their stored form."""
        width, hidden = specs[0].local_shape
        if self._slabs is not None:
            # One allocation for all of them: 3 hidden * width values in codes and exponents.
            values = 3 * hidden * width * count
            self._slabs.allocate(values // 2 + values // FP4_BLOCK)
        self.specs.update(zip(names, specs, strict=True))

        def allocate(names: Sequence[str], rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = self._empty((count, rows, columns // 2), torch.uint8)
            exponents = self._empty((count, rows, columns // FP4_BLOCK), torch.uint8)
            each = len(names)
            self.destinations.divide(names, codes, [codes.nbytes // each] * each)
            scales = list(map(name_of_scale, names))
            self.destinations.divide(scales, exponents, [exponents.nbytes // each] * each)
            # One target for all: `_add_target` for each of 36,000 weights would take too long.
            self._targets.update(dict.fromkeys(names, (Target(codes, exponents),)))
            return codes, exponents

        names13 = [name for i, name in enumerate(names) if i % 3 < 2]
        w13, scale13 = allocate(names13, 2 * width, hidden)
        w2, scale2 = allocate(names[2::3], hidden, width)
        experts = ExpertWeight(w13, w2, self._form.round_activations, scale13, scale2)
        return self._ops.prepare_experts(experts)

    def _add_scale_destinations(self) -> None:
        """Allocate the destinations of the E8M0 scales of FP8 weights."""
        sizes = [scale.numel() for scale in self._scales.values()]
        exponents = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        self.destinations.divide(list(map(name_of_scale, self._scales)), exponents, sizes)

    # --- Loading ----------------------------------------------------------------------------------

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
        if target.data.dtype == torch.uint8:
            assert stored.storage == "fp4"
            self.destinations[name].copy_(stored.data.view(torch.uint8).reshape(-1))
            scales = self.destinations[name_of_scale(name)]
            scales.copy_(e8m0_bytes(stored.scale).reshape(-1))
        else:
            assert stored.storage == "fp8_block"
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
                if name in self._scales:
                    exponents = self.destinations[name_of_scale(name)]
                    scale = exponents.view(torch.float8_e8m0fnu).view(fp8_scale_shape(shape))
                storage = self._storage(self.specs[name])
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
            done = _moved(self._ops.finish_experts(_moved(experts, device)), home)
            complete.update(map(id, tensors_of(done)))
            return done

        weights = with_routed_experts(self._weights, convert)
        complete.update(id(t) for t in tensors_of(weights) if _memory(t) in arrived)
        return weights, frozenset(complete)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _moved(experts: ExpertWeight, device: torch.device) -> ExpertWeight:
    tensors = {
        field.name: getattr(experts, field.name).to(device)
        for field in fields(experts)
        if isinstance(getattr(experts, field.name), Tensor)
    }
    return replace(experts, **tensors)
