"""Checkpoint directories: reading, writing, sharding, names, and every fault by its message."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.official_config import config_json
from tests.support.tensors import read_tensor
from tests.support.tiny import tiny_config
from tests.support.writer import write_checkpoint
from torch import Tensor

from finwhale.checkpoint.formats import dequantise_fp4, dequantise_fp8_block
from finwhale.checkpoint.names import official_name
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import WeightSpec
from finwhale.checkpoint.writer import write_stored, write_zeros
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.weights.dummy import DummySource

SPECS = {
    spec.name: spec
    for spec in (
        WeightSpec("norm.weight", (64,), "bf16"),
        WeightSpec("layers.0.attn.attn_sink", (4,), "f32"),
        WeightSpec("layers.0.attn.wq_a.weight", (130, 64), "fp8_block"),
        WeightSpec("layers.0.ffn.gate.tid2eid", (10, 2), "i64"),
        WeightSpec("layers.0.ffn.experts.0.w1.weight", (32, 64), "fp4"),
    )
}
CONFIG = {"model_type": "deepseek_v4"}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        spec.name: torch.randint(0, 9, spec.shape, generator=generator)
        if spec.storage == "i64"
        else torch.randn(spec.shape, generator=generator)
        for spec in SPECS.values()
    }


def write(path: Path, max_shard_bytes: int = 1 << 30) -> dict[str, Tensor]:
    values = tensors()
    write_checkpoint(path, CONFIG, values.items(), SPECS, max_shard_bytes=max_shard_bytes)
    return values


def plain(path: Path, **files: dict[str, Tensor]) -> None:
    """A directory with these safetensors files and an index over them."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    weight_map = {}
    for stem, content in files.items():
        save_file(content, path / f"{stem}.safetensors")
        weight_map.update(dict.fromkeys(content, f"{stem}.safetensors"))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# --- Round trips ---


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 4000, 1])
def test_written_checkpoint_reads_back(tmp_path: Path, max_shard_bytes: int) -> None:
    values = write(tmp_path, max_shard_bytes)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == CONFIG
    assert read_tensor(checkpoint, "layers.0.ffn.gate.tid2eid").equal(
        values["layers.0.ffn.gate.tid2eid"]
    )
    assert read_tensor(checkpoint, "norm.weight").equal(values["norm.weight"].bfloat16())
    assert read_tensor(checkpoint, "layers.0.attn.attn_sink").equal(
        values["layers.0.attn.attn_sink"]
    )

    weight = values["layers.0.attn.wq_a.weight"]
    data, scale = (
        read_tensor(checkpoint, f"layers.0.attn.wq_a.{part}") for part in ("weight", "scale")
    )
    assert data.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    factor = scale.float()[:, 0].repeat_interleave(128)[:130, None]
    codes = (weight / factor).to(torch.float8_e4m3fn)
    assert codes.view(torch.uint8).equal(data.view(torch.uint8))
    assert dequantise_fp8_block(data, scale, torch.float32).equal(codes.float() * factor)

    packed = read_tensor(checkpoint, "layers.0.ffn.experts.0.w1.weight")
    scale = read_tensor(checkpoint, "layers.0.ffn.experts.0.w1.scale")
    assert packed.dtype == torch.int8 and packed.shape == (32, 32) and scale.shape == (32, 2)
    error = (
        dequantise_fp4(packed, scale, torch.float32) - values["layers.0.ffn.experts.0.w1.weight"]
    )
    assert error.abs().max() <= scale.float().max()


def test_one_file_or_an_index(tmp_path: Path) -> None:
    write(tmp_path / "one")
    assert sorted(f.name for f in (tmp_path / "one").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    write(tmp_path / "many", max_shard_bytes=4000)
    files = sorted(f.name for f in (tmp_path / "many").iterdir())
    count = len(files) - 2
    assert count > 1
    shards = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert files == ["config.json", *shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "many" / files[-1]).read_text())
    checkpoint = Checkpoint.open(tmp_path / "many")
    assert index["metadata"]["total_size"] == checkpoint.total_bytes
    for file in shards:
        stored = load_file(tmp_path / "many" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == set(stored)
    assert [file for file, _ in checkpoint.shards()] == shards
    assert sorted(n for _, names in checkpoint.shards() for n in names) == sorted(
        checkpoint.tensors
    )


def test_plain_and_float32_scale_options(tmp_path: Path) -> None:
    values = tensors()
    write_checkpoint(tmp_path / "f32", {}, values.items(), SPECS, plain_dtype=torch.float32)
    checkpoint = Checkpoint.open(tmp_path / "f32")
    assert set(checkpoint.tensors) == set(values)
    assert all(read_tensor(checkpoint, name).equal(value) for name, value in values.items())
    specs = {n: s for n, s in SPECS.items() if s.storage == "fp8_block"}
    one = {n: values[n] for n in specs}
    write_checkpoint(tmp_path / "base", {}, one.items(), specs, scale_dtype=torch.float32)
    scale = read_tensor(Checkpoint.open(tmp_path / "base"), "layers.0.attn.wq_a.scale")
    assert scale.dtype == torch.float32
    assert scale[0, 0] == values["layers.0.attn.wq_a.weight"][:128].abs().max() / 448


def test_reading_never_changes_the_file(tmp_path: Path) -> None:
    values = write(tmp_path)
    read_tensor(Checkpoint.open(tmp_path), "layers.0.attn.attn_sink").zero_()
    again = read_tensor(Checkpoint.open(tmp_path), "layers.0.attn.attn_sink")
    assert again.equal(values["layers.0.attn.attn_sink"])


def test_slices_of_one_tensor_are_written_apart(tmp_path: Path) -> None:
    specs = {n: WeightSpec(n, (2,), "f32") for n in ("a", "b")}
    both = torch.arange(4.0)
    write_checkpoint(tmp_path, {}, [("a", both[:2]), ("b", both[2:])], specs)
    assert read_tensor(Checkpoint.open(tmp_path), "b").tolist() == [2.0, 3.0]


# --- Names ---


@pytest.mark.parametrize("name", [*SPECS, "mtp.0.hc_head_fn", "layers.3.attn.kv_norm.weight"])
def test_official_names_stay(name: str) -> None:
    assert official_name(name) == name
    assert official_name(f"model.{name}") == name


def test_scale_inv_is_scale(tmp_path: Path) -> None:
    plain(tmp_path, a={"model.layers.0.self_attn.q_a_proj.weight_scale_inv": torch.ones(1, 1)})
    assert list(Checkpoint.open(tmp_path).tensors) == ["layers.0.attn.wq_a.scale"]


def test_stacked_experts_appear_one_by_one(tmp_path: Path) -> None:
    gate_up, down = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    stacked = {"layers.0.mlp.experts.gate_up_proj": gate_up}
    plain(tmp_path, a=stacked, b={"layers.0.mlp.experts.down_proj": down})
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.tensors) == 9
    assert checkpoint.total_bytes == gate_up.nbytes + down.nbytes
    for e in range(3):
        assert read_tensor(checkpoint, f"layers.0.ffn.experts.{e}.w1.weight").equal(gate_up[e, :4])
        assert read_tensor(checkpoint, f"layers.0.ffn.experts.{e}.w3.weight").equal(gate_up[e, 4:])
        assert read_tensor(checkpoint, f"layers.0.ffn.experts.{e}.w2.weight").equal(down[e])


# --- Faults of a directory ---


def fails(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_missing_path_and_files(tmp_path: Path) -> None:
    fails(tmp_path / "none", "no checkpoint at", "no such directory")
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file", "it is a file, not a directory")
    fails(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text("{,}")
    fails(tmp_path, "config.json is not JSON")
    (tmp_path / "config.json").write_text("[1]")
    fails(tmp_path, "must hold a JSON object, found list")
    (tmp_path / "config.json").write_text("{}")
    fails(tmp_path, "neither model.safetensors nor model.safetensors.index.json")


def test_truncated_data(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    size = f"{len(content) - 1} bytes, its header promises {len(content)}"
    fails(tmp_path, "model.safetensors is truncated", size, "download it again")
    file.write_bytes(content + b"x")
    fails(tmp_path, "too long")
    file.write_bytes(content[:100])
    fails(tmp_path, "truncated: 100 bytes, its header alone takes")
    file.write_bytes(b"1234")
    fails(tmp_path, "not a safetensors file (4 bytes)")
    file.write_bytes(b"<html>not found</html>")
    fails(tmp_path, "not a safetensors file")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    fails(tmp_path, "Git LFS pointer", "git lfs pull")
    raw_file(file, {"a": {"dtype": "F32"}})
    fails(tmp_path, "damaged safetensors header")
    file.write_bytes(struct.pack("<Q", 4) + b'{"a"')
    fails(tmp_path, "damaged safetensors header")


def test_a_shard_that_goes_away_after_opening(tmp_path: Path) -> None:
    write(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cannot read norm.weight from model.safetensors"):
        read_tensor(checkpoint, "norm.weight")
    with pytest.raises(CheckpointError, match="has no tensor nope"):
        read_tensor(checkpoint, "nope")


def test_missing_shard(tmp_path: Path) -> None:
    plain(tmp_path, a={"x": torch.ones(1)}, b={"y": torch.ones(1)})
    (tmp_path / "b.safetensors").unlink()
    fails(tmp_path, "lacks 1 of 2 files", "b.safetensors", "download them again")


def test_index_that_does_not_fit(tmp_path: Path) -> None:
    plain(tmp_path, a={"x": torch.ones(1)}, b={"y": torch.ones(1)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "a.safetensors", "z": "b.safetensors"}}')
    fails(tmp_path, "says that z is in b.safetensors, which does not hold it")
    index.write_text("{}")
    fails(tmp_path, "has no weight_map")
    index.write_text('{"weight_map": {"x": "../a.safetensors"}}')
    fails(tmp_path, "x has the file name '../a.safetensors'")
    for name in ("../../a/a.safetensors", "../b/c/a.safetensors", "../..", "/a", "a/b", "../b/.."):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        fails(tmp_path, f"x has the file name {name!r}")
    index.write_text("nonsense")
    fails(tmp_path, "index.json is not JSON")


def test_tensor_in_two_places(tmp_path: Path) -> None:
    plain(tmp_path, a={"x": torch.ones(1)}, b={"x": torch.ones(1), "y": torch.ones(1)})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(tmp_path, "tensor x is in two files: a.safetensors and b.safetensors")
    plain(
        tmp_path / "names",
        a={"embed.weight": torch.ones(1)},
        b={"model.embed_tokens.weight": torch.ones(1)},
    )
    fails(
        tmp_path / "names",
        "embed.weight in a.safetensors and model.embed_tokens.weight in b.safetensors are both",
    )


def test_unsupported_dtype(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    entry = {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}
    raw_file(tmp_path / "model.safetensors", {"embed.weight": entry}, bytes(8))
    fails(
        tmp_path, "embed.weight in", "has the dtype F64, which is not supported; wanted one of BF16"
    )


# --- Faults of a writer's input ---


def test_writer_wants_every_weight_once(tmp_path: Path) -> None:
    values = tensors()
    name = "norm.weight"
    for number, (given, message) in enumerate(
        [
            ([*values.items(), ("other", torch.ones(1))], "cannot write other: the model has no"),
            ([*values.items(), (name, values[name])], "cannot write norm.weight twice"),
            (
                [(n, v) for n, v in values.items() if n != name],
                "1 tensors were not given: norm",
            ),
            ([(name, torch.ones(65))], r"norm.weight of shape \[65\], wanted \[64\]"),
            (
                [("layers.0.attn.wq_a.weight", torch.full((130, 64), torch.nan))],
                "cannot write layers.0.attn.wq_a.weight: .* not finite",
            ),
        ]
    ):
        with pytest.raises(CheckpointError, match=message):
            write_checkpoint(tmp_path / str(number), {}, given, SPECS)
        fails(tmp_path / str(number), "config.json")
    write(tmp_path / "full")
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        write(tmp_path / "full")


def test_zeros_have_the_form_of_other_weights(tmp_path: Path) -> None:
    """All files are sparse."""
    config = config_of(tiny_config(3, quantised=True))
    specs = weight_specs(config)
    write_stored(tmp_path / "random", config_json(config), DummySource(specs, "cpu"))
    write_zeros(tmp_path / "zeros", config_json(config), specs.values(), max_shard_bytes=200_000)
    random, zeros = Checkpoint.open(tmp_path / "random"), Checkpoint.open(tmp_path / "zeros")
    files = [tmp_path / "zeros" / file for file, _ in zeros.shards()]
    assert len(files) > 2 and zeros.config == random.config
    assert zeros.tensors.keys() == random.tensors.keys()
    write_zeros(tmp_path / "one file", config_json(config), specs.values())
    one = Checkpoint.open(tmp_path / "one file").tensors
    assert [(i.name, i.dtype, i.shape) for i in one.values()] == [
        (info.name, info.dtype, info.shape) for info in random.tensors.values()
    ]
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert len(tensors) == len(random.tensors)
    assert not any(tensor.view(torch.uint8).any() for tensor in tensors)
    write_zeros(tmp_path / "large", {}, [specs["embed.weight"]._replace(shape=(10**6, 4096))])
    status = (tmp_path / "large" / "model.safetensors").stat()
    assert status.st_size > 10**9 > 1000 * 512 * status.st_blocks


def test_two_checkpoints_share_a_file_of_the_directory_beside_them(tmp_path: Path) -> None:
    x, y, other = torch.ones(4), torch.zeros(2), torch.full((2,), 2.0)
    plain(tmp_path / "first", base={"x": x}, head={"y": y})
    plain(tmp_path / "second", head={"y": other})
    index = tmp_path / "second/model.safetensors.index.json"
    names = {"x": "../first/base.safetensors", "y": "head.safetensors"}
    index.write_text(json.dumps({"weight_map": names}))
    second = Checkpoint.open(tmp_path / "second")
    assert torch.equal(read_tensor(second, "x"), x) and torch.equal(read_tensor(second, "y"), other)
    (tmp_path / "first/base.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 files.*\.\./first/base"):
        Checkpoint.open(tmp_path / "second")
