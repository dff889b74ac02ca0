"""DeepSeek-V4's functions for the engine and the commands (registry.py)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from finwhale.checkpoint.spec import Storage
from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.weights import assembler, ignored_prefixes, weight_specs
from finwhale.models.sharding import rank_config
from finwhale.ops import Ops
from finwhale.weights.assembler import bytes_of

__all__ = [
    "FP8_PRODUCTS",
    "GROUP",
    "OTHER_FILES",
    "assembler",
    "attention_operations",
    "build",
    "cache_bytes_read",
    "cache_groups",
    "check_rounding",
    "describe",
    "fits_whole_attention",
    "ignored_prefixes",
    "is_of_tail",
    "kernel_obstacles",
    "rank_config",
    "weight_bytes",
    "weight_specs",
    "whole_attention_bytes",
]

cache_groups, check_rounding = cache_spec, DeepseekV4Config.check_index_rotation

GROUP = 128  # values of a weight's input that share a scale
FP8_PRODUCTS = True  # kernels multiply FP8 and FP4 weights as FP8
ROW_BYTES, KEY_BYTES = 584, 68  # of a row of the cache, and of an index key, both packed
OTHER_FILES = ()  # the model's values follow from the configuration and the weights alone
# Attention's weights are whole on every rank if they take at most this part of a GPU's memory.
WHOLE_ATTENTION_PART = 24


def build(
    config: DeepseekV4Config, ops: Ops, weights: Any, checkpoint: object, **options: Any
) -> DeepseekV4:
    """The model. checkpoint: not needed, because nothing follows from its other files."""
    return DeepseekV4(config, ops, weights, **options)


def kernel_obstacles(config: DeepseekV4Config, storages: Mapping[str, Storage]) -> list[str]:
    """The reasons why the kernels for packed weights cannot run this model.

    These kernels need FP4 experts, and sizes that are multiples of their rounding groups.
    """
    obstacles = []
    if any(s != "fp4" for name, s in storages.items() if ".ffn.experts." in name):
        obstacles.append("experts are not FP4")
    c = config
    group_width = c.num_attention_heads * c.head_dim // c.o_groups
    grouped = (c.hidden_size, c.q_lora_rank, c.o_lora_rank, group_width, c.moe_intermediate_size)
    nope = c.head_dim - c.qk_rope_head_dim
    fit = (
        all(width % 128 == 0 for width in grouped)
        and c.index_head_dim == 128
        and nope % 16 == 0
        and c.qk_rope_head_dim % 8 == 0
    )
    if not fit:
        obstacles.append("its sizes are not multiples of 128")
    return obstacles


def describe(config: DeepseekV4Config) -> dict[str, str]:
    """Describe the parts of the model, for `finwhale inspect`."""
    return {
        "layers": config.describe_layers({0: "window only", 4: "C4", 128: "C128"}),
        "routing": f"{config.num_hash_layers} layers by hash, "
        f"{config.num_hidden_layers - config.num_hash_layers} by score",
        "draft head": _draft_head(config),
        **config.describe_sizes("C4 entries"),
        "weights": (
            f"FP8 {config.weight_block_size[0]}x{config.weight_block_size[1]} "
            f"({config.scale_format} scales), experts {config.expert_dtype.upper()}"
            if config.quantised
            else "not quantised"
        ),
    }


def _draft_head(config: DeepseekV4Config) -> str:
    if config.dspark is not None:
        return config.dspark.describe()
    return "MTP, one layer" if config.draft_head == "mtp" else "none"


weight_bytes = partial(bytes_of, assembler)


def whole_attention_bytes(
    config: DeepseekV4Config, dtype: torch.dtype, ops: Ops, rank: Rank
) -> int:
    """Bytes that `Rank.whole_attention` adds to the weights of a rank without it."""
    # It does not depend on the experts, and fewer of them take less time.
    config = replace(config, n_routed_experts=config.num_experts_per_tok)
    both = weight_bytes(config, dtype, ops, replace(rank, whole_attention=True))
    return both - weight_bytes(config, dtype, ops, rank)


def fits_whole_attention(config: DeepseekV4Config, total: int) -> bool:
    """Whether `Rank.whole_attention` adds little to a rank's weights, on GPUs of `total` bytes."""
    values = sum(
        math.prod(spec.shape)
        for spec in weight_specs(config).values()
        if (spec.shard is not None and spec.shard.of == "heads")
        or spec.name.endswith(".indexer.wq_b.weight")
    )
    return values * (1 if config.quantised else 2) * WHOLE_ATTENTION_PART <= total


def is_of_tail(config: DeepseekV4Config, name: str) -> bool:
    """Whether a weight is multiplied by the end of a prompt only."""
    return False


def cache_bytes_read(config: DeepseekV4Config, context: int) -> float:
    """Bytes of the packed cache that a decode reads for a sequence of `context` tokens."""
    c, rows, keys = config, 0, 0
    for ratio in c.layer_ratios:
        rows += min(context, c.sliding_window)
        if ratio:
            entries = context // ratio
            rows += min(entries, c.index_topk) if ratio == 4 else entries
            keys += entries * (ratio == 4 and entries > c.index_topk)
    return rows * ROW_BYTES + keys * KEY_BYTES


def attention_operations(
    config: DeepseekV4Config, tokens: int, heads_divided: int
) -> tuple[float, float]:
    """A rank's operations of attention and indexers in a prompt: in FP8, and in bfloat16."""
    c, fp8, bf16 = config, 0.0, 0.0
    for ratio in c.layer_ratios:
        keys = float(c.sliding_window)
        if ratio == 4:
            keys += min(c.index_topk, tokens / 8)
            fp8 += 2 * tokens * (tokens / 8) * c.index_n_heads * c.index_head_dim
        elif ratio == 128:
            keys += tokens / 256
        bf16 += 4 * tokens * keys * c.num_attention_heads * c.head_dim / heads_divided
    return fp8, bf16
