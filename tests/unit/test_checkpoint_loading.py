"""Weight sources: the checked inventory, exactly-once iteration, transformers' files, dummies."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.official_config import config_json
from tests.support.writer import write_checkpoint
from torch import Tensor

from finwhale.checkpoint.formats import quantise_fp8_block
from finwhale.checkpoint.reader import Checkpoint
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import ignored_prefixes, weight_specs
from finwhale.models.rope_config import YarnScaling
from finwhale.weights.dummy import DummySource
from finwhale.weights.incoming import Incoming
from finwhale.weights.source import WeightSource, inventory_report

TINY = DeepseekV4Config(
    vocab_size=96,
    hidden_size=160,  # no multiple of 128: partial FP8 blocks
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=48,
    o_lora_rank=32,
    o_groups=2,
    sliding_window=8,
    compress_ratios=(0, 4, 128, 0),
    index_n_heads=32,
    index_head_dim=32,
    index_topk=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    routed_scaling_factor=1.5,
    num_hash_layers=1,
    swiglu_limit=0.3,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=YarnScaling(factor=16, original_max_position_embeddings=256),
    max_position_embeddings=4096,
    num_nextn_predict_layers=1,
    draft_head="mtp",
)
SPECS = weight_specs(TINY)


def values(config: DeepseekV4Config = TINY) -> dict[str, Tensor]:
    """Random values that the quantised formats hold exactly."""
    source = DummySource(weight_specs(config), "cpu", seed=5)
    return {spec.name: stored.dequantise(torch.float32) for spec, stored in source}


def write(path: Path, **options: Any) -> dict[str, Tensor]:
    weights = values()
    write_checkpoint(path, config_json(TINY), weights.items(), SPECS, **options)
    return weights


def loaded(source: WeightSource) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for spec, stored in source:
        assert spec.name not in out
        out[spec.name] = stored.dequantise(torch.float32, "cpu")
        assert out[spec.name].shape == spec.shape
    return out


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the only file of a checkpoint."""
    file = path / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(stored)
    save_file(stored, file)


# --- Reading ---


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 50_000])
def test_every_weight_comes_exactly_once_with_its_values(
    tmp_path: Path, max_shard_bytes: int
) -> None:
    weights = write(tmp_path, max_shard_bytes=max_shard_bytes)
    checkpoint = Checkpoint.open(tmp_path)
    assert config_of(checkpoint.config) == TINY
    seen: list[tuple[int, int]] = []
    source = WeightSource(checkpoint, SPECS, progress=lambda *done: seen.append(done))
    got = loaded(source)
    assert got.keys() == SPECS.keys()
    for name, value in weights.items():
        assert torch.equal(got[name], value), name
    assert source.total_bytes == checkpoint.total_bytes
    assert seen[-1] == (source.total_bytes, source.total_bytes) and len(seen) == len(SPECS)
    assert seen == sorted(seen)
    assert {n: s.storage for n, s in SPECS.items()} == dict(source.inventory.storages)
    assert loaded(source).keys() == got.keys()  # a source can be read again


def test_files_are_read_one_after_another(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=50_000)
    checkpoint = Checkpoint.open(tmp_path)
    files = [checkpoint.tensors[spec.name].file for spec, _ in WeightSource(checkpoint, SPECS)]
    assert len(set(files)) > 3 and files == sorted(files)


def test_scale_in_another_file(tmp_path: Path) -> None:
    write(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    scales = {n: t for n, t in stored.items() if n.endswith(".scale")}
    save_file(scales, tmp_path / "b.safetensors")
    save_file({n: t for n, t in stored.items() if n not in scales}, tmp_path / "a.safetensors")
    index = {n: "b.safetensors" if n in scales else "a.safetensors" for n in stored}
    text = str({"weight_map": index}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(text)
    got = loaded(WeightSource(Checkpoint.open(tmp_path), SPECS))
    assert all(torch.equal(got[name], value) for name, value in values().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_weights_for_quantised_specs(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    weights = write(tmp_path, plain_dtype=dtype)
    with caplog.at_level(logging.INFO):
        source = WeightSource(Checkpoint.open(tmp_path), SPECS)
    kind = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert Counter(source.storages.values()) == {kind: len(SPECS) - 1, "i64": 1}
    assert f"weights stored as {len(SPECS) - 1} {kind}, 1 i64" in caplog.text
    got = loaded(source)
    for name, value in weights.items():
        assert torch.equal(got[name], value.to(dtype).float()), name


def test_base_variant(tmp_path: Path) -> None:
    """FP8 experts with float32 scales, also where config.json does not say expert_dtype."""
    base = dataclasses.replace(TINY, expert_dtype="fp8", scale_format="float32")
    specs = weight_specs(base)
    weights = values(base)
    write_checkpoint(tmp_path, config_json(base), weights.items(), specs, scale_dtype=torch.float32)
    checkpoint = Checkpoint.open(tmp_path)
    assert config_of(checkpoint.config) == base
    name = "layers.1.ffn.experts.3.w2.weight"
    data, scale = quantise_fp8_block(weights[name], torch.float32)
    for wanted in (specs, SPECS):
        source = WeightSource(checkpoint, wanted)
        assert source.inventory.storages[name] == "fp8_block"
        stored = {spec.name: stored for spec, stored in source}[name]
        assert stored.scale is not None and torch.equal(stored.scale, scale)
        expected = data.float() * scale.repeat_interleave(128, 0)[: len(data), :1]
        assert torch.equal(stored.dequantise(torch.float32), expected)
        assert torch.equal(stored.dequantise(torch.bfloat16), expected.bfloat16())


# --- transformers' files ---


@pytest.fixture(scope="module")
def oracle() -> "transformers.DeepseekV4ForCausalLM":
    raw = config_json(dataclasses.replace(TINY, quantised=False))
    torch.manual_seed(7)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**raw))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.random_(0, TINY.n_routed_experts)
    return model


@pytest.mark.parametrize("original_names", [True, False])
@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_transformers_save_pretrained(
    oracle: "transformers.DeepseekV4ForCausalLM",
    tmp_path: Path,
    original_names: bool,
    max_shard_size: str,
) -> None:
    oracle.save_pretrained(
        tmp_path, save_original_format=original_names, max_shard_size=max_shard_size
    )
    checkpoint = Checkpoint.open(tmp_path)
    config = config_of(checkpoint.config)
    assert config == dataclasses.replace(TINY, quantised=False).without_draft_head()
    got = loaded(WeightSource(checkpoint, weight_specs(config)))
    state = oracle.state_dict()
    for i in range(3):
        layer, theirs = f"layers.{i}", f"model.layers.{i}"
        pairs = {
            "attn_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "hc_attn_fn": "attn_hc.fn",
            "hc_attn_base": "attn_hc.base",
            "hc_attn_scale": "attn_hc.scale",
            "hc_ffn_fn": "ffn_hc.fn",
            "hc_ffn_base": "ffn_hc.base",
            "hc_ffn_scale": "ffn_hc.scale",
            "attn.q_norm.weight": "self_attn.q_a_norm.weight",
            "attn.kv_norm.weight": "self_attn.kv_norm.weight",
            "attn.attn_sink": "self_attn.sinks",
            "attn.wq_a.weight": "self_attn.q_a_proj.weight",
            "attn.wq_b.weight": "self_attn.q_b_proj.weight",
            "attn.wkv.weight": "self_attn.kv_proj.weight",
            "attn.wo_a.weight": "self_attn.o_a_proj.weight",
            "attn.wo_b.weight": "self_attn.o_b_proj.weight",
            "ffn.gate.weight": "mlp.gate.weight",
            "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
            "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
            "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
        }
        if i == 0:
            pairs["ffn.gate.tid2eid"] = "mlp.gate.tid2eid"
        else:
            pairs["ffn.gate.bias"] = "mlp.gate.e_score_correction_bias"
            pairs |= compressor("attn.compressor", "self_attn.compressor")
        if i == 1:
            indexer = "self_attn.compressor.indexer"
            pairs |= compressor("attn.indexer.compressor", indexer)
            pairs["attn.indexer.wq_b.weight"] = f"{indexer}.q_b_proj.weight"
            pairs["attn.indexer.weights_proj.weight"] = f"{indexer}.scorer.weights_proj.weight"
        for ours, other in pairs.items():
            assert torch.equal(got.pop(f"{layer}.{ours}"), state[f"{theirs}.{other}"]), ours
        gate_up = state[f"{theirs}.mlp.experts.gate_up_proj"]
        down = state[f"{theirs}.mlp.experts.down_proj"]
        for e in range(4):
            assert torch.equal(got.pop(f"{layer}.ffn.experts.{e}.w1.weight"), gate_up[e, :64])
            assert torch.equal(got.pop(f"{layer}.ffn.experts.{e}.w3.weight"), gate_up[e, 64:])
            assert torch.equal(got.pop(f"{layer}.ffn.experts.{e}.w2.weight"), down[e])
    ends = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
        "hc_head_fn": "model.hc_head.hc_fn",
        "hc_head_base": "model.hc_head.hc_base",
        "hc_head_scale": "model.hc_head.hc_scale",
    }
    for ours, other in ends.items():
        assert torch.equal(got.pop(ours), state[other]), ours
    assert not got


def compressor(ours: str, theirs: str) -> dict[str, str]:
    return {
        f"{ours}.wkv.weight": f"{theirs}.kv_proj.weight",
        f"{ours}.wgate.weight": f"{theirs}.gate_proj.weight",
        f"{ours}.ape": f"{theirs}.position_bias",
        f"{ours}.norm.weight": f"{theirs}.kv_norm.weight",
    }


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    """A plain checkpoint under official names, MTP included, loads in transformers."""
    plain = dataclasses.replace(TINY, quantised=False)
    weights = values(plain)
    write_checkpoint(
        tmp_path,
        config_json(plain),
        weights.items(),
        weight_specs(plain),
        plain_dtype=torch.float32,
    )
    state = transformers.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    ).state_dict()
    assert torch.equal(state["lm_head.weight"], weights["head.weight"])
    assert torch.equal(
        state["model.layers.1.self_attn.compressor.indexer.q_b_proj.weight"],
        weights["layers.1.attn.indexer.wq_b.weight"],
    )
    gate_up = state["model.layers.2.mlp.experts.gate_up_proj"]
    assert torch.equal(gate_up[3, 64:], weights["layers.2.ffn.experts.3.w3.weight"])


# --- Faults ---


def fails(path: Path, specs: dict[str, Any], *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        WeightSource(Checkpoint.open(path), specs)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("scale_first", [True, False])
def test_tensors_of_an_update_may_come_through_one_buffer(scale_first: bool) -> None:
    incoming, found = Incoming(SPECS, {}, None), {}
    for spec, stored in DummySource(SPECS, "cpu", seed=5):
        parts = [(spec.name, stored.data)]
        if stored.scale is not None:
            parts.insert(1 - scale_first, (spec.scale_name, stored.scale))
        for name, tensor in parts:
            sent = tensor.clone()
            for one, whole in incoming.add(name, sent):
                found[one.name] = whole.dequantise(torch.float32).clone()
            sent.view(torch.uint8).zero_()
    incoming.check_complete(partial=False)
    assert all(torch.equal(found[name], wanted) for name, wanted in values().items())


@pytest.mark.parametrize("laid_out", [True, False])
def test_the_scales_of_an_update_have_one_value_a_block(laid_out: bool) -> None:
    storages = {spec.name: spec.storage for spec in SPECS.values()}
    incoming = Incoming(SPECS, {}, storages if laid_out else None)
    name = "layers.0.attn.wq_a"
    assert not list(incoming.add(f"{name}.scale", torch.ones(1, 1)))
    weight = torch.ones(SPECS[f"{name}.weight"].shape).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        list(incoming.add(f"{name}.weight", weight))


def test_missing_and_unexpected(tmp_path: Path) -> None:
    write(tmp_path)
    extra = {n: s for n, s in SPECS.items() if not n.startswith("layers.2.")}
    count = sum(n.startswith("layers.2.") for n in Checkpoint.open(tmp_path).tensors)
    fails(tmp_path, extra, f"holds {count} tensors that config.json does not imply: layers.2.")
    report = inventory_report(Checkpoint.open(tmp_path), extra)
    assert len(report.unexpected) == count and not report.missing and not report.complete
    edit(tmp_path, lambda stored: [stored.pop(n) for n in list(SPECS) if n.startswith("layers.1.")])
    count = sum(n.startswith("layers.1.") for n in SPECS)
    fails(tmp_path, SPECS, f"lacks {count} tensors", "layers.1.attn_norm.weight, ", ", ...")
    assert len(inventory_report(Checkpoint.open(tmp_path), SPECS).missing) == count


def test_faults_of_some_experts(tmp_path: Path) -> None:
    """Experts differ only in their names, and the inventory names those that have a fault."""
    write(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    experts, tensors = "layers.1.ffn.experts", dict(checkpoint.tensors)
    for name in (f"{experts}.1.w1.scale", f"{experts}.3.w1.scale"):
        tensors[name] = dataclasses.replace(tensors[name], dtype=torch.float32)
    for name in (f"{experts}.0.w2.weight", f"{experts}.2.w2.weight"):
        tensors[name] = dataclasses.replace(tensors[name], shape=(1, 1))
    del tensors[f"{experts}.1.w3.scale"]
    report = inventory_report(dataclasses.replace(checkpoint, tensors=tensors), SPECS)
    assert [mismatch.name for mismatch in report.mismatched] == [
        f"{experts}.0.w2.weight",
        f"{experts}.1.w1.scale",
        f"{experts}.2.w2.weight",
        f"{experts}.3.w1.scale",
    ]
    assert report.missing == (f"{experts}.1.w3.scale",) and not report.unexpected
    unfit = {f"{experts}.0.w2.weight", f"{experts}.2.w2.weight"}
    assert SPECS.keys() - report.storages.keys() == unfit


def test_missing_scale(tmp_path: Path) -> None:
    write(tmp_path)
    edit(tmp_path, lambda stored: stored.pop("layers.0.attn.wq_a.scale"))
    fails(tmp_path, SPECS, "lacks 1 tensors that config.json implies: layers.0.attn.wq_a.scale;")


def test_scale_without_use(tmp_path: Path) -> None:
    write(tmp_path)
    edit(tmp_path, lambda stored: stored.update({"norm.scale": torch.ones(1)}))
    fails(tmp_path, SPECS, "holds 1 tensors that config.json does not imply: norm.scale")


def test_config_of_another_size(tmp_path: Path) -> None:
    write(tmp_path)
    other = dataclasses.replace(TINY, hidden_size=192)
    fails(
        tmp_path,
        weight_specs(other),
        "config.json and the tensors in",
        f"of {len(SPECS)} weights",
        "embed.weight is BF16 [96, 160], wanted BF16, F16 or F32 [96, 192]; head.weight",
        "Check that config.json belongs to these files",
    )


def set_tensor(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda stored: stored.update({name: tensor})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "layers.0.ffn.gate.tid2eid",
            torch.zeros(96, 2),
            "layers.0.ffn.gate.tid2eid is F32 [96, 2], wanted I64 [96, 2]",
        ),
        (
            "layers.0.attn.wkv.weight",
            torch.zeros(64, 160, dtype=torch.int8),
            "is I8 [64, 160], wanted F8_E4M3, BF16, F16 or F32 [64, 160]",
        ),
        (
            "layers.0.attn.wkv.scale",
            torch.ones(2, 1),
            "layers.0.attn.wkv.scale is F32 [2, 1], wanted F8_E8M0 or F32 [1, 2]",
        ),
        (
            "layers.0.ffn.experts.0.w1.weight",
            torch.zeros(64, 160, dtype=torch.int8),
            "is I8 [64, 160], wanted I8 [64, 80] or F8_E4M3, BF16, F16 or F32 [64, 160]",
        ),
        (
            "layers.0.ffn.experts.0.w1.scale",
            torch.ones(64, 5),
            "layers.0.ffn.experts.0.w1.scale is F32 [64, 5], wanted F8_E8M0 [64, 5]",
        ),
        (
            "norm.weight",
            torch.ones(160).to(torch.float8_e4m3fn),
            "norm.weight is F8_E4M3 [160], wanted BF16, F16 or F32 [160]",
        ),
    ],
)
def test_wrong_dtype_or_shape(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    write(tmp_path)
    edit(tmp_path, set_tensor(name, tensor))
    fails(tmp_path, SPECS, "disagree on 1 of", message)


def test_quantised_tensors_under_an_unquantised_config(tmp_path: Path) -> None:
    write(tmp_path)
    plain = weight_specs(dataclasses.replace(TINY, quantised=False))
    fails(
        tmp_path, plain, "layers.0.attn.wq_a.weight is F8_E4M3 [48, 160], wanted BF16, F16 or F32"
    )


def test_nan_codes_name_the_tensor(tmp_path: Path) -> None:
    write(tmp_path)

    def damage(name: str, code: int) -> Callable[[dict[str, Tensor]], object]:
        return lambda stored: stored[name].view(torch.uint8)[0, :1].fill_(code)

    for name, code, fault in (
        ("layers.2.ffn.experts.3.w2.scale", 255, "the E8M0 scale code 255, which means NaN"),
        ("layers.1.attn.wo_b.weight", 0x7F, "an E4M3 NaN code"),
    ):
        edit(tmp_path, damage(name, code))
        weight = name.replace(".scale", ".weight")
        with pytest.raises(CheckpointError, match=f"{weight} in model.safetensors holds {fault}"):
            loaded(WeightSource(Checkpoint.open(tmp_path), SPECS))
        edit(tmp_path, damage(name, 100))


def test_draft_head_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path)
    config = TINY.without_draft_head()
    checkpoint = Checkpoint.open(tmp_path)
    source = WeightSource(checkpoint, weight_specs(config), ignored=ignored_prefixes(config))
    count = sum(n.startswith("mtp.") for n in checkpoint.tensors)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"ignoring {count} tensors mtp.*: the model runs without its draft head"
    ]
    assert len(source.inventory.ignored) == count
    assert loaded(source).keys() == {n for n in SPECS if not n.startswith("mtp.")}


def test_missing_draft_head_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path)
    edit(tmp_path, lambda stored: [stored.pop(n) for n in list(stored) if n.startswith("mtp.")])
    fails(tmp_path, SPECS, "mtp.0.", "num_nextn_predict_layers 0 in config.json")


# --- Dummies ---


def test_dummy_weights_have_the_stored_form_and_size() -> None:
    specs = weight_specs(dataclasses.replace(TINY, hidden_size=512, moe_intermediate_size=512))
    for spec, stored in DummySource(specs, "cpu"):
        assert stored.storage == spec.storage
        value = stored.dequantise(torch.float32)
        assert value.shape == spec.shape
        if spec.storage == "i64":
            assert int(value.min()) >= 0 and int(value.max()) < TINY.n_routed_experts
            assert bool((value.sort(1).values.diff(dim=1) > 0).all())  # distinct
        elif spec.name.endswith("norm.weight"):
            assert bool((value == 1).all())
        else:
            assert bool(value.isfinite().all())
            if spec.storage in ("fp8_block", "fp4"):
                variance = value.pow(2).mean().item() * spec.fan_in
                assert variance == pytest.approx(1, rel=0.06), spec.name
                assert abs(value.mean().item()) < 0.05 / spec.fan_in**0.5


def test_dummy_weights_depend_on_name_and_seed_only() -> None:
    def take(seed: int, part: str) -> dict[str, Tensor]:
        source = DummySource(SPECS, "cpu", seed=seed)
        chosen = [spec for spec in SPECS.values() if part in spec.name]
        return {spec.name: source.make(spec).data.view(torch.uint8) for spec in chosen}

    whole, part = take(1, ""), take(1, "experts.2.")
    assert len(part) == 12
    assert all(torch.equal(whole[name], data) for name, data in part.items())
    other = take(2, "experts.2.")
    assert not any(torch.equal(other[name], data) for name, data in part.items())
    w1 = [data for name, data in part.items() if "w1" in name]
    assert not torch.equal(w1[0], w1[1])
