"""The table of DeepSeek-V4.1's weights: the published checkpoint, ranks, and loading."""

import math
import resource
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.support.v41_config import tiny_config
from torch import Tensor

from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import WeightSpec
from finwhale.checkpoint.stored import StoredWeight, has_scale, scale_shape
from finwhale.checkpoint.writer import write_stored, write_zeros
from finwhale.distributed.rank import Rank
from finwhale.errors import CheckpointError, FinwhaleError
from finwhale.models.deepseek_v41.config_json import config_of
from finwhale.models.deepseek_v41.presets import PUBLISHED
from finwhale.models.deepseek_v41.weight_classes import ModelWeights
from finwhale.models.deepseek_v41.weights import assembler, ignored_prefixes, weight_specs
from finwhale.models.sharding import rank_config
from finwhale.ops import load_ops
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.dummy import DummySource
from finwhale.weights.source import WeightSource
from finwhale.weights.table import table_bytes

CPU = torch.device("cpu")
FLASH = PUBLISHED["v4.1-flash"]
VALUE_BYTES = {"bf16": 2.0, "f32": 4.0, "fp8_block_32": 1.0, "fp8_row_32": 1.0, "fp4": 0.5}
SCALED = ("fp8_block_32", "fp8_row_32", "fp4")


def stored_tensors(specs: list[WeightSpec]) -> int:
    """Number of tensors in a checkpoint: the weights and their scales."""
    return len(specs) + sum(spec.storage in SCALED for spec in specs)


def stored_bytes(spec: WeightSpec) -> float:
    """Bytes of a weight and its scales of one byte each, by the published headers."""
    values = math.prod(spec.shape)
    scales = 0.0
    if spec.storage in ("fp8_row_32", "fp4"):
        scales = values / 32
    elif spec.storage == "fp8_block_32":
        scales = math.prod(math.ceil(length / 32) for length in spec.shape)
    return values * VALUE_BYTES[spec.storage] + scales


def vision_shapes() -> list[tuple[int, ...]]:
    """The bfloat16 tensors of the vision encoder, its aligner and the images' delimiters."""
    width, inner, layers, patch, hidden = 1024, 2816, 32, 14, 5120
    block = [(width,)] * 2  # norms
    block += [(3 * width, width), (3 * width,), (width, width), (width,)]  # attention
    block += [(2 * inner, width), (width, inner)]  # MLP
    encoder = [(width, 3 * patch**2), (width,), *block * layers, (width,)]
    aligner = [(hidden, 9 * width), (hidden,), (hidden, hidden), (hidden,)]
    return [*encoder, *aligner, *[(hidden,)] * 3]


def test_the_table_is_the_published_checkpoint() -> None:
    """Its tensors and its bytes, exactly: 96,085 and 510,286,023,000 (the index's total_size)."""
    specs, vision = list(weight_specs(FLASH).values()), vision_shapes()
    assert stored_tensors(specs) + len(vision) == 95_819 + 266 == 96_085
    images = 2 * sum(map(math.prod, vision))
    assert sum(map(stored_bytes, specs)) + images == 510_286_023_000
    for spec in specs:
        assert has_scale(spec.storage) == (spec.storage in SCALED)
        if has_scale(spec.storage):
            scales = math.prod(scale_shape(spec.shape, spec.storage))
            assert math.prod(spec.shape) * VALUE_BYTES[spec.storage] + scales == stored_bytes(spec)


def test_the_tensors_of_each_layer() -> None:
    """Counts by layer of the published index: a layer that only reuses, one that selects, KV
    sources of both ratios, and the two with Engram.
    """
    of_layer: dict[str, list[WeightSpec]] = {}
    for name, spec in weight_specs(FLASH).items():
        of_layer.setdefault(".".join(name.split(".")[:2]), []).append(spec)
    counts = {i: stored_tensors(of_layer[f"layers.{i}"]) for i in range(40)}
    special = {1: 2340, 2: 2342, 8: 2342, 14: 2348, 20: 2341}
    selecting = dict.fromkeys((24, 28, 32, 36), 2337)
    assert counts == dict.fromkeys(range(40), 2334) | selecting | special
    # The stages have 128 experts: 256 fewer, each with three weights and their scales.
    stages = [stored_tensors(of_layer[f"mtp.{i}"]) for i in range(3)]
    assert stages == [2334 - 6 * 256 + more for more in (3, 0, 4)]


def test_shapes_and_formats() -> None:
    specs = weight_specs(FLASH)
    wanted = {
        "layers.0.attn.wq_a.weight": ((1280, 5120), "fp8_block_32"),
        "layers.0.attn.wo_a.weight": ((8192, 4096), "fp8_block_32"),
        "layers.2.attn.compressor.wkv.weight": ((512, 5120), "bf16"),
        "layers.2.attn.compressor.wgate.weight": ((512, 5120), "bf16"),
        "layers.20.attn.compressor.norm.weight": ((512,), "bf16"),
        "layers.20.attn.indexer.wk.weight": ((128, 512), "bf16"),
        "layers.20.attn.indexer.k_norm.weight": ((128,), "bf16"),
        "layers.24.attn.indexer.wq_b.weight": ((4096, 1280), "fp8_block_32"),
        "layers.24.attn.indexer.weights_proj.weight": ((32, 5120), "bf16"),
        "layers.0.ffn.gate.bias_vl": ((384,), "f32"),
        "layers.39.ffn.experts.383.w2.weight": ((5120, 2304), "fp4"),
        "layers.1.engram.embed.weight": ((384006168, 256), "fp8_row_32"),
        "layers.14.engram.embed.weight": ((384016682, 256), "fp8_row_32"),
        "layers.1.engram.wkv.weight": ((25600, 6144), "fp8_block_32"),
        "layers.1.engram.q_weight": ((4, 5120), "bf16"),
        "mtp.0.main_proj.weight": ((5120, 15360), "fp8_block_32"),
        "mtp.1.ffn.gate.bias_vl": ((128,), "f32"),
        "mtp.2.norm.weight": ((5120,), "bf16"),
        "mtp.2.markov_head.embed.weight": ((129280, 256), "bf16"),
        "mtp.2.confidence_head.proj.weight": ((1, 5376), "bf16"),
    }
    assert {name: (specs[name].shape, specs[name].storage) for name in wanted} == wanted
    absent = (
        "hc_head_fn",
        "mtp.0.norm.weight",
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.2.attn.compressor.ape",
        "layers.21.attn.indexer.wq_b.weight",
        "mtp.0.attn.compressor.wkv.weight",
        "mtp.2.ffn.experts.128.w1.weight",
    )
    assert not [name for name in absent if name in specs]
    assert [spec.name for spec in specs.values() if spec.lookup] == [
        "layers.1.engram.embed.weight",
        "layers.14.engram.embed.weight",
    ]
    parts = Counter(spec.part for spec in specs.values())
    assert parts["Engram tables"] == 2 and parts["draft head: routed experts"] == 3 * 3 * 128
    assert not any(n.startswith("mtp.") for n in weight_specs(FLASH.without_draft_head()))
    plain = weight_specs(replace(config_of(tiny_config()), quantised=False))
    assert {spec.storage for spec in plain.values()} == {"bf16", "f32"}


# The last part of the name of every divided weight, with its axis.
DIVIDED = {
    "head.weight": 0,
    "attn.wq_b.weight": 0,
    "attn.attn_sink": 0,
    "attn.wo_a.weight": 0,
    "attn.wo_b.weight": 1,
    "w1.weight": 0,
    "w3.weight": 0,
    "w2.weight": 1,
}


@pytest.mark.parametrize("size", (2, 4, 8))
def test_ranks_divide_heads_experts_and_vocabulary(size: int) -> None:
    cut = replace(FLASH.with_layers(15), n_routed_experts=8)
    part = rank_config(cut, Rank(0, size), round_activations=True)
    assert part.moe_intermediate_size == 2304 // size and part.moe_intermediate_size % 32 == 0
    last = weight_specs(cut, Rank(size - 1, size))
    shared = weight_specs(cut, Rank(size - 1, size, data_parallel=True))
    for name, spec in last.items():
        ends = (axis for end, axis in DIVIDED.items() if f".{name}".endswith(f".{end}"))
        axis = next(ends, None)
        if spec.lookup:
            assert shared[name].slice == spec.slice
            continue
        assert (spec.slice and spec.slice.axis) == axis, spec
        if spec.slice is not None:
            length = spec.shape[spec.slice.axis] // size
            assert (spec.slice.start, spec.slice.stop) == ((size - 1) * length, size * length)
            if spec.storage in SCALED:
                assert length % 32 == 0
        assert shared[name].slice == (spec.slice if "experts." in name else None)


@pytest.mark.parametrize("size", (2, 4, 8))
def test_each_row_of_a_table_is_read_by_one_rank(size: int) -> None:
    """The second table has a number of rows that 4 ranks cannot divide evenly."""
    cut = replace(FLASH.with_layers(15), n_routed_experts=8)
    for layer in (1, 14):
        name, end = f"layers.{layer}.engram.embed.weight", 0
        for index in range(size):
            spec = weight_specs(cut, Rank(index, size, data_parallel=size == 8))[name]
            assert spec.lookup and spec.slice and (spec.slice.axis, spec.slice.start) == (0, end)
            end = spec.slice.stop
        assert end == spec.shape[0]
    specs = weight_specs(cut, Rank(0, size))
    # 2 x 94.56 GiB, as V4.1's index of tensors says.
    whole = table_bytes(specs, {name: spec.storage for name, spec in specs.items()})
    assert whole == (384006168 + 384016682) * (256 + 8)


def test_ranks_that_cannot_divide_the_model() -> None:
    with pytest.raises(FinwhaleError, match="vocab_size 129280 is not a multiple of 3"):
        weight_specs(FLASH, Rank(0, 3))
    with pytest.raises(FinwhaleError, match="leave out whole_attention"):
        weight_specs(FLASH, Rank(0, 2, whole_attention=True))
    narrow = config_of(tiny_config())
    with pytest.raises(FinwhaleError, match="o_groups 2 is not a multiple of 4"):
        weight_specs(narrow, Rank(0, 4))
    message = "moe_intermediate_size is 64, and 16 values a rank are not a multiple of 32"
    with pytest.raises(FinwhaleError, match=message):
        weight_specs(narrow, Rank(0, 4, data_parallel=True))


# --- Loading --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights in stored form, and a tensor of a vision encoder."""
    path, raw = tmp_path_factory.mktemp("v41"), tiny_config()
    vision = WeightSpec("vision.norm.weight", (4,), "bf16")
    specs = {**weight_specs(config_of(raw)), vision.name: vision}
    write_stored(path, raw, DummySource(specs, CPU))
    return path


def load(path: Path, *, packed: bool, way: str = "mapped") -> ModelWeights:
    model, ops = config_of(tiny_config()), load_ops(Platform.cpu(), reference=True)
    ops = replace(ops, capabilities=replace(ops.capabilities, quantised_weights=packed))
    files, ignored = Checkpoint.open(path), ignored_prefixes(model)
    source = WeightSource(files, weight_specs(model), ignored=ignored)
    form = WeightForm(
        ops=ops, dtype=torch.float32, round_activations=True, storages=source.storages
    )
    loading = assembler(model, form, CPU)
    if way == "mapped":
        return loading.fill(source)
    read = chain(source._read_lookups(loading.destinations), source._staged(loading.destinations))
    for spec, stored in source if way == "copied" else read:
        assert (stored is None) == (spec.lookup and way == "staged") or not spec.lookup
        loading.add(spec, stored)
    return loading.finish()


def stored_weights() -> dict[str, StoredWeight]:
    specs = weight_specs(config_of(tiny_config()))
    return {spec.name: stored for spec, stored in DummySource(specs, CPU)}


def values_of(stored: StoredWeight) -> Tensor:
    """The values of FP8 codes with a scale for each 1x32, one by one."""
    assert stored.scale is not None
    codes, exponents = stored.data.float(), stored.scale.view(torch.uint8).double() - 127
    return (codes.double() * 2 ** exponents.repeat_interleave(32, 1)).float()


def test_weights_are_loaded_into_their_places(checkpoint: Path) -> None:
    weights, stored = load(checkpoint, packed=False), stored_weights()

    def values(name: str) -> Tensor:
        return stored[name].dequantise(torch.float32)

    first, second, sixth = weights.layers[0], weights.layers[1], weights.layers[5]
    assert first.engram and weights.dspark and second.engram is None
    table = first.engram.embed
    assert torch.equal(table.rows, stored["layers.0.engram.embed.weight"].data)
    assert torch.equal(first.engram.wkv.weight, values("layers.0.engram.wkv.weight"))
    assert first.engram.wkv.input_group == 32
    assert first.attn.index_proj is None and first.attn.compressor is None
    queries = [values(f"layers.1.attn.{part}wq_b.weight") for part in ("", "indexer.")]
    assert torch.equal(second.attn.heads.wq_b.weight, torch.cat(queries))
    parts = ("compressor.wkv", "compressor.wgate", "indexer.weights_proj")
    for layer, used in ((1, parts), (4, parts[::2]), (5, parts[2:])):
        proj = weights.layers[layer].attn.index_proj
        wanted = [values(f"layers.{layer}.attn.{part}.weight") for part in used]
        assert proj and torch.equal(proj.weight, torch.cat(wanted)) and proj.input_group == 0
    assert second.attn.compressor and sixth.attn.compressor is None
    assert torch.equal(second.attn.compressor.wk.weight, values("layers.1.attn.indexer.wk.weight"))
    assert torch.equal(sixth.ffn.bias_vl, values("layers.5.ffn.gate.bias_vl"))
    kv = [values(f"mtp.{i}.attn.wkv.weight") for i in range(3)]
    assert torch.equal(weights.dspark.context_kv.weight, torch.cat(kv))
    assert torch.equal(weights.dspark.markov_head.weight, values("mtp.2.markov_head.head.weight"))
    assert weights.dspark.layers[2].ffn.experts.w13.shape == (4, 128, 96)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", ["mapped", "staged", "copied"])
def test_tables_keep_their_codes_and_exponents(checkpoint: Path, way: str, packed: bool) -> None:
    """On every way from a file: beside mapped weights, beside a GPU's, and through the assembler,
    as in an update.
    """
    weights, stored = load(checkpoint, packed=packed, way=way), stored_weights()
    for layer in (0, 3):
        engram, table = weights.layers[layer].engram, stored[f"layers.{layer}.engram.embed.weight"]
        assert engram and engram.embed.scale is not None and table.scale is not None
        assert engram.embed.rows.dtype == table.data.dtype == torch.float8_e4m3fn
        for found, wanted in ((engram.embed.rows, table.data), (engram.embed.scale, table.scale)):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        assert (engram.wkv.scale is not None) == packed
    if not packed:
        return
    wkv = stored["layers.3.engram.wkv.weight"].scale
    assert wkv is not None and engram and engram.wkv.scale is not None
    assert torch.equal(engram.wkv.scale, wkv.float())


def test_a_checkpoint_of_zeros_has_the_same_tensors(tmp_path: Path) -> None:
    specs = weight_specs(config_of(tiny_config()))
    write_zeros(tmp_path, tiny_config(), specs.values())
    engram = load(tmp_path, packed=True).layers[3].engram
    assert engram and engram.embed.rows.shape == (101, 32) and not engram.embed.rows.float().any()


def test_scales_of_tables_must_be_e8m0(tmp_path: Path) -> None:
    raw = tiny_config()
    weights = dict(stored_weights())
    name = "layers.0.engram.embed.weight"
    table = weights[name]
    assert table.scale is not None
    weights[name] = replace(table, scale=table.scale.float())
    specs = weight_specs(config_of(raw))
    write_stored(tmp_path, raw, ((specs[n], stored) for n, stored in weights.items()))
    message = r"embed.scale is F32 \[97, 1\], wanted F8_E8M0 \[97, 1\]"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, packed=True)


def test_a_table_of_a_damaged_file_is_named(tmp_path: Path) -> None:
    specs, name = weight_specs(config_of(tiny_config())), "layers.3.engram.embed.weight"
    write_stored(tmp_path, tiny_config(), DummySource(specs, CPU))
    info = Checkpoint.open(tmp_path).tensors[name]
    with (tmp_path / info.file).open("r+b") as file:
        file.seek(info.offset + info.num_bytes - 1)
        file.write(b"\x7f")
    with pytest.raises(CheckpointError, match=f"{name} in .* holds an E4M3 NaN code"):
        load(tmp_path, packed=True)


def test_tables_of_random_weights_take_no_memory() -> None:
    """They read as zeros, and no page of them is written: the published ones fit here."""
    small = replace(FLASH.without_draft_head().with_layers(2), n_routed_experts=6)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 64, "o_lora_rank": 64}
    cut = replace(small, **sizes)  # type: ignore[arg-type]
    ops = load_ops(Platform.cpu(), reference=True)
    source = DummySource(weight_specs(cut), CPU)
    form = WeightForm(
        ops=ops, dtype=torch.float32, round_activations=True, storages=source.storages
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = assembler(cut, form, CPU).fill(source)
    engram = weights.layers[1].engram
    assert engram and engram.embed.rows.nbytes == 384006168 * 256
    assert not engram.embed.rows[::10_000_000].float().any()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20  # KiB: the table has 98 GB
