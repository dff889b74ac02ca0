"""Loading a rank's part of a checkpoint: all bytes of the published ones, and small files."""

import gc
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.official_config import config_json
from tests.support.writer import write_checkpoint
from tests.unit.test_sharding import MODELS, packed_ops, wanted_axis
from torch import Tensor

from finwhale.checkpoint.reader import Checkpoint, TensorInfo
from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.checkpoint.stored import StoredWeight
from finwhale.checkpoint.writer import write_stored
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.models.deepseek_v4.weights import assembler, weight_specs
from finwhale.ops import load_ops
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.assembler import WeightStream
from finwhale.weights.destinations import Destinations
from finwhale.weights.dummy import DummySource
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.source import WeightSource
from finwhale.weights.staging import Staging

DTYPES: dict[Storage, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i64": torch.int64,
    "fp8_block": torch.float8_e4m3fn,
    "fp4": torch.int8,
}


# --- The published models, by arithmetic on their headers -----------------------------------------


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python's garbage collector would visit a million small objects again and again."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@cache
def headers(config: DeepseekV4Config) -> Checkpoint:
    """The headers of a checkpoint; no file holds the data."""
    tensors: dict[str, TensorInfo] = {}

    def add(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        last = next(reversed(tensors.values())) if tensors else None
        offset = 0 if last is None else last.offset + last.num_bytes
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = TensorInfo(name, dtype, shape, size, "one file", name, offset)

    for spec in weight_specs(config).values():
        *lead, columns = spec.shape
        packed = columns // 2 if spec.storage == "fp4" else columns
        add(spec.name, (*lead, packed), DTYPES[spec.storage])
        if spec.storage == "fp4":
            add(spec.scale_name, (*lead, columns // 32), torch.float8_e8m0fnu)
        if spec.storage == "fp8_block":
            shape = tuple(-(-n // 128) for n in spec.shape)
            add(spec.scale_name, shape, torch.float8_e8m0fnu)
    return Checkpoint(Path("nowhere"), {}, tensors)


SIZES = (1, 2, pytest.param(4, marks=pytest.mark.long), 8)
BYTES_CASES = [
    pytest.param(size, model, marks=[pytest.mark.long] if model == "pro" and size <= 2 else [])
    for size in (1, 2, 4, 8)
    for model in MODELS
]


@pytest.mark.parametrize(("size", "model"), BYTES_CASES)
@pytest.mark.usefixtures("no_collection")
def test_each_byte_is_read_by_exactly_the_ranks_that_need_it(model: str, size: int) -> None:
    """Of every weight and every scale: arithmetic on what the files' headers say.

    With 4 and 8 ranks, a layer has 8 of its experts, which are all alike; that saves a minute.
    """
    config = MODELS[model] if size <= 2 else replace(MODELS[model], n_routed_experts=8)
    checkpoint = headers(config)
    whole = checkpoint.tensors
    read: dict[str, list[TensorInfo]] = defaultdict(list)
    for index in range(size):
        source = WeightSource(checkpoint, weight_specs(config, Rank(index, size)))
        for info in (info for name in source.storages for info in source._parts(name)):
            read[info.name].append(info)
    assert read.keys() == whole.keys()
    for name, parts in read.items():
        one, axis = whole[name], wanted_axis(name.replace(".scale", ".weight"))
        assert len(parts) == size
        if axis is None or size == 1:
            assert all(part == one for part in parts), name
            continue
        assert one.shape[axis] % size == 0
        row = one.num_bytes // one.shape[0]
        for index, part in enumerate(parts):
            rows, width = one.shape[0], row
            if axis == 0:
                rows //= size
                begin = index * rows * row
            else:
                width //= size
                begin = index * width
            assert part.num_bytes == rows * width == math.prod(part.shape) * part.dtype.itemsize
            assert part.offset == one.offset + begin, name
            assert part.row_bytes == width and part.pitch == (row if axis else None), name


# --- Small files ----------------------------------------------------------------------------------

QUANTISED = replace(
    MODELS["flash"].with_layers(4),
    vocab_size=328,
    hidden_size=96,
    num_attention_heads=16,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_lora_rank=128,
    index_n_heads=32,
    n_routed_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=1024,
    num_hash_layers=1,
)
PLAIN = replace(QUANTISED, quantised=False, moe_intermediate_size=48, o_lora_rank=24, head_dim=40)
CONFIGS = {"quantised": QUANTISED, "plain": PLAIN}


class StagedSource(WeightSource):
    """Reads as for a GPU: through Staging, and directly into destinations."""

    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        return self._staged(destinations, ranks)


@pytest.fixture(scope="module", params=CONFIGS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the official layout with random weights; the plain one is float32."""
    config = CONFIGS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    specs = weight_specs(config)
    dummy = DummySource(specs, "cpu", seed=3)
    if config.quantised:
        write_stored(path, config_json(config), dummy, max_shard_bytes=1_000_000)
    else:
        values = ((spec.name, stored.dequantise(torch.float32)) for spec, stored in dummy)
        write_checkpoint(path, config_json(config), values, specs, plain_dtype=torch.float32)
    return path


@pytest.fixture(params=["mapped", "small pieces", "large pieces"])
def sources(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[WeightSource]:
    """The two ways to read. Small pieces: most tensors need several, and so do most columns."""
    if request.param == "mapped":
        return WeightSource
    if request.param == "small pieces":
        monkeypatch.setattr("finwhale.weights.staging.GAPPED_BYTES", 5000)
        monkeypatch.setattr(
            "finwhale.weights.source.Staging",
            partial(Staging, piece_bytes=1 << 13),
        )
    return StagedSource


# test_slices_of_all_ranks_are_the_whole reads in each way.
FEWER_SOURCES = pytest.mark.parametrize(
    "sources",
    ["mapped", "small pieces", pytest.param("large pieces", marks=pytest.mark.long)],
    indirect=True,
)


def opened(
    path: Path, rank: Rank, sources: type[WeightSource] = WeightSource
) -> tuple[DeepseekV4Config, WeightSource]:
    checkpoint = Checkpoint.open(path)
    config = config_of(checkpoint.config)
    return config, sources(checkpoint, weight_specs(config, rank))


@pytest.mark.parametrize("size", SIZES)
def test_slices_of_all_ranks_are_the_whole(
    files: Path, sources: type[WeightSource], size: int
) -> None:
    whole = {spec.name: stored for spec, stored in opened(files, ALONE)[1]}
    read: dict[str, list[StoredWeight]] = defaultdict(list)
    for index in range(size):
        for spec, stored in opened(files, Rank(index, size), sources)[1]:
            assert stored.dequantise(torch.float32).shape == spec.local_shape
            read[spec.name].append(stored)
    assert read.keys() == whole.keys()
    for name, parts in read.items():
        assert len(parts) == size
        axis = wanted_axis(name)
        check_joined([part.data for part in parts], whole[name].data, axis)
        scale = whole[name].scale
        if scale is not None:
            check_joined([part.scale for part in parts if part.scale is not None], scale, axis)


def check_joined(parts: list[Tensor], whole: Tensor, axis: int | None) -> None:
    size = whole.element_size()
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    raw = [part.view(ints) for part in parts]
    if axis is None:
        assert all(torch.equal(part, whole.view(ints)) for part in raw)
    else:
        assert torch.equal(torch.cat(raw, axis), whole.view(ints))


def test_dummy_slices_are_those_of_the_whole_dummy_weights() -> None:
    whole = {spec.name: stored for spec, stored in DummySource(weight_specs(QUANTISED), "cpu")}
    for index in range(2):
        source = DummySource(weight_specs(QUANTISED, Rank(index, 2)), "cpu")
        for spec, stored in source:
            axis, other = wanted_axis(spec.name), whole[spec.name]
            for one, all_ in ((stored.data, other.data), (stored.scale, other.scale)):
                if one is not None and all_ is not None:
                    wanted = all_ if axis is None else all_.chunk(2, axis)[index]
                    assert torch.equal(one.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("size", (2, 8))
def test_a_rank_reads_its_own_bytes_once(
    files: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Of columns, the gaps between their rows too."""
    read_at = os.preadv
    for index in range(size):
        source = opened(files, Rank(index, size), StagedSource)[1]
        reads: dict[str, Any] = {f.name: np.zeros(f.stat().st_size) for f in files.iterdir()}
        wanted = {name: np.zeros_like(counts) for name, counts in reads.items()}

        def preadv(
            number: int, views: list[memoryview], offset: int, reads: dict[str, Any] = reads
        ) -> int:
            name = Path(os.readlink(f"/proc/self/fd/{number}")).name
            reads[name][offset : offset + len(views[0])] += 1
            return read_at(number, views, offset)

        monkeypatch.setattr("finwhale.weights.staging.os.preadv", preadv)
        for _ in source:
            pass
        for name, whole in Checkpoint.open(files).tensors.items():
            rows = whole.shape[0]
            bytes_ = wanted[whole.file][whole.offset :][: whole.num_bytes].reshape(rows, -1)
            axis = wanted_axis(name.replace(".scale", ".weight"))
            if axis is None:
                bytes_ += 1
            elif axis == 0:
                bytes_[index * rows // size : (index + 1) * rows // size] += 1
            else:
                begin, width = bytes_.shape[1] * index // size, bytes_.shape[1] // size
                flat = bytes_.reshape(-1)
                flat[begin : begin + (rows - 1) * bytes_.shape[1] + width] += 1
        for name, counts in reads.items():
            assert np.array_equal(counts, wanted[name]), name


# --- Weights in place -----------------------------------------------------------------------------


def loaded(
    config: DeepseekV4Config,
    stream: WeightStream,
    rank: Rank,
    packed: bool,
    ranks: JointRanks | None = None,
) -> ModelWeights:
    form = WeightForm(
        storages=stream.storages,
        dtype=torch.bfloat16 if packed else torch.float32,
        round_activations=config.quantised,
        ops=packed_ops() if packed else load_ops(Platform.cpu(), reference=True),
        rank=rank,
    )
    return assembler(config, form, torch.device("cpu")).fill(stream, ranks)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of each tensor in a structure of data classes and tuples."""
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from tensors(item, f"{path}.{i}")


def joined(path: str, parts: list[Tensor], config: DeepseekV4Config) -> Tensor:
    """The tensor of one rank, from those of several."""
    if path.endswith(("wq_b.weight", "wq_b.scale")):
        # The rank's heads, then the whole indexer's, if the layer has one.
        index_rows = config.index_n_heads * config.index_head_dim
        head_rows = config.num_attention_heads * config.head_dim // len(parts)
        if path.endswith("scale"):
            index_rows, head_rows = index_rows // 128, head_rows // 128
        heads = [part[:head_rows] for part in parts]
        rest = [part[head_rows:] for part in parts]
        assert len(rest[0]) in (0, index_rows)
        assert all(torch.equal(one, rest[0]) for one in rest)
        return torch.cat([*heads, rest[0]])
    if "experts" in path and path.endswith(("w13", "scale13")):
        axis = parts[0].dim() - 2
        w1, w3 = zip(*(part.chunk(2, axis) for part in parts), strict=True)
        return torch.cat([*w1, *w3], axis)
    if "experts" in path and path.endswith(("w2", "scale2")):
        return torch.cat(parts, -1)
    if path.endswith((".wo_b.weight", ".wo_b.scale")):
        return torch.cat(parts, 1)
    if path.endswith((".wo_a.weight", ".wo_a.scale", ".attn_sink")) or path.startswith(".head"):
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), path
    return parts[0]


@FEWER_SOURCES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("packed", (False, True))
def test_weights_of_all_ranks_are_the_whole_models(
    files: Path, sources: type[WeightSource], packed: bool, size: int
) -> None:
    config, stream = opened(files, ALONE)
    whole = dict(tensors(loaded(config, stream, ALONE, packed)))
    ranks = [Rank(index, size) for index in range(size)]
    parts = [
        dict(tensors(loaded(config, opened(files, rank, sources)[1], rank, packed)))
        for rank in ranks
    ]
    for path, tensor in whole.items():
        got = joined(path, [part[path].float() for part in parts], config)
        assert torch.equal(got, tensor.float()), path
    assert all(part.keys() == whole.keys() for part in parts)


@FEWER_SOURCES
@pytest.mark.parametrize("size", (pytest.param(2, marks=pytest.mark.long), 8))
@pytest.mark.parametrize("packed", (False, True))
def test_whole_attention_adds_the_weights_of_all_heads(
    files: Path, sources: type[WeightSource], packed: bool, size: int
) -> None:
    """All other weights are those of a rank that has only its own heads."""
    config, stream = opened(files, ALONE)
    one = loaded(config, stream, ALONE, packed)
    for rank in (Rank(index, size) for index in (0, size - 1)):
        both = replace(rank, whole_attention=True)
        part = dict(tensors(loaded(config, opened(files, rank, sources)[1], rank, packed)))
        got = loaded(config, opened(files, both, sources)[1], both, packed)
        own = {path: tensor for path, tensor in tensors(got) if ".all_heads." not in path}
        assert own.keys() == part.keys()
        for path, tensor in own.items():
            assert torch.equal(tensor.float(), part[path].float()), path
        assert got.mtp is not None and one.mtp is not None
        layers = zip((*got.layers, got.mtp.layer), (*one.layers, one.mtp.layer), strict=True)
        for mine, wanted in layers:
            heads = dict(tensors(wanted.attn.heads))
            found = dict(tensors(mine.attn.all_heads))
            assert found.keys() == heads.keys() and len(found) >= 4
            for path, tensor in found.items():
                assert torch.equal(tensor.float(), heads[path].float()), path


def drop_or_repeat(
    stream: WeightSource, name: str, times: int
) -> Callable[..., Iterator[tuple[WeightSpec, StoredWeight | None]]]:
    def into(
        destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        for spec, stored in WeightSource.into(stream, destinations, ranks):
            for _ in range(times if spec.name == name else 1):
                yield spec, stored

    return into


@pytest.mark.parametrize("index", (0, 3))
def test_every_rank_names_a_missing_tensor(tmp_path: Path, index: int) -> None:
    """Also one that another rank reads, or all of which it needs is there."""
    name = "layers.2.ffn.experts.1.w2.scale"
    specs = weight_specs(QUANTISED)
    write_stored(tmp_path, config_json(QUANTISED), DummySource(specs, "cpu"))
    checkpoint = Checkpoint.open(tmp_path)
    kept = {other: info for other, info in checkpoint.tensors.items() if other != name}
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors .*: {name};"):
        WeightSource(replace(checkpoint, tensors=kept), weight_specs(QUANTISED, Rank(index, 4)))


@pytest.mark.parametrize("files", ["quantised"], indirect=True)
@pytest.mark.parametrize(("times", "message"), [(0, "1 tensors are missing"), (2, "occurs twice")])
@pytest.mark.parametrize("index", (0, 1))
def test_every_rank_uses_a_tensor_exactly_once(
    files: Path, monkeypatch: pytest.MonkeyPatch, index: int, times: int, message: str
) -> None:
    name, rank = "layers.1.attn.wo_b.weight", Rank(index, 2)
    config, stream = opened(files, rank)
    monkeypatch.setattr(stream, "into", drop_or_repeat(stream, name, times))
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(config, stream, rank, packed=False)
    assert name in str(caught.value)


@pytest.mark.parametrize("files", ["quantised"], indirect=True)
def test_a_nan_in_a_slice_is_named_by_the_rank_that_reads_it(tmp_path: Path, files: Path) -> None:
    name = "layers.1.ffn.shared_experts.w2.weight"
    specs = weight_specs(QUANTISED)
    write_stored(tmp_path, config_json(QUANTISED), DummySource(specs, "cpu"))
    info = Checkpoint.open(tmp_path).tensors[name]
    with (tmp_path / info.file).open("r+b") as file:
        file.seek(info.offset + info.num_bytes - 1)
        file.write(b"\x7f")
    for sources in (WeightSource, StagedSource):
        for index in (0, 1):
            stream = opened(tmp_path, Rank(index, 2), sources)[1]
            if index == 0:
                assert len(list(stream)) == len(specs)
                continue
            with pytest.raises(CheckpointError, match=f"{name} in .* holds an E4M3 NaN code"):
                list(stream)
