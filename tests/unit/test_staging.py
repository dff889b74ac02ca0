"""Tensors read by several threads, in pieces: the same as mapped ones, and faults are told."""

import gc
import os
import threading
import weakref
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.tensors import read_tensor
from tests.support.tiny import tiny_config

from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.writer import write_stored
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.weights.destinations import Destinations
from finwhale.weights.dummy import DummySource
from finwhale.weights.source import WeightSource
from finwhale.weights.staging import ALIGN, Staging, groups_of

CPU = torch.device("cpu")
CONFIG = replace(
    config_of(tiny_config(1) | {"hidden_size": 64, "moe_intermediate_size": 32}),
    quantised=True,
    expert_dtype="fp4",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small official layout of several files, written from stored form."""
    specs = weight_specs(CONFIG)
    stored = [one for _, one in DummySource(specs, CPU)]
    total = sum(t.nbytes for one in stored for t in (one.data, one.scale) if t is not None)
    write_stored(tmp_path, {}, DummySource(specs, CPU), max_shard_bytes=total // 3)
    return tmp_path


def source(path: Path) -> WeightSource:
    return WeightSource(Checkpoint.open(path), weight_specs(CONFIG))


@pytest.fixture(params=[1 << 10, 1 << 14, 1 << 24])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones: most tensors take several. Large: hundreds of tensors share one."""
    monkeypatch.setattr(
        "finwhale.weights.source.Staging",
        partial(Staging, piece_bytes=request.param),
    )


@pytest.mark.usefixtures("pieces")
def test_staged_weights_are_the_mapped_ones(path: Path) -> None:
    assert len(list(path.glob("*.safetensors"))) > 2
    mapped = {spec.name: stored for spec, stored in source(path)._mapped(Destinations())}
    count = 0
    for spec, stored in source(path)._staged(Destinations()):
        assert stored is not None
        wanted = mapped.pop(spec.name)
        assert stored.storage == wanted.storage
        for one, other in ((stored.data, wanted.data), (stored.scale, wanted.scale)):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.dtype == other.dtype and one.shape == other.shape
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        count += 1
    assert count and not mapped


@pytest.mark.usefixtures("pieces")
def test_tensors_go_to_their_destinations(path: Path) -> None:
    """Those that have one; the others are given."""
    mapped = {spec.name: stored for spec, stored in source(path)._mapped(Destinations())}
    destinations = Destinations()
    for name, stored in mapped.items():
        if stored.scale is not None and stored.storage == "fp4":
            names = name, weight_specs(CONFIG)[name].scale_name
            sizes = stored.data.nbytes, stored.scale.nbytes
            destinations.divide(names, torch.full((sum(sizes),), 0x55, dtype=torch.uint8), sizes)
    assert destinations
    given = dict.fromkeys(mapped, 0)
    for spec, staged in source(path)._staged(destinations):
        assert (staged is None) == (spec.name in destinations)
        given[spec.name] += 1
    assert set(given.values()) == {1}
    for name, stored in mapped.items():
        if name in destinations:
            assert stored.scale is not None
            scale_name = weight_specs(CONFIG)[name].scale_name
            for part, wanted in ((name, stored.data), (scale_name, stored.scale)):
                assert torch.equal(destinations[part], wanted.view(torch.uint8).view(-1))


def test_adjacent_tensors_are_read_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what one call leaves, by the next."""
    calls = []
    read = os.preadv

    def preadv(number: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return read(number, [views[0][:4321]], offset)

    checkpoint = Checkpoint.open(path)
    infos = sorted(checkpoint.tensors.values(), key=lambda i: (i.file, i.offset))
    wanted = {i.name: read_tensor(checkpoint, i.name) for i in infos}
    monkeypatch.setattr("finwhale.weights.staging.os.preadv", preadv)
    for info, tensor in Staging(path, CPU).tensors(infos):
        assert tensor is not None
        assert torch.equal(tensor.view(torch.uint8), wanted[info.name].view(torch.uint8))
    assert len(calls) < len(infos)


def test_stacked_experts_are_parts_of_one_tensor(tmp_path: Path) -> None:
    stacked = torch.arange(3 * 4 * 5, dtype=torch.float32).view(3, 4, 5)
    save_file({"model.layers.0.mlp.experts.gate_up_proj": stacked}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    found = {
        i.name: t for i, t in Staging(tmp_path, CPU).tensors(list(checkpoint.tensors.values()))
    }
    assert len(found) == 6 and None not in found.values()
    assert torch.equal(found["layers.0.ffn.experts.2.w1.weight"], stacked[2, :2])
    assert torch.equal(found["layers.0.ffn.experts.1.w3.weight"], stacked[1, 2:])


def test_groups_hold_whole_tensors_or_pieces_of_one(path: Path) -> None:
    infos = list(Checkpoint.open(path).tensors.values())
    seen = []
    for group in groups_of(infos, 1 << 12):
        seen += list(group.offsets)
        for piece in group.pieces:
            size = piece[-1].group_offset + piece[-1].num_bytes - piece[0].group_offset
            assert size <= 1 << 12
        assert len(group.offsets) == 1 or len(group.pieces) == 1
        assert all(offset % ALIGN == 0 for offset in group.offsets.values())
    assert seen == [info.name for info in infos]


def damaged(path: Path, name: str, value: int) -> None:
    info = Checkpoint.open(path).tensors[name]
    with (path / info.file).open("r+b") as file:
        file.seek(info.offset + info.num_bytes - 1)
        file.write(bytes([value]))


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("layers.1.attn.wkv.weight", 0x7F, "an E4M3 NaN code"),
        ("layers.1.ffn.experts.1.w2.scale", 0xFF, "the E8M0 scale code 255"),
        ("layers.0.attn.attn_sink", 0x7F, None),
    ],
)
def test_nan_is_found_and_named(path: Path, name: str, value: int, fault: str | None) -> None:
    if fault is None:
        # The last two bytes of a float32: infinity.
        info = Checkpoint.open(path).tensors[name]
        with (path / info.file).open("r+b") as file:
            file.seek(info.offset + info.num_bytes - 2)
            file.write(b"\x80\x7f")
        fault = "a value that is not finite"
    else:
        damaged(path, name, value)
    staged = source(path)
    before = threading.active_count()
    with pytest.raises(CheckpointError, match=rf"{name} in .* holds {fault}"):
        for _ in staged._staged(Destinations()):
            pass
    assert threading.active_count() == before


@pytest.mark.parametrize("number", (0, 5, 7))
@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (torch.float8_e8m0fnu, b"\xff"),
        (torch.float8_e4m3fn, b"\xff"),
        (torch.bfloat16, b"\x80\xff"),
        (torch.float16, b"\x00\x7c"),
        (torch.float32, b"\x00\x00\xc0\x7f"),
    ],
    ids=str,
)
def test_nan_in_a_destination_is_found_and_named(
    tmp_path: Path, dtype: torch.dtype, code: bytes, number: int
) -> None:
    """Of several of a size, of which some adjoin in memory, and one of another; one is empty."""
    shapes = [*[(64,)] * 7, (96,), (0,)]
    tensors = {f"t{i}": torch.zeros(shape, dtype=dtype) for i, shape in enumerate(shapes)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    infos = list(Checkpoint.open(tmp_path).tensors.values())
    destinations = Destinations(
        {i.name: torch.empty(i.num_bytes, dtype=torch.uint8) for i in infos}
    )
    adjacent = torch.empty(4 * 64, dtype=dtype)
    destinations.divide([f"t{i}" for i in range(4)], adjacent, [64 * dtype.itemsize] * 4)
    staging = Staging(tmp_path, CPU, destinations=destinations)
    assert [tensor for _, tensor in staging.tensors(infos)] == [None] * 9
    info = next(i for i in infos if i.name == f"t{number}")
    with (tmp_path / info.file).open("r+b") as file:
        file.seek(info.offset + info.num_bytes - len(code))
        file.write(code)
    with pytest.raises(CheckpointError, match=f"t{number} in model.safetensors holds"):
        list(Staging(tmp_path, CPU, destinations=destinations).tensors(infos))


@pytest.mark.parametrize("cut", (False, True))
def test_a_damaged_file_keeps_no_destination(path: Path, cut: bool) -> None:
    """Weights that wait for it are free at once: there may be no room for a second try else."""
    infos = list(Checkpoint.open(path).tensors.values())
    if cut:
        os.truncate(path / infos[-1].file, infos[-1].offset)
    else:
        damaged(path, "layers.1.ffn.experts.1.w2.scale", 0xFF)
    destinations = Destinations(
        {i.name: torch.empty(i.num_bytes, dtype=torch.uint8) for i in infos}
    )
    first = weakref.ref(destinations.memories[0])
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(CheckpointError):
            list(Staging(path, CPU, destinations=destinations).tensors(infos))
        del destinations
        assert first() is None
    finally:
        gc.enable()


def test_a_file_that_was_cut_meanwhile(path: Path) -> None:
    """The tensor is named that is not whole, in the middle of those that are read at once."""
    infos = sorted(Checkpoint.open(path).tensors.values(), key=lambda i: (i.file, i.offset))
    cut = infos[len(infos) // 2]
    os.truncate(path / cut.file, cut.offset + 1)
    with pytest.raises(CheckpointError, match=rf"cannot read {cut.name} from .*: the file is too"):
        list(Staging(path, CPU).tensors(infos))


def test_stopping_early_leaves_no_thread(path: Path) -> None:
    before = threading.active_count()
    weights = source(path)._staged(Destinations())
    assert isinstance(weights, Generator)
    next(weights)
    weights.close()
    assert threading.active_count() == before


def test_a_destination_that_fits_no_value_leaves_no_thread(path: Path) -> None:
    """The sending thread ends with the iterator. It used to wait for ever."""
    before = threading.active_count()
    infos = list(Checkpoint.open(path).tensors.values())
    name = next(i.name for i in infos if i.dtype == torch.float32)
    odd = torch.empty(5, dtype=torch.uint8)[1:]
    with pytest.raises(RuntimeError, match="divisible"):
        list(Staging(path, CPU, 4096, Destinations({name: odd})).tensors(infos))
    assert threading.active_count() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_only_an_empty_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"x": torch.zeros(0, dtype=dtype)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    infos = list(Checkpoint.open(tmp_path).tensors.values())
    ((_, found),) = Staging(tmp_path, CPU).tensors(infos)
    assert found is not None and found.dtype == dtype and found.shape == (0,)
