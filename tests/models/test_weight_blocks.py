"""FP8 weights in blocks of 128 and of 32: packed, a weight's values and scales are those stored."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from finwhale.checkpoint.formats import quantise_fp8_block, scale_to_float32
from finwhale.checkpoint.spec import FP8_BLOCKS, Storage, WeightSpec
from finwhale.checkpoint.stored import StoredWeight
from finwhale.distributed.rank import Rank
from finwhale.ops import load_ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.assembler import Assembler
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.table import Lines, WeightList

CPU = torch.device("cpu")
Weights = tuple[LinearWeight, LinearWeight, LinearWeight, ExpertWeight]


class Stream:
    """Stored weights of blocks whose scales differ."""

    def __init__(self, specs: dict[str, WeightSpec]) -> None:
        self._specs, self.values = specs, dict[str, Tensor]()
        self.storages = {name: spec.storage for name, spec in specs.items()}

    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight]]:
        generator = torch.Generator().manual_seed(0)
        for name, spec in self._specs.items():
            values = torch.randn(spec.shape, generator=generator)
            values *= 2.0 ** torch.randint(-6, 6, values.shape, generator=generator)
            data, scale = quantise_fp8_block(values, block=FP8_BLOCKS[spec.storage])
            self.values[name] = StoredWeight(data, scale, spec.storage).dequantise(torch.float32)
            yield spec, StoredWeight(data, scale, spec.storage).sliced(spec.slice)


def table(make: WeightList, storage: Storage) -> Weights:
    """Rows 0 .. 223 are whole blocks of 32, and not of 128."""
    make.input_group = FP8_BLOCKS[storage]
    w = Lines("", "all", Rank(0, 1))

    def line(name: str, rows: int, columns: int) -> WeightSpec:
        return w(f"{name}.weight", (rows, columns), storage)

    return (
        make.projection(line("a", 256, 320), line("b", 70, 320)),
        make.projection(line("c", 224, 64), line("d", 32, 64)),
        make.grouped(line("e", 512, 96), 256),
        make.experts([line("w1", 128, 256), line("w3", 128, 256), line("w2", 256, 128)]),
    )


def values_of(weight: Tensor, scale: Tensor | None, block: int) -> Tensor:
    if scale is None:
        return weight.float()
    wide = scale.repeat_interleave(block, -2).repeat_interleave(block, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("storage", FP8_BLOCKS)
def test_packed_weights_are_the_stored_ones(storage: Storage, rounds: bool) -> None:
    listed = WeightList()
    table(listed, storage)
    ops = load_ops(Platform.cpu(), reference=True)
    packed = replace(ops, capabilities=replace(ops.capabilities, quantised_weights=True))
    stream, block = Stream(listed.specs), FP8_BLOCKS[storage]
    form = WeightForm(
        ops=packed, dtype=torch.float32, round_activations=rounds, storages=stream.storages
    )
    weights = Assembler(lambda make: table(make, storage), form, CPU).fill(stream)
    stacked, second, grouped, shared = weights
    want = {name.removesuffix(".weight"): value for name, value in stream.values.items()}
    group = block if rounds else 0
    assert all(w.input_group == group for w in weights)
    # A block of 128 would cross the boundary of c and d, so these are dequantised.
    assert second.scale is None if block == 128 else second.scale_block == block
    for w in (stacked, grouped, shared):
        assert w.scale_block == block
    for linear, wanted in (
        (stacked, torch.cat((want["a"], want["b"]))),
        (second, torch.cat((want["c"], want["d"]))),
        (grouped, want["e"].unflatten(0, (2, 256))),
    ):
        assert torch.equal(values_of(linear.weight, linear.scale, block), wanted)
    assert shared.scale13 is not None and shared.scale2 is not None
    first = torch.cat((want["w1"], want["w3"]))
    assert torch.equal(values_of(shared.w13, shared.scale13, block), first)
    assert torch.equal(values_of(shared.w2, shared.scale2, block), want["w2"])
    part = stacked.rows(block, 256)
    assert torch.equal(values_of(part.weight, part.scale, block), want["a"][block:])


def test_kernels_for_gpus_read_blocks_of_128_alone() -> None:
    pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
    data, scale = quantise_fp8_block(torch.randn(64, 64), block=32)
    ops = load_ops(Platform("nvidia", "sm90"))
    prepare, prepare_experts = ops.prepare_linear, ops.prepare_experts
    with pytest.raises(ValueError, match="read blocks of 128, got 0 and 32"):
        prepare(LinearWeight(data, 0, scale_to_float32(scale), scale_block=32))
    with pytest.raises(ValueError, match=r"groups of 128 .* got 32 and 128"):
        prepare(LinearWeight(data.float(), 32))
    codes = torch.zeros(2, 64, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"groups of 128 .* got 32 and 128"):
        prepare_experts(ExpertWeight(codes, codes, 32))
