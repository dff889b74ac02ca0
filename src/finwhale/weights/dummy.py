"""Dummy weights for a model without a checkpoint: random, seeded, in stored form.

Sizes and storages are those of the real model, and the values are scaled so that activations keep
their magnitude through the layers. Speed and memory are therefore realistic; the text is nonsense.
"""

import math
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from finwhale.checkpoint.formats import E8M0_BIAS, FP4_BLOCK, row_slices
from finwhale.checkpoint.spec import Progress, Storage, WeightSpec
from finwhale.checkpoint.stored import PLAIN_DTYPES, StoredWeight, has_scale, scale_shape
from finwhale.number_formats import E2M1_VALUES
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint_ranks import JointRanks

_E2M1_MEAN_SQUARE = sum(v * v for v in E2M1_VALUES) / len(E2M1_VALUES)
_SMALL = 0.1


class DummySource:
    """Iterates over random weights, generated on a device, like a checkpoint's WeightSource.

    Each weight depends only on its name, the seed and the device. A rank generates the whole weight
    and takes its slice, so the slices of all ranks form the weights of a single rank. On a GPU this
    costs little more than launching the kernels. `progress` counts values, not bytes.
    """

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        device: torch.device | str,
        *,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._specs = specs
        self._device = torch.device(device)
        self._seed = seed
        self._progress = progress

    @property
    def storages(self) -> Mapping[str, Storage]:
        """The stored format of each weight, from its spec."""
        return {name: spec.storage for name, spec in self._specs.items()}

    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        """Iterate over all weights. Nothing writes the lookup tables, which read as zeros."""
        lookups = self._specs.keys() & destinations.lookups
        yield from ((self._specs[name], None) for name in sorted(lookups))
        others = {name: spec for name, spec in self._specs.items() if name not in lookups}
        yield from DummySource(others, self._device, seed=self._seed, progress=self._progress)

    def __iter__(self) -> Iterator[tuple[WeightSpec, StoredWeight]]:
        total = sum(math.prod(spec.shape) for spec in self._specs.values())
        done = 0
        for spec in self._specs.values():
            yield spec, self.make(spec).sliced(spec.slice)
            done += math.prod(spec.shape)
            if self._progress is not None:
                self._progress(done, total)

    def make(self, spec: WeightSpec) -> StoredWeight:
        """Generate one whole weight.

        Norms are 1. Projections have mean 0 and variance 1/fan_in. FP8 has one scale for all
        values; FP4 has uniform codes, and each scale is one of two neighbouring powers of two. A
        tid2eid row holds distinct, uniform experts. The other weights are normal and small.
        """
        generator = torch.Generator(self._device)
        # The CPU's generator accepts a seed of 32 bits.
        generator.manual_seed(zlib.crc32(f"{self._seed} {spec.name}".encode()))
        if spec.storage == "fp4":
            return _fp4(spec, generator)
        if has_scale(spec.storage):
            return _fp8(spec, generator)
        if spec.storage == "i64":
            return StoredWeight(self._experts_of_tokens(spec, generator), None, "i64")
        dtype = PLAIN_DTYPES[spec.storage]
        if spec.name.endswith("norm.weight"):
            data = torch.ones(spec.shape, dtype=dtype, device=self._device)
        else:
            data = torch.empty(spec.shape, dtype=dtype, device=self._device)
            data.normal_(0.0, _deviation(spec), generator=generator)
        return StoredWeight(data, None, spec.storage)

    def _experts_of_tokens(self, spec: WeightSpec, generator: torch.Generator) -> Tensor:
        tokens, count = spec.shape
        router = self._specs[spec.name.removesuffix("tid2eid") + "weight"]
        experts = router.shape[0]
        out = torch.empty(tokens, count, dtype=torch.int64, device=self._device)
        for start, stop in row_slices(tokens, experts, 1):
            part = out[start:stop]
            keys = torch.rand(part.shape[0], experts, generator=generator, device=self._device)
            part.copy_(keys.topk(count).indices)
        return out


def _deviation(spec: WeightSpec) -> float:
    if spec.name == "embed.weight":
        return 1.0
    if spec.name.endswith(("_fn", ".weight")):
        return 1 / math.sqrt(spec.fan_in)
    return _SMALL


def _fp8(spec: WeightSpec, generator: torch.Generator) -> StoredWeight:
    """Normal codes; one power-of-two scale puts their deviation between 32 and 64."""
    device = generator.device
    deviation = 1 / math.sqrt(spec.fan_in)
    exponent = math.floor(math.log2(deviation)) - 5
    data = torch.empty(spec.shape, dtype=torch.float8_e4m3fn, device=device)
    for start, stop in row_slices(spec.shape[0], spec.fan_in, 1):
        part = data[start:stop]
        values = torch.empty(part.shape, device=device)
        values.normal_(0.0, deviation * 2.0**-exponent, generator=generator)
        part.copy_(values.clamp_(-448, 448).to(torch.float8_e4m3fn))
    shape = scale_shape(spec.shape, spec.storage)
    raw = torch.full(shape, exponent + E8M0_BIAS, dtype=torch.uint8, device=device)
    return StoredWeight(data, raw.view(torch.float8_e8m0fnu), spec.storage)


def _fp4(spec: WeightSpec, generator: torch.Generator) -> StoredWeight:
    """Uniform codes; the proportion of scales s and 2s gives the right mean square."""
    device = generator.device
    rows, columns = spec.shape
    data = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    data.random_(0, 256, generator=generator)
    square = 1 / (spec.fan_in * _E2M1_MEAN_SQUARE)
    exponent = math.floor(math.log2(square) / 2)
    larger = (square / 4.0**exponent - 1) / 3
    draws = torch.rand(rows, columns // FP4_BLOCK, generator=generator, device=device)
    raw = (draws < larger).to(torch.uint8) + (exponent + E8M0_BIAS)
    return StoredWeight(data.view(torch.int8), raw.view(torch.float8_e8m0fnu), "fp4")
