"""DeepseekV4Config: both forms of config.json, its checks, and the weight table it implies."""

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
import transformers
from tests.support.official_config import config_json

from finwhale.checkpoint.spec import Slice
from finwhale.distributed.rank import Rank
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.models.rope import RotaryTables
from finwhale.models.rope_config import YarnScaling

OFFICIAL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 1,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def config(**changes: Any) -> dict[str, Any]:
    """The official config with changes; None removes a key."""
    merged = {**OFFICIAL, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def quantisation(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": {**OFFICIAL["quantization_config"], **changes}}


def test_official_form() -> None:
    model = config_of(OFFICIAL)
    assert model.compress_ratios == (0, 4, 128, 4, 0)
    assert model.layer_ratios == (0, 4, 128, 4)
    assert model.rope_scaling == YarnScaling(factor=16, original_max_position_embeddings=256)
    assert model.draft_head == "mtp" and model.num_nextn_predict_layers == 1
    assert model.quantised and model.expert_dtype == "fp4" and model.scale_format == "ue8m0"
    assert model.eos_token_ids == (1,)
    assert [model.is_hash_layer(i) for i in range(4)] == [True, False, False, False]


def test_base_variant_and_other_values() -> None:
    model = config_of(
        config(
            expert_dtype="fp8",
            eos_token_id=[1, 3],
            rope_scaling=None,
            **quantisation(scale_fmt=None),
        )
    )
    assert (model.expert_dtype, model.scale_format) == ("fp8", "float32")
    assert model.eos_token_ids == (1, 3) and model.rope_scaling is None
    assert weight_specs(model)["layers.0.ffn.experts.7.w2.weight"].storage == "fp8_block"
    inside = config_of(config(**quantisation(expert_dtype="fp8")))
    assert inside.expert_dtype == "fp8"


def test_written_form_reads_back() -> None:
    for changes in ({}, {"expert_dtype": "fp8"}, {"eos_token_id": [1, 2]}, {"rope_scaling": None}):
        model = config_of(config(**changes))
        assert config_of(config_json(model)) == model
    plain = config_of(config(quantization_config=None))
    assert not plain.quantised and config_of(config_json(plain)) == plain
    base = dataclasses.replace(plain, quantised=True, scale_format="float32")
    assert config_of(config_json(base)) == base


def test_transformers_form(tmp_path: Any) -> None:
    """What transformers makes of the official config is read as the same model without MTP."""
    official = config(quantization_config=None)
    written = transformers.DeepseekV4Config(**official).to_dict()
    assert "compress_ratios" not in written and "num_hash_layers" not in written
    wanted = config_of(official).without_draft_head()
    assert config_of(written) == wanted
    del written["qk_rope_head_dim"]
    assert config_of(written) == wanted
    plain = transformers.DeepseekV4Config(
        **config(quantization_config=None, rope_scaling=None)
    ).to_dict()
    assert config_of(plain) == dataclasses.replace(wanted, rope_scaling=None)


def test_transformers_reads_what_is_written() -> None:
    model = config_of(config(quantization_config=None))
    theirs = transformers.DeepseekV4Config(**config_json(model))
    assert theirs.layer_types == [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ]
    assert theirs.mlp_layer_types == ["hash_moe", "moe", "moe", "moe"]
    assert theirs.qk_rope_head_dim == 16
    parameters: Any = theirs.rope_parameters
    assert parameters["compress"]["factor"] == 16


DSPARK = {
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 90,
    "dspark_markov_rank": 8,
    "dspark_target_layer_ids": [1, 2, 3],
}


@pytest.mark.parametrize("drafts", [None, 0, 1, 3])
def test_dspark(drafts: int | None) -> None:
    model = config_of(config(**DSPARK, num_nextn_predict_layers=drafts))
    assert model.draft_head == "dspark" and model.num_nextn_predict_layers == 0
    assert (model.num_draft_layers, model.max_draft_tokens, model.max_verify_tokens) == (3, 5, 6)
    assert model.draft_block_tokens == 5 and model.layer_ratios == (0, 4, 128, 4)
    assert config_of(config_json(model)) == model
    assert model.stage_experts == (model.num_experts_per_tok, model.n_routed_experts)
    assert model.of_stage() == model
    head = model.dspark
    assert head is not None and head.target_layer_ids == (1, 2, 3)
    assert head.enable_confidence_head and head.confidence_head_with_markov
    assert head.sample_from_anchor
    without = model.without_draft_head()
    assert without.dspark is None and without.compress_ratios == (0, 4, 128, 4)
    assert not any(name.startswith("mtp.") for name in weight_specs(without))
    # A cut model's head reads the last layers too.
    cut = model.with_layers(3).dspark
    assert cut is not None and cut.target_layer_ids == (0, 1, 2)
    with pytest.raises(CheckpointError, match="cannot cut to 2 layers: the DSpark head reads 3"):
        model.with_layers(2)


def test_optional_keys_of_dspark() -> None:
    changes = {
        "dspark_n_routed_experts": 3,
        "dspark_num_experts_per_tok": 1,
        "enable_confidence_head": False,
        "sample_from_anchor": False,
    }
    model = config_of(config(**DSPARK, **changes))
    assert config_of(config_json(model)) == model
    assert model.stage_experts == (1, 3) and model.draft_block_tokens == 6
    specs = weight_specs(model)
    assert "mtp.1.ffn.experts.2.w1.weight" in specs
    assert "mtp.1.ffn.experts.3.w1.weight" not in specs
    assert not any("confidence" in name for name in specs)
    narrow = config_of(config(**DSPARK, confidence_head_with_markov=False))
    width = narrow.hidden_size
    assert weight_specs(narrow)["mtp.2.confidence_head.proj.weight"].shape == (1, width)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dspark_block_size": None}, "DSpark draft head without dspark_block_size"),
        ({"dspark_target_layer_ids": None}, "without dspark_target_layer_ids"),
        ({"dspark_block_size": 0}, "dspark_block_size must be a positive integer, got 0"),
        ({"dspark_block_size": 8}, "dspark_block_size must be at most 7, got 8"),
        ({"dspark_markov_rank": 2.5}, "dspark_markov_rank must be a positive integer, got 2.5"),
        ({"dspark_noise_token_id": 10**6}, "dspark_noise_token_id must be a token id below"),
        ({"dspark_target_layer_ids": 3}, "dspark_target_layer_ids must be a list, got 3"),
        ({"dspark_target_layer_ids": []}, r"must be layers from 0 to 3, got \[\]"),
        ({"dspark_target_layer_ids": [2, 3, 4]}, r"must be layers from 0 to 3, got \[2, 3, 4\]"),
        ({"dspark_target_layer_ids": [3, 2]}, r"must be different and ascend, got \[3, 2\]"),
        ({"dspark_n_routed_experts": 1}, "are more than their 1 routed experts"),
        ({"sample_from_anchor": 1}, "sample_from_anchor must be true or false, got 1"),
        ({"compress_ratios": [0, 4, 128, 4, 0]}, "has 5 entries, wanted 7: .* 3 DSpark stages"),
        (
            {"compress_ratios": [0, 4, 128, 4, 0, 4, 0]},
            r"\(the last three\) must be 0, got 0, 4, 0",
        ),
    ],
)
def test_impossible_dspark_heads(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(config(**{**DSPARK, **changes}))


def test_published_dspark_heads() -> None:
    """Names and shapes of MODEL.md's inventory, and the shards of two ranks."""
    for name, D, rank in (("flash-0731", 4096, 256), ("pro-0813", 7168, 512)):
        model = published(name)
        plain = published(name.partition("-")[0]).without_draft_head()
        assert model.without_draft_head() == plain and model.dspark is not None
        assert model.dspark.target_layer_ids[-1] == model.num_hidden_layers - 1
        model, plain = model.with_layers(5), plain.with_layers(5)
        last = model.num_hidden_layers - 1
        assert model.dspark is not None
        assert model.dspark.target_layer_ids == (last - 2, last - 1, last)
        specs, V = weight_specs(model), model.vocab_size
        head = {n: s for n, s in specs.items() if n.startswith("mtp.")}
        assert specs.keys() - head.keys() == weight_specs(plain).keys()
        layer = {
            n.removeprefix(f"layers.{last}."): s.shape
            for n, s in specs.items()
            if n.startswith(f"layers.{last}.") and not re.search("compressor|indexer", n)
        }
        for i in range(3):
            assert (
                layer.items()
                <= {n.removeprefix(f"mtp.{i}."): s.shape for n, s in head.items()}.items()
            )
        own = {
            "mtp.0.main_proj.weight": (D, 3 * D),
            "mtp.0.main_norm.weight": (D,),
            "mtp.2.norm.weight": (D,),
            "mtp.2.hc_head_fn": (4, 4 * D),
            "mtp.2.hc_head_base": (4,),
            "mtp.2.hc_head_scale": (1,),
            "mtp.2.markov_head.markov_w1.weight": (V, rank),
            "mtp.2.markov_head.markov_w2.weight": (V, rank),
            "mtp.2.confidence_head.proj.weight": (1, D + rank),
        }
        assert {n: head[n].shape for n in own} == own and len(head) == 3 * len(layer) + len(own)
        # The rule for experts' w1 must not take the Markov head's w1 for one.
        half = weight_specs(model, Rank(1, 2))
        assert half["mtp.2.markov_head.markov_w1.weight"].slice is None
        assert half["mtp.0.main_proj.weight"].slice is None
        assert half["mtp.2.markov_head.markov_w2.weight"].slice == Slice(0, V // 2, V)
        stage, main = (
            half["mtp.1.ffn.experts.0.w1.weight"],
            half["layers.3.ffn.experts.0.w1.weight"],
        )
        assert stage.slice == main.slice is not None


def test_presets_are_the_published_checkpoints() -> None:
    """Numbers of tensors and bytes of the public checkpoints; scales count as tensors."""
    totals = {"flash": (69_187, 159.6e9), "pro": (145_116, 864.7e9)}
    sizes = {"bf16": 2.0, "f32": 4.0, "i64": 8.0, "fp8_block": 1.0, "fp4": 0.5}
    for name, (count, num_bytes) in totals.items():
        model = published(name)
        assert config_of(config_json(model)) == model
        specs = weight_specs(model)
        assert len(specs) + sum(s.storage in ("fp8_block", "fp4") for s in specs.values()) == count
        total = 0.0
        for spec in specs.values():
            total += math.prod(spec.shape) * sizes[spec.storage]
            if spec.storage == "fp8_block":
                total += math.ceil(spec.shape[0] / 128) * math.ceil(spec.shape[1] / 128)
            elif spec.storage == "fp4":
                total += math.prod(spec.shape) / 32
        assert total == pytest.approx(num_bytes, rel=3e-4)
    with pytest.raises(
        CheckpointError,
        match="unknown configuration 'small'; there are flash, flash-0731, pro, pro-0813",
    ):
        published("small")


def test_with_layers_keeps_the_mtp_layer() -> None:
    cut = published("flash").with_layers(8)
    assert cut.compress_ratios == (0, 0, 4, 128, 4, 128, 4, 128, 0)
    assert cut.num_nextn_predict_layers == 1 and "mtp.0.enorm.weight" in weight_specs(cut)
    assert cut.with_layers(2).num_hash_layers == 2
    with pytest.raises(CheckpointError, match="cannot cut to 44 layers: the model has 43"):
        published("flash").with_layers(44)


def test_weight_table_details() -> None:
    specs = weight_specs(published("flash"))
    shapes = {
        "layers.2.attn.wo_a.weight": (8192, 4096),
        "layers.2.attn.compressor.wkv.weight": (1024, 4096),
        "layers.2.attn.compressor.ape": (4, 1024),
        "layers.2.attn.indexer.compressor.wgate.weight": (256, 4096),
        "layers.3.attn.compressor.wkv.weight": (512, 4096),
        "layers.3.attn.compressor.ape": (128, 512),
        "layers.0.ffn.gate.tid2eid": (129280, 6),
        "layers.3.ffn.gate.bias": (256,),
        "mtp.0.ffn.gate.bias": (256,),
        "mtp.0.hc_head_fn": (4, 16384),
    }
    assert {name: specs[name].shape for name in shapes} == shapes
    assert "layers.3.attn.indexer.wq_b.weight" not in specs
    assert "layers.1.attn.compressor.ape" not in specs
    plain = dataclasses.replace(published("flash").with_layers(1), quantised=False)
    assert {s.storage for s in weight_specs(plain).values()} == {"bf16", "f32", "i64"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'.*serves.*'deepseek_v4'"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*DeepseekV4ForCausalLM"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"rope_theta": None}, "config.json has no rope_theta"),
        ({"compress_ratios": None}, "has no compress_ratios"),
        ({"num_hash_layers": None}, "has no num_hash_layers"),
        ({"hidden_size": "128"}, "hidden_size must be a positive integer, got '128'"),
        ({"index_topk": 0}, "index_topk must be a positive integer, got 0"),
        ({"swiglu_limit": -1.0}, r"swiglu_limit must be a positive number, got -1\.0"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu' is"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported, only 1 is"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"hc_mult": 2}, "hc_mult 2 is not supported, only 4 is"),
        ({"compress_ratios": [0, 4, 128, 4]}, "compress_ratios has 4 entries, wanted 5"),
        ({"compress_ratios": [0, 4, 8, 4, 0]}, "may hold 0, 4 and 128, got 8"),
        ({"compress_ratios": [0, 4, 128, 4, 4]}, "MTP layer's entry .* must be 0, got 4"),
        ({"num_hash_layers": 5}, "num_hash_layers must be between 0 and 4 .*got 5"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1, got 2"),
        ({"o_groups": 3}, "num_attention_heads 8 must be a multiple of o_groups 3"),
        ({"qk_rope_head_dim": 128}, "head_dim 64 must be at least qk_rope_head_dim 128"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim must be even, got 15"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than n_routed_experts 8"),
        ({"moe_intermediate_size": 80}, "moe_intermediate_size 80 must be a multiple of .* 32"),
        ({"eos_token_id": 512}, "token id 512 is outside the vocabulary of 512"),
        ({"expert_dtype": "int4"}, "expert_dtype must be .* got 'int4'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "must be of type .yarn., got 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "has no factor"),
        (quantisation(quant_method="awq"), "quantization_config.quant_method 'awq' is not supp"),
        (quantisation(weight_block_size=[64, 64]), r"must be \[128, 128\], got \[64, 64\]"),
        (quantisation(scale_fmt="e5m2"), "scale_fmt must be .* got 'e5m2'"),
    ],
)
def test_wrong_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_of(config(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "unknown layer_types full_attention"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types must be"),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, "may hold 0, 4 and 128, got 8"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
    ],
)
def test_wrong_transformers_configs(changes: dict[str, Any], message: str) -> None:
    written = transformers.DeepseekV4Config(**config(quantization_config=None)).to_dict()
    with pytest.raises(CheckpointError, match=message):
        config_of({**written, **changes})


@pytest.mark.parametrize("form", ["official", "transformers"])
def test_any_nonsense_gives_one_clear_line(form: str) -> None:
    """Each key in turn, nested ones too, takes values of every wrong type and range."""
    base = OFFICIAL
    if form == "transformers":
        base = transformers.DeepseekV4Config(**config(quantization_config=None)).to_dict()
    nonsense = [None, "x", -1, 0, 1.5, math.nan, [], {}, [None], ["x", 2], {"a": 1}, True, 10**9]
    for outer in base:
        inside = base[outer] if isinstance(base[outer], dict) else {}
        for value in nonsense:
            for changed in (value, *({**inside, key: value} for key in inside)):
                try:
                    model = config_of({**base, outer: changed})
                except CheckpointError as error:
                    assert "\n" not in str(error)
                else:
                    assert config_of(config_json(model)) is not None


def test_a_width_that_no_hadamard_matrix_has_is_refused_as_trained() -> None:
    config_of(OFFICIAL).check_index_rotation()
    odd = config_of(config(index_head_dim=48))
    with pytest.raises(CheckpointError, match="index_head_dim 48 must be a power of two"):
        odd.check_index_rotation()
    # Without an indexer nothing is rotated.
    plain = config(index_head_dim=48, compress_ratios=[0, 128, 128, 128, 0])
    config_of(plain).check_index_rotation()


def test_rotary_tables_of_fewer_positions_are_the_first_rows() -> None:
    config = config_of(OFFICIAL)
    rope = config.qk_rope_head_dim, (config.rope_theta, 160000.0), config.rope_scaling
    whole, limited = (RotaryTables(*rope, 96, torch.device("cpu")) for _ in range(2))
    limited.limit(40)
    assert not torch.equal(whole.plain, whole.compressed)
    for found, wanted in ((limited.plain, whole.plain), (limited.compressed, whole.compressed)):
        assert torch.equal(found, wanted[:40])
    limited.limit(60)
    assert len(limited.plain) == len(limited.compressed) == 40
