"""A tiny checkpoint whose sizes two ranks can divide."""

from pathlib import Path
from typing import Any

from finwhale.testing.tiny import random_weights, tiny_config, write_plain_checkpoint

CONFIG: dict[str, Any] = tiny_config(3) | {
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


def write_tiny(path: Path) -> Path:
    """Write the checkpoint, without a tokenizer; returns `path`."""
    write_plain_checkpoint(path, CONFIG, random_weights(CONFIG, 3))
    return path
