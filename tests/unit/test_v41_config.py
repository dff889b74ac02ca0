"""DeepseekV41Config: the published config.json, its checks, and the cache that it implies."""

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tests.support.v41_config import PUBLISHED as RAW
from tests.support.v41_config import config, tiny_config

from finwhale.checkpoint.spec import Storage
from finwhale.engine.start.kv_cache import allocate_cache, plan_cache
from finwhale.errors import CheckpointError
from finwhale.models.cache import CacheGroup
from finwhale.models.config_checks import FIXED
from finwhale.models.deepseek_v41 import architecture
from finwhale.models.deepseek_v41.cache_spec import cache_spec
from finwhale.models.deepseek_v41.config_json import config_of
from finwhale.models.deepseek_v41.presets import PUBLISHED
from finwhale.models.protocol import ModelConfig

FLASH = PUBLISHED["v4.1-flash"]


def test_the_published_config_json() -> None:
    assert config_of(RAW) == FLASH
    model: ModelConfig = FLASH
    assert (model.model_type, model.draft_head, model.max_draft_tokens) == (
        "deepseek_v41",
        "dspark",
        5,
    )
    assert (model.draft_block_tokens, FLASH.max_verify_tokens) == (5, 6)
    sources = [FLASH.kv_source(layer) for layer in (1, 2, 7, 8, 13, 14, 19, 20, 39)]
    assert sources == [None, 2, 2, 8, 8, 14, 14, 20, 20]
    assert asdict(FLASH.of_layer(39)) == asdict(FLASH)
    stage = FLASH.of_layer(40)
    assert (stage.n_routed_experts, stage.num_experts_per_tok) == (128, 3)
    assert stage.engram and stage.engram.num_rows == 24


def test_parts_that_a_model_may_lack() -> None:
    raw = tiny_config()
    model = config_of(raw)
    assert model.quantised and model.engram and model.dspark
    plain = config_of({k: v for k, v in raw.items() if k not in ("quantization_config", "dtype")})
    assert not plain.quantised
    assert config_of(raw | {"eos_token_id": [1, 3]}).eos_token_ids == (1, 3)
    assert config_of(tiny_config(rope_scaling=...)).rope_scaling is None
    assert config_of(tiny_config(candidate_source_layer_id=-1)).candidate_source_layer_id is None
    assert config_of(tiny_config(engram_layer_ids=[], engram_num_embeddings=[])).engram is None
    without = config_of(tiny_config(num_nextn_predict_layers=0, compress_ratios=[0, 2, 2, 2, 1, 1]))
    assert without == model.without_draft_head() != model
    assert (without.draft_head, without.max_draft_tokens, without.max_verify_tokens) == (None, 0, 1)


def test_a_cut_keeps_the_parts_of_its_layers() -> None:
    cut = FLASH.with_layers(16)
    assert cut.compress_ratios == (0, 0, *(2,) * 14, 0, 0, 0)
    assert cut.kv_source_layer_ids == cut.index_source_layer_ids == (2, 8, 14)
    assert cut.candidate_source_layer_id is None and cut.engram == FLASH.engram
    assert cut.dspark and cut.dspark.target_layer_ids == (13, 14, 15)
    cut = FLASH.with_layers(25)
    assert cut.index_source_layer_ids == (2, 8, 14, 20, 24) and cut.candidate_source_layer_id == 20
    cut = FLASH.with_layers(14)
    assert cut.engram and (cut.engram.layer_ids, cut.engram.num_embeddings) == ((1,), (384006168,))
    assert FLASH.without_draft_head().with_layers(1).engram is None
    assert FLASH.with_layers(40) == FLASH
    for layers, message in ((41, "the model has 40"), (2, "the DSpark head reads 3 layers")):
        with pytest.raises(CheckpointError, match=f"cannot cut to {layers} layers: {message}"):
            FLASH.with_layers(layers)


def ratios(*of_layers: int) -> dict[str, Any]:
    return {"compress_ratios": [*of_layers, 0, 0, 0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"hidden_size": 100}, "hidden_size 100 must be a multiple of the FP4 block 32"),
        ({"moe_intermediate_size": 80}, "moe_intermediate_size 80 must be a multiple of the FP4"),
        ({"index_topk": True}, "index_topk must be a positive integer, got True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, got 0"),
        ({"o_groups": 3}, "num_attention_heads 4 must be a multiple of o_groups 3"),
        ({"head_dim": 48}, "head_dim 48 must be a multiple of the group of a cached row 32"),
        ({"index_head_dim": 8}, "index_head_dim 8 must be at least qk_rope_head_dim 16"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than n_routed_experts 6"),
        ({"dspark_num_experts_per_tok": 5}, "5 experts per token of the DSpark stages are more"),
        ({"hc_mult": 2}, "hc_mult 2 is not supported, only 4 is"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, 'rope scaling must be of type "yarn"'),
        ({"rope_scaling": [1]}, r"rope_scaling must be a dict, got \[1\]"),
        ({"compress_ratios": 3}, "compress_ratios must be a list, got 3"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1]}, "compress_ratios has 6 entries, wanted 9: one"),
        (ratios(0, 2, 2, 4, 1, 1), "compress_ratios may hold 0, 1 and 2, got 4"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 0, 0, 1]}, "DSpark stages' entries .* got 0, 0, 1"),
        (ratios(2, 2, 2, 2, 1, 1), "layer 0 with the ratio 2 must follow .* the last one is None"),
        (ratios(0, 2, 1, 2, 1, 1), "layer 2 with the ratio 1 must follow .* the last one is 1"),
        (ratios(0, 2, 2, 0, 1, 1), "kv_source_layer_ids: layer 3 has the ratio 0"),
        (ratios(0, 2, 2, 2, 1, 0), "index_source_layer_ids: layer 5 has the ratio 0"),
        (ratios(0, 0, 0, 0, 0, 0), "no layer has a ratio, so no layer can be a source"),
        ({"kv_source_layer_ids": []}, r"kv_source_layer_ids must be layers from 0 to 5, got \[\]"),
        ({"kv_source_layer_ids": [1, 4, 3]}, "kv_source_layer_ids must be different and ascend"),
        ({"index_source_layer_ids": [1, 3, 4, 6]}, "index_source_layer_ids must be layers from 0"),
        ({"index_source_layer_ids": [1, 3, 5]}, r"kv_source_layer_ids \[4\] must be in index_sou"),
        ({"candidate_source_layer_id": 3}, "must be the last KV source, 4, or -1 for none, got 3"),
        ({"candidate_block_size": 0}, "candidate_block_size must be a positive integer, got 0"),
        (
            {"engram_layer_ids": [0, 6]},
            "engram_layer_ids must be layers from 0 to 5, got",
        ),
        ({"engram_layer_ids": 1}, "engram_layer_ids must be a list, got 1"),
        ({"engram_num_embeddings": [97]}, "engram_num_embeddings has 1 entries, wanted 2: one"),
        ({"engram_num_embeddings": [97, -1]}, "engram_num_embeddings must be a positive integer"),
        ({"engram_num_embeddings": [97, 2**33]}, "engram_num_embeddings must be at most"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be at least 2, got 1"),
        ({"engram_head_dim": 48}, "engram_head_dim 48 must be a multiple of the FP8 block 32"),
        ({"engram_pad_token_id": 320}, r"engram_pad_token_id must be a token id below 320"),
        (
            {"engram_compressed_vocab_size": 321},
            "compressed_vocab_size 321 is more than vocab",
        ),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers must be 0 or 3, got 1"),
        ({"dspark_block_size": 8}, "dspark_block_size must be at most 7, got 8"),
        ({"dspark_target_layer_ids": [5, 6]}, "dspark_target_layer_ids must be layers from 0 to 5"),
        ({"dspark_noise_token_id": 320}, "dspark_noise_token_id must be a token id below 320"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    config_of(tiny_config())
    with pytest.raises(CheckpointError, match=message) as caught:
        config_of(tiny_config(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v4"}, "config.json describes another model"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "config.json describes another model"),
        ({"text_config": None}, "config.json has no text_config"),
        ({"text_config": [1]}, r"text_config must be a dict, got \[1\]"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"bos_token_id": -1}, "token id -1 is outside the vocabulary of 320"),
        ({"eos_token_id": []}, "eos_token_id is an empty list"),
        ({"quantization_config": "fp8"}, "quantization_config must be a dict"),
    ],
)
def test_bad_values_outside_of_the_text_config(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tiny_config() | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quant_method", "modelopt"),
        ("scale_fmt", None),
        ("expert_dtype", "fp8"),
        ("weight_block_size", [128, 128]),
    ],
)
def test_other_formats_are_refused(name: str, value: object) -> None:
    raw = tiny_config()
    with pytest.raises(CheckpointError, match=f"quantization_config.{name} .* is not supported"):
        config_of(raw | {"quantization_config": raw["quantization_config"] | {name: value}})


def test_missing_values_are_named() -> None:
    """No size has a default, because a wrong one would be found late or never."""
    free = {*FIXED, "rope_scaling", "model_type"}
    free |= {"dspark_n_routed_experts", "dspark_num_experts_per_tok"}  # by default the model's
    for name in config()["text_config"]:
        if name in free:
            config_of(config(**{name: ...}))
        else:
            with pytest.raises(CheckpointError, match=rf"config.json .*\b{name}$"):
                config_of(config(**{name: ...}))


def test_values_of_a_wrong_type_are_refused_in_one_line() -> None:
    """Never with another error than a CheckpointError."""
    junk: list[object] = [
        None,
        True,
        -1,
        2**70,
        math.nan,
        math.inf,
        "x",
        [],
        {},
        [[]],
        [None],
        [{}],
        [0.5],
    ]
    for name in tiny_config()["text_config"]:
        refused = 0
        for value in junk:
            try:
                config_of(tiny_config(**{name: value}))
            except CheckpointError as error:
                assert "\n" not in str(error) and len(str(error)) < 300
                refused += 1
        assert refused >= len(junk) - 3 or name == "model_type", name


# --- The cache ------------------------------------------------------------------------------------


def groups() -> dict[str, CacheGroup]:
    return {group.name: group for group in cache_spec(FLASH)}


def test_what_the_published_model_keeps() -> None:
    """Per token 3 * (288 + 68) / 2 + 288 + 68 bytes, without any padding (published: 890)."""
    kept = groups()
    assert list(kept) == ["window", "c1", "c2", "c2_state", "engram_ids"]
    entries = [group for group in kept.values() if group.keep is None]
    assert sum(g.page_bytes(2, packed=True) / g.tokens_per_page for g in entries) == 890
    window = kept["window"]
    assert window.keep == (1, 128)
    # 128 rows of 528 bytes in 40 layers and 3 stages.
    assert window.page_bytes(2, packed=True) / window.tokens_per_page * 128 == 2_906_112
    layers = {f.name: f.layers for group in kept.values() for f in group.fields}
    assert layers == {
        "window": tuple(range(43)),
        "c1": (20,),
        "c1_keys": (20,),
        "c2": (2, 8, 14),
        "c2_keys": (2, 8, 14),
        "c2_state": (2, 8, 14),
        "engram_ids": (1,),
    }
    # n-grams of up to four tokens: the ids of three tokens before the next one.
    assert kept["engram_ids"].keep == (1, 3) and kept["engram_ids"].fields[0].full_precision


def test_the_engine_allocates_it() -> None:
    """A million tokens, and the windows of four sequences."""
    spec, budget = cache_spec(FLASH), 2**30
    plan = plan_cache(
        spec,
        itemsize=2,
        packed=True,
        budget_bytes=budget,
        max_num_seqs=4,
        max_step_tokens=1024,
        wanted_tokens=2**20,
        drafts=True,
    )
    assert plan.capacity_tokens == 2**20
    cache = allocate_cache(spec, plan, torch.bfloat16, torch.device("meta"), packed=True)
    assert sum(pages.nbytes for pages in cache.pages.values()) == plan.total_bytes <= budget
    entries = sum(cache.pages[name].nbytes for name in ("c1", "c2"))
    assert entries == 890 * (2**20 + 256)  # and page 0
    assert tuple(cache.pools["c2_keys"]) == (2, 8, 14) and len(cache.pools["window"]) == 43


def test_the_state_of_a_pair_is_its_open_token() -> None:
    state = groups()["c2_state"]
    (field,) = state.fields
    assert field.full_precision and field.width == 2 * 512
    for tokens in range(600):
        # The token of an odd number of tokens waits for the next one.
        assert state.first_needed(tokens) == tokens - tokens % 2
    assert not state.state_pages(256)
    # A step with drafts may keep any number of them, so it writes a row after each token.
    assert state.first_written(100, 106) == 100 and state.first_written(101, 102) == 102
    assert state.first_written(0, 1001) == 1000


def test_a_model_without_sources_keeps_windows_alone() -> None:
    cut = FLASH.without_draft_head().with_layers(1)
    (window,) = cache_spec(cut)
    assert window.keep == (1, 127) and window.fields[0].layers == (0,)


@pytest.mark.parametrize(
    ("changes", "part", "reasons"),
    [
        ({}, "", []),
        ({}, ".ffn.experts.", ["experts are not FP4"]),
        ({}, ".shared_experts.", ["shared experts are not FP8 in blocks of 32"]),
        ({}, ".attn.", []),  # plain projections have kernels, too
        ({"candidate_topk_blocks": 1000}, "", ["its sizes are not those of the kernels"]),
        ({"head_dim": 96}, "", ["its sizes are not those of the kernels"]),
        ({"index_topk": 1025}, "", ["its sizes are not those of the kernels"]),
        ({"candidate_block_size": 4}, "", ["its sizes are not those of the kernels"]),
    ],
)
def test_why_no_kernels_run(changes: dict[str, Any], part: str, reasons: list[str]) -> None:
    """part: of the names of weights that are stored in bf16."""
    model = config_of(config(**changes))
    specs = architecture.weight_specs(model)
    storages: dict[str, Storage] = {
        name: "bf16" if part and part in name else spec.storage for name, spec in specs.items()
    }
    assert architecture.kernel_obstacles(model, storages) == reasons
