"""Allocates a rank's weights, and knows where each stored weight goes.

A model's table (table.py) allocates memory before loading. Each weight has targets, so experts and
fused projections never exist twice. Operator tables that support packed weights get the stored FP8
and FP4 codes with their scales; other tables get the dequantised values.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from finwhale.checkpoint.formats import FP4_BLOCK, fp8_scale_shape
from finwhale.checkpoint.spec import FP8_BLOCKS, Slice, Storage, WeightSpec, name_of_scale
from finwhale.checkpoint.stored import PLAIN_STORAGES
from finwhale.distributed.peers import Peers
from finwhale.distributed.rank import ALONE, Rank
from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.weights.destinations import Destinations
from finwhale.weights.table import Convert, WeightList

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
        peers: the ranks that share lookup tables.
        dummy: the weights are random, so lookup tables have up to DUMMY_ROWS rows.
    """

    ops: Ops
    dtype: torch.dtype
    round_activations: bool
    round_wo_a: bool = True
    rank: Rank = ALONE
    storages: Mapping[str, Storage] | None = None
    peers: Peers = field(default_factory=Peers)
    dummy: bool = False


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
        scale: float32 scales of E4M3 values, or uint8: the exponents of E4M3 rows or of all FP4
            codes, in their stored form.
        part: the slice of the loaded weight; None: all of it.
        convert: maps dequantised values to those of `data`; None: only the dtype changes.
    """

    data: Tensor
    scale: Tensor | None = None
    part: Slice | None = None
    convert: Convert | None = None


class Allocation(WeightList):
    """The tensors of a rank's weights, without values.

    On the "meta" device it allocates nothing, and `num_bytes` is the size of the weights.

    Attributes:
        num_bytes: bytes of all weights but lookup tables, before `finish_experts` converts some.
        destinations: by name of a weight or scale, where its bytes can be read directly. The E8M0
            scales of FP8 weights are converted later; other tensors here need no conversion.
    """

    def __init__(self, form: WeightForm, device: torch.device) -> None:
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

    # --- The calls of a model's table (WeightList has their docstrings) ---------------------------

    def tensor(
        self,
        spec: WeightSpec,
        dtype: torch.dtype = torch.float32,
        *,
        shape: tuple[int, ...] | None = None,
        convert: Convert | None = None,
    ) -> Tensor:
        tensor = self._empty(shape or spec.local_shape, dtype)
        self._add_target(spec, Target(tensor, convert=convert))
        return tensor

    def projection(self, *specs: WeightSpec) -> LinearWeight:
        block = self._fp8_block(specs)
        if block is None:
            return self._stacked(specs, self.dtype, input_group=self._group)
        rows = [spec.local_shape[0] for spec in specs]
        weight, scale = self._empty_fp8((sum(rows), specs[0].local_shape[1]), block)
        self._add_fp8(specs, weight, scale, block)
        return self._ops.prepare_linear(
            LinearWeight(weight, self._group, scale, self.dtype, scale_block=block)
        )

    def matrix(
        self, *specs: WeightSpec, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> LinearWeight:
        return self._stacked(specs, dtype, out_dtype=out_dtype)

    def grouped(self, spec: WeightSpec, rows: int) -> LinearWeight:
        shape = spec.local_shape
        groups = shape[0] // rows
        group = self._group if self._form.round_wo_a else 0
        block = self._fp8_block([spec])
        if block is not None and rows % block == 0:
            weight, scale = self._empty_fp8((shape[0], shape[1]), block)
            self._add_fp8([spec], weight, scale, block)
            weight, scale = (part.unflatten(0, (groups, -1)) for part in (weight, scale))
            return self._ops.prepare_linear(
                LinearWeight(weight, group, scale, self.dtype, scale_block=block)
            )
        storage = self._empty((groups, rows, shape[1]), self.dtype)
        w = self._ops.prepare_linear(LinearWeight(storage, group))
        self._add_target(spec, Target(w.weight))
        return w

    def experts(self, specs: Sequence[WeightSpec], count: int | None = None) -> ExpertWeight:
        group, block = self._group, None
        width, hidden = specs[0].local_shape
        if self.packed and count is not None:
            names = [spec.name for spec in specs]
            if self._are_fp4(names, specs[0]):
                return self._fp4_experts(names, specs, count)
        if count is None:
            block = self._fp8_block(specs)
        if block is not None:
            w13, scale13 = self._empty_fp8((2 * width, hidden), block)
            w2, scale2 = self._empty_fp8((hidden, width), block)
            self._add_fp8(specs[:2], w13, scale13, block)
            self._add_fp8(specs[2:], w2, scale2, block)
            return self._ops.prepare_experts(
                ExpertWeight(w13, w2, group, scale13, scale2, scale_block=block)
            )
        lead = () if count is None else (count,)
        w13 = self._empty((*lead, 2 * width, hidden), self.dtype)
        w2 = self._empty((*lead, hidden, width), self.dtype)
        w = self._ops.prepare_experts(ExpertWeight(w13, w2, group))
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

    def _empty_fp8(self, shape: tuple[int, int], block: int) -> tuple[Tensor, Tensor]:
        weight = self._empty(shape, torch.float8_e4m3fn)
        return weight, self._empty(fp8_scale_shape(shape, block), torch.float32)

    def _storage(self, spec: WeightSpec) -> Storage:
        return spec.storage if self._storages is None else self._storages[spec.name]

    @property
    def _group(self) -> int:
        return self.input_group if self._form.round_activations else 0

    def _fp8_block(self, specs: Sequence[WeightSpec]) -> int | None:
        """The blocks of FP8 weights that are stacked in their stored form; None: they are not."""
        storages = set(map(self._storage, specs))
        block = FP8_BLOCKS.get(storages.pop()) if self.packed else None
        # No block may cross a boundary of the stack.
        aligned = block and all(spec.local_shape[0] % block == 0 for spec in specs[:-1])
        return block if aligned and not storages else None

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
        input_group: int = 0,
        out_dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        rows = [spec.local_shape[0] for spec in specs]
        stacked = self._empty((sum(rows), specs[0].local_shape[1]), dtype)
        w = self._ops.prepare_linear(LinearWeight(stacked, input_group, out_dtype=out_dtype))
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

    def _add_fp8(
        self, specs: Sequence[WeightSpec], weight: Tensor, scale: Tensor, block: int
    ) -> None:
        """Add the targets of FP8 weights that are stacked along the rows."""
        start = 0
        for spec in specs:
            stop = start + spec.local_shape[0]
            of_part = scale[start // block : -(-stop // block)]
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
        experts = ExpertWeight(w13, w2, self._group, scale13, scale2)
        return self._ops.prepare_experts(experts)

    def _add_scale_destinations(self) -> None:
        """Allocate the destinations of the E8M0 scales of FP8 weights."""
        sizes = [scale.numel() for scale in self._scales.values()]
        exponents = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        self.destinations.divide(list(map(name_of_scale, self._scales)), exponents, sizes)
