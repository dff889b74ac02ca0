"""Lists a model's weights: the base of the classes for which a model's table is written."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.checkpoint.spec import Shard, Slice, Storage, WeightSpec
from finwhale.checkpoint.stored import has_scale, row_dtype, scale_shape
from finwhale.distributed.rank import ALONE, Rank
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight

Convert = Callable[[Tensor], Tensor]
# The most rows of a lookup table of random weights. All pages of a GPU's tables are pinned, and
# 2^24 rows of DeepSeek-V4.1 take 4.4 GB.
DUMMY_ROWS = 2**24


class Lines:
    """Makes the specs of weights whose names begin alike.

    Args:
        prefix: the common beginning of the names.
        part: the part of the model to which the weights belong, for users.
        rank: the rank that holds the weights.
    """

    def __init__(self, prefix: str, part: str, rank: Rank) -> None:
        self.prefix, self._part, self._rank = prefix, part, rank

    def __call__(
        self, name: str, shape: tuple[int, ...], storage: Storage, shard: Shard | None = None
    ) -> WeightSpec:
        """The spec of one weight.

        Args:
            shape: the shape of the whole weight.
            shard: how the ranks divide it; None: each rank holds all of it.
        """
        part = None if shard is None else _slice(shape, shard, self._rank)
        return WeightSpec(self.prefix + name, shape, storage, part, shard, self._part)


def _slice(shape: tuple[int, ...], shard: Shard, rank: Rank) -> Slice | None:
    """The slice of a weight that a rank loads; None: the whole weight."""
    if rank.size == 1 or (shard.of == "heads" and rank.whole_attention):
        return None
    if rank.data_parallel and shard.of != "experts":
        return None
    length, rest = divmod(shape[shard.axis], rank.size)
    assert not rest, (shape, shard, rank)
    return Slice(shard.axis, rank.index * length, (rank.index + 1) * length)


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A matrix whose rows the model looks up, in host memory that all ranks of a host share.

    Attributes:
        rows: [N, K] in the stored dtype; E4M3 if there are scales.
        scale: uint8 [N, K/32], an E8M0 byte for each 1x32 values; None: the rows are values.
    """

    rows: Tensor
    scale: Tensor | None = None


def table_bytes(specs: Mapping[str, WeightSpec], storages: Mapping[str, Storage]) -> int:
    """Bytes of host memory that a model's lookup tables take, once for all ranks of a host."""
    total = 0
    for spec in (spec for spec in specs.values() if spec.lookup):
        storage = storages.get(spec.name, spec.storage)
        scales = math.prod(scale_shape(spec.shape, storage)) if has_scale(storage) else 0
        total += math.prod(spec.shape) * row_dtype(storage).itemsize + scales
    return total


class WeightList:
    """Collects the specs of all weights. Its tensors are empty; an Assembler allocates them.

    A model's table calls a method for each tensor that the model reads, with the weights that this
    tensor contains. A second call with the same weight makes a copy of it, or of a slice.

    Attributes:
        specs: by name, in the table's order; the slices are those that the rank loads.
        dtype: dtype of projections that are not packed.
        packed: FP8 and FP4 weights keep their codes and scales.
        input_group: values that share a scale where the inputs of FP8 and FP4 weights are rounded.
    """

    dtype = torch.bfloat16
    packed = True
    input_group = 128

    def __init__(self, rank: Rank = ALONE) -> None:
        self.rank = rank
        self.specs: dict[str, WeightSpec] = {}
        self._empty_tensor = torch.empty(0, device="meta")

    def _add(self, specs: Sequence[WeightSpec]) -> None:
        for spec in specs:
            self.specs.setdefault(spec.name, spec)

    def tensor(
        self,
        spec: WeightSpec,
        dtype: torch.dtype = torch.float32,
        *,
        shape: tuple[int, ...] | None = None,
        convert: Convert | None = None,
    ) -> Tensor:
        """One weight as a tensor that needs no special layout.

        Args:
            shape: the tensor's shape, if it is not that of the weight.
            convert: maps the loaded values to those of the tensor.
        """
        self._add([spec])
        return self._empty_tensor

    def projection(self, *specs: WeightSpec) -> LinearWeight:
        """Matrices that the checkpoint stores in FP8, stacked along the rows."""
        self._add(specs)
        return LinearWeight(self._empty_tensor)

    def matrix(
        self, *specs: WeightSpec, dtype: torch.dtype, out_dtype: torch.dtype | None = None
    ) -> LinearWeight:
        """Matrices that are never packed, stacked along the rows. Their input is not rounded."""
        self._add(specs)
        return LinearWeight(self._empty_tensor)

    def grouped(self, spec: WeightSpec, rows: int) -> LinearWeight:
        """A grouped linear [G, rows, K], which the checkpoint stores as a matrix [G * rows, K]."""
        self._add([spec])
        return LinearWeight(self._empty_tensor)

    def lookup(self, spec: WeightSpec) -> LookupTable:
        """A matrix whose rows are looked up. Each rank loads some rows of it for all."""
        self._add([self._shared(spec)])
        return LookupTable(self._empty_tensor)

    def _shared(self, spec: WeightSpec) -> WeightSpec:
        rows = self.rank.rows(spec.shape[0])
        part = None if self.rank.size == 1 else Slice(0, rows.start, rows.stop)
        return spec._replace(lookup=True, slice=part)

    def experts(self, specs: Sequence[WeightSpec], count: int | None = None) -> ExpertWeight:
        """Experts.

        Args:
            specs: w1, w3 and w2 of the first expert, then of the second, and so on.
            count: the number of routed experts; None: one expert that all tokens share.
        """
        self._add(specs)
        return ExpertWeight(self._empty_tensor, self._empty_tensor)
