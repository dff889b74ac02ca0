"""A tiny DeepSeek-V4.1 with random weights that has every mechanism of the text model."""

import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from tests.models.v41_reference import engram_primes, token_map
from torch import Tensor

from finwhale.models.deepseek_v41.config_json import config_of
from finwhale.models.deepseek_v41.weights import weight_specs

MARKS = (" ", "\n", " \t ", "\ufffd", "\ufffd\ufffd", "", "\x1c", "\u0903")
WORDS = ("a", "A", "\u00e1", "\uff21", " a", "a ", "ab", "aB", "stra\u00dfe", "STRASSE", "\u0130")
GREEK = ("\u03b1\u03a3", "\u03b1\u03c2", "\u03b1\u03c3")  # with a capital, a final, a small sigma


def vocabulary() -> list[str]:
    """What each token decodes to: some differ only by case, accents, width or spaces."""
    words = [*MARKS, *WORDS, *GREEK, "\ufb01", "fi"]
    return words + [f"{'tT'[i % 2]}{i // 2}" for i in range(96 - len(words))]


def compressed_ids() -> list[int]:
    """The Engram's token map of `vocabulary`."""
    return token_map(vocabulary(), vocabulary())


def tiny_config() -> dict[str, Any]:
    """The contents of an official config.json.

    Layers 0 and 1 have their window alone. Layers 2 and 5 are KV sources of ratio 2, and layer 7
    one of ratio 1; the layers after them use their entries. Layers 9 and 11 choose entries by
    layer 7's keys among layer 7's candidates, which are 5 blocks of 3. From 14 tokens on, fewer
    entries are selected than are visible; from 16, blocks are dropped. index_n_heads is 32: with
    few heads, relu makes equal scores. hc_sinkhorn_iters is 3, after which the order of the steps
    still shows. Sizes are multiples of 32, which FP8 and FP4 need.
    """
    layers = 12
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": len(vocabulary()),
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 2,
        "sliding_window": 8,
        "compress_ratios": [0] * 2 + [2] * 5 + [1] * 5 + [0] * 3,
        "kv_source_layer_ids": [2, 5, 7],
        "index_source_layer_ids": [2, 5, 7, 9, 11],
        "index_n_heads": 32,
        "index_head_dim": 32,
        "index_topk": 6,
        "candidate_source_layer_id": 7,
        "candidate_topk_blocks": 5,
        "candidate_block_size": 3,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "swiglu_limit": 0.5,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-20,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 256,
        "engram_layer_ids": [1, 5],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 40,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": max(compressed_ids()) + 1,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 4,
        "dspark_noise_token_id": 95,
        "dspark_target_layer_ids": [9, 10, 11],
        "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 5,
        "dspark_num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    }
    text["engram_num_embeddings"] = [sum(sizes) for sizes in engram_primes(text).values()]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
        "image_token_id": 94,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Random float32 tensors by official name.

    The scale of the weights keeps activations of order one through the layers, while attention,
    top-k and routing are far from uniform. No sink, bias or mHC offset is zero. The values depend
    on the seed, the name and the shape alone.
    """
    weights = {}
    for name, spec in weight_specs(config_of(config)).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        weights[name] = _random(name, torch.randn(spec.shape, generator=generator))
    return weights


def random_text(length: int, seed: int) -> list[int]:
    """Token ids with repetitions, so that n-grams occur again."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, len(vocabulary()), (length,), generator=generator).tolist()
    return ids[: length - 8] + ids[:8]


def _random(name: str, noise: Tensor) -> Tensor:
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith("norm") or leaf in ("q_weight", "k_weight"):
        return 1 + 0.2 * noise
    if leaf.endswith("_scale"):
        return 0.8 + 0.2 * noise
    if noise.dim() == 1:  # sinks, biases, mHC offsets
        return 0.5 * noise
    if re.search(r"(embed|^head)\.weight$", name):
        return noise if "embed" in name else noise / math.sqrt(noise.shape[1])
    gain = {"wq_b": 2.0, "gate": 2.0, "weights_proj": 2.0}.get(leaf, 1.0)
    return gain * noise / math.sqrt(noise.shape[1])
