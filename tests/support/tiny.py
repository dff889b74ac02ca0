"""Tiny models with random weights that exercise every part of the architecture."""

import math
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.checkpoint.spec import WeightSpec
from finwhale.models.deepseek_v4.config import ARCHITECTURE, MODEL_TYPE
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs

from .writer import write_checkpoint

MOST_LAYERS = 4  # of a tiny model; two of a kind are as good as three
QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def tiny_config(seed: int, *, quantised: bool = False) -> dict[str, Any]:
    """The contents of an official config.json; `seed` determines every size.

    The sizes are irregular on purpose: hidden sizes that are not multiples of 128, windows from 8
    to 128, top-k below and above the number of entries, all layer kinds in any order. index_n_heads
    is at least 32: with fewer heads, relu makes equal scores at the top-k boundary, and the order
    is undetermined. index_head_dim is a power of two for its Hadamard rotation. swiglu_limit is
    small, so that values are clamped. With `quantised`, sizes are multiples of 32 for FP4.
    """
    draw = random.Random(f"tiny {seed}")
    layers = draw.randint(3, 6)
    ratios = [4, 128, *draw.choices((0, 4, 4, 128), k=layers - 2)]
    draw.shuffle(ratios)
    while len(ratios) > MOST_LAYERS:  # every kind of layer keeps one
        ratios.pop(max(i for i, ratio in enumerate(ratios) if ratios.count(ratio) > 1))
    groups, experts = draw.randint(1, 4), draw.randint(4, 16)
    rope_dim = draw.choice((16, 32))
    factor, context = draw.choice((4, 8, 16)), draw.choice((128, 192, 256))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "vocab_size": draw.randint(300, 500),
        "hidden_size": draw.choice((64, 96, 160) if quantised else (60, 72, 96, 160, 200)),
        "num_hidden_layers": len(ratios),
        "num_attention_heads": groups * draw.randint(1, 3),
        "num_key_value_heads": 1,
        "head_dim": draw.choice((48, 56, 64, 72, 80, 96)),
        "qk_rope_head_dim": rope_dim,
        "q_lora_rank": draw.choice((32, 40, 64)),
        "o_lora_rank": draw.choice((24, 32, 48)),
        "o_groups": groups,
        "sliding_window": draw.choice((8, 13, 32, 100, 128)),
        "compress_ratios": [*ratios, 0],
        "index_n_heads": draw.choice((32, 40)),
        "index_head_dim": draw.choice((32, 128, 64)),
        "index_topk": draw.choice((5, 8, 16, 40, 512)),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": draw.randint(2, min(6, experts)),
        "moe_intermediate_size": draw.choice((32, 64, 96) if quantised else (24, 32, 56, 96)),
        "num_hash_layers": min(draw.randint(1, min(4, layers - 1)), len(ratios) - 1),
        "routed_scaling_factor": draw.choice((1.0, 1.5, 2.5)),
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "swiglu_limit": draw.choice((0.25, 0.3, 0.5)),
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": draw.choice((3, 20)),
        "hc_eps": 1e-6,
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "rope_theta": 10000.0,
        "compress_rope_theta": draw.choice((40000.0, 160000.0)),
        "rope_scaling": {
            "type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": context,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": factor * context,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16" if quantised else "float32",
    }
    if quantised:
        config |= {"expert_dtype": "fp4", "quantization_config": QUANTISATION}
    return config


def with_dspark(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config.json with a DSpark head in place of the MTP layer."""
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    return {
        **config,
        "num_nextn_predict_layers": 3,
        "compress_ratios": [*config["compress_ratios"][:layers], 0, 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": vocab - 1,
        "dspark_markov_rank": 12,
        "dspark_target_layer_ids": list(range(layers - 3, layers)),
        **changes,
    }


def divisible_config() -> dict[str, Any]:
    """The contents of a config.json with sizes that two ranks can divide."""
    return tiny_config(3) | {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "o_groups": 2,
        "head_dim": 48,
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "compress_ratios": [128, 4, 4, 0],
        "index_topk": 16,
        "sliding_window": 13,
        "max_position_embeddings": 512,
    }


def random_weights(
    config: Mapping[str, Any], seed: int, values: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors of the model by official name: float32, or int64 for tid2eid.

    The scale of the weights keeps activations of order one through the layers, while attention,
    top-k and routing are far from uniform. No sink, bias, ape or mHC offset is zero.

    Args:
        values: every value is rounded to this dtype, such as bfloat16.
    """
    generator = torch.Generator().manual_seed(seed)
    specs = weight_specs(config_of(config))
    experts = config["n_routed_experts"]
    order = sorted(specs, key=_draw_order)
    weights = {name: _random_weight(specs[name], experts, generator) for name in order}
    for weight in weights.values():
        if weight.is_floating_point():
            weight.copy_(weight.to(values))
    return weights


# The order in which a layer's weights draw random values, so that no value depends on the order of
# the model's table.
_DRAW_ORDER = """
    embed head main_proj main_norm enorm hnorm norm e_proj h_proj hc_head_fn hc_head_base
    hc_head_scale attn_norm ffn_norm hc_attn_fn hc_attn_base hc_attn_scale hc_ffn_fn hc_ffn_base
    hc_ffn_scale attn.q_norm attn.kv_norm attn.attn_sink attn.wq_a attn.wq_b attn.wkv attn.wo_a
    attn.wo_b attn.compressor.wkv attn.compressor.wgate attn.compressor.ape attn.compressor.norm
    attn.indexer.wq_b attn.indexer.weights_proj attn.indexer.compressor.wkv
    attn.indexer.compressor.wgate attn.indexer.compressor.ape attn.indexer.compressor.norm
    ffn.gate ffn.gate.tid2eid ffn.gate.bias ffn.shared_experts.w1 ffn.shared_experts.w3
    ffn.shared_experts.w2 ffn.experts.w1 ffn.experts.w3 ffn.experts.w2 markov_head.markov_w1
    markov_head.markov_w2 confidence_head.proj
"""


def _draw_order(name: str) -> tuple[int, int, bool, bool, int, int]:
    layer, expert = re.match(r"(?:layers|mtp)\.(\d+)\.", name), re.search(r"experts\.(\d+)\.", name)
    leaf = re.sub(r"^(layers|mtp)\.\d+\.|(?<=experts\.)\d+\.|\.weight$", "", name)
    return (
        0 if layer is None else 1 + name.startswith("mtp."),
        0 if layer is None else int(layer[1]),
        # DSpark's last stage has its final norm and its head after its layer.
        name.startswith("mtp.2.") and leaf.startswith(("norm", "hc_head", "markov", "confidence")),
        expert is not None,
        0 if expert is None else int(expert[1]),
        _DRAW_ORDER.split().index(leaf),
    )


def _random_weight(spec: WeightSpec, experts: int, generator: torch.Generator) -> Tensor:
    leaf = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "tid2eid":
        vocab, top = spec.shape
        scores = torch.rand(vocab, experts, generator=generator)
        return scores.argsort(1)[:, :top].contiguous()
    noise = torch.randn(spec.shape, generator=generator)
    if leaf.endswith("norm"):
        return 1 + 0.2 * noise
    if leaf.endswith("_scale"):
        return 0.8 + 0.2 * noise
    if leaf in _PLAIN_SPREAD or leaf.endswith("_base"):
        return _PLAIN_SPREAD.get(leaf, 0.5) * noise
    return _GAIN.get(leaf, 1.0) / math.sqrt(spec.fan_in) * noise


_PLAIN_SPREAD = {"embed": 1.0, "markov_w1": 1.0, "attn_sink": 1.0, "bias": 0.1, "ape": 0.5}
# Averaging and clamping shrink what these projections read.
_GAIN = {"wo_b": 2.0, "w2": 6.0, "head": 2.0}


def write_plain_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> None:
    """Write a checkpoint with official names and unquantised float32 weights."""
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "expert_dtype")}
    plain["torch_dtype"] = "float32"
    tensors = weights.items() if isinstance(weights, Mapping) else weights
    specs = weight_specs(config_of(plain))
    write_checkpoint(path, plain, tensors, specs, plain_dtype=torch.float32)


def write_quantised_checkpoint(
    path: str | Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint in the official layout: FP8 blocks, FP4 experts, bf16 for the rest."""
    specs = weight_specs(config_of(config))
    write_checkpoint(path, config, weights.items(), specs)
