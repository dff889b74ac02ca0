"""Writes src/finwhale/demo_v41: a DeepSeek-V4.1 of 2 MB with random weights.

    python tools/demo_v41.py [DIRECTORY]

It has every mechanism of the text model: windows alone, entries of two tokens and of one, layers
that use another layer's entries and selections, candidates, Engram, and a DSpark head. Its text is
noise. The tokenizer has the first 1,024 tokens of the demo model's.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.writer import write_stored
from finwhale.demo import DEMO_PATH, V41_PATH
from finwhale.models.deepseek_v41.config_json import config_of
from finwhale.models.deepseek_v41.engram_hash import compress_ids
from finwhale.models.deepseek_v41.weights import weight_specs
from finwhale.weights.dummy import DummySource

VOCABULARY, LAYERS, STAGES = 1024, 8, 3


def tokenizer_json() -> dict[str, Any]:
    """The demo model's tokenizer without its later tokens."""
    spec: dict[str, Any] = json.loads((DEMO_PATH / "tokenizer.json").read_text())
    model = spec["model"]
    model["vocab"] = {text: i for text, i in model["vocab"].items() if i < VOCABULARY}
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    model["merges"] = [pair for pair in pairs if "".join(pair) in model["vocab"]]
    return spec


def config_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of config.json."""
    ids = compress_ids(tokenizer.token_text, tokenizer.spelling, VOCABULARY)
    engram = {
        "layer_ids": [1, 4],
        "num_embeddings": [1362, 1552],
        "max_ngram_size": 4,
        "vocab_size": 200,
        "n_heads": 2,
        "head_dim": 32,
        "pad_token_id": 2,
        "compressed_vocab_size": int(ids.max()) + 1,
    }
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": 32768,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 2048,
        },
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1] + [0] * STAGES,
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        **{f"engram_{name}": value for name, value in engram.items()},
        "num_nextn_predict_layers": STAGES,
        "dspark_block_size": 5,
        "dspark_noise_token_id": VOCABULARY - 1,
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 4,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 10,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
            "weight_block_size": [32, 32],
        },
        "text_config": text,
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0},
    }


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else V41_PATH
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(tokenizer_json(), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(text + "\n")
    shutil.copyfile(DEMO_PATH / "tokenizer_config.json", directory / "tokenizer_config.json")
    config = config_json(Tokenizer.open(directory))
    write_stored(directory, config, DummySource(weight_specs(config_of(config)), "cpu", seed=41))


if __name__ == "__main__":
    main()
