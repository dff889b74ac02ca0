"""DeepSeek-V4.1's functions for the engine and the commands (registry.py)."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import Storage
from finwhale.distributed.rank import Rank
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v41.cache_spec import cache_spec
from finwhale.models.deepseek_v41.config import GROUP, DeepseekV41Config
from finwhale.models.deepseek_v41.engram_config import EngramConfig
from finwhale.models.deepseek_v41.engram_hash import compress_ids
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.models.deepseek_v41.weight_classes import ModelWeights
from finwhale.models.deepseek_v41.weights import assembler, ignored_prefixes, weight_specs
from finwhale.models.sharding import rank_config
from finwhale.ops import Ops
from finwhale.weights.assembler import bytes_of

# From other modules. `__all__` of deepseek_v4/architecture.py lists all functions.
__all__ = ["GROUP", "assembler", "ignored_prefixes", "rank_config", "weight_specs"]

cache_groups = cache_spec
FP8_PRODUCTS = False  # FP8 and FP4 values times a power of two are exact in bfloat16
WINDOW_BYTES, ENTRY_BYTES, KEY_BYTES = 528, 288, 68
OTHER_FILES = ("tokenizer.json",)  # from which Engram's ids follow


def build(
    config: DeepseekV41Config,
    ops: Ops,
    weights: ModelWeights,
    checkpoint: Checkpoint | None,
    **options: Any,
) -> DeepseekV41:
    """The model. checkpoint: whose tokenizer Engram reads; None: random weights.

    Raises:
        CheckpointError: the tokenizer does not fit the configuration.
    """
    engram, ids = config.engram, None
    if engram is not None and checkpoint is None:
        ids = torch.arange(config.vocab_size) % engram.compressed_vocab_size
    elif engram is not None:
        assert checkpoint is not None
        ids = _compressed_ids(Tokenizer.open(checkpoint.path), config.vocab_size, engram)
    return DeepseekV41(config, ops, weights, ids, **options)


def _compressed_ids(tokenizer: Tokenizer, vocab_size: int, engram: EngramConfig) -> Tensor:
    ids = compress_ids(tokenizer.token_text, tokenizer.spelling, vocab_size)
    found, wanted = int(ids.max()) + 1, engram.compressed_vocab_size
    if found != wanted:
        raise CheckpointError(
            f"{tokenizer.path} has {found} tokens that Engram can tell apart, and config.json says "
            f"{wanted} (engram_compressed_vocab_size)"
        )
    return torch.from_numpy(ids)


def check_rounding(config: DeepseekV41Config) -> None:
    """Every size fits: DeepseekV41Config refuses those that do not."""


def describe(config: DeepseekV41Config) -> dict[str, str]:
    """Describe the parts of the model, for `finwhale inspect`."""
    engram, kinds = config.engram, {0: "window only", 2: "entries of 2 tokens", 1: "of one"}
    return {
        "layers": config.describe_layers(kinds),
        "entries": f"written by layers {_listed(config.kv_source_layer_ids)}, selected by layers "
        f"{_listed(config.index_source_layer_ids)}",
        "Engram": "none"
        if engram is None
        else f"layers {_listed(engram.layer_ids)}, {sum(engram.num_embeddings):,} rows of "
        f"{engram.head_dim} values",
        "draft head": "none" if config.dspark is None else config.dspark.describe(),
        **config.describe_sizes("entries"),
        "weights": "FP8 32x32, experts FP4" if config.quantised else "not quantised",
    }


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) or "none"


def kernel_obstacles(config: DeepseekV41Config, storages: Mapping[str, Storage]) -> list[str]:
    """The reasons why the kernels for packed weights cannot run this model."""
    obstacles, c = [], config
    if any(s != "fp4" for name, s in storages.items() if ".ffn.experts." in name):
        obstacles.append("experts are not FP4")
    if any(s != "fp8_block_32" for name, s in storages.items() if ".shared_experts." in name):
        obstacles.append("shared experts are not FP8 in blocks of 32")
    powers = {c.head_dim, c.index_head_dim, c.candidate_topk_blocks}
    powers |= set() if c.engram is None else {c.engram.head_dim}
    fit = (
        all(size.bit_count() == 1 for size in powers)
        and c.hidden_size % 64 == c.q_lora_rank % GROUP == c.o_lora_rank % GROUP == 0
        and c.head_dim >= 64
        and 32 <= c.index_head_dim <= 128
        and c.index_topk <= 1024
        and c.candidate_topk_blocks <= 2048
        and c.candidate_block_size == 8
    )
    return obstacles if fit else [*obstacles, "its sizes are not those of the kernels"]


def fits_whole_attention(config: DeepseekV41Config, total: int) -> bool:
    return False


weight_bytes = partial(bytes_of, assembler)


def whole_attention_bytes(
    config: DeepseekV41Config, dtype: torch.dtype, ops: Ops, rank: Rank
) -> int:
    """Ranks divide attention's heads."""
    return 0


def is_of_tail(config: DeepseekV41Config, name: str) -> bool:
    """Whether a weight is multiplied by the end of a prompt only."""
    first, layer = config.first_tail_layer, re.match(r"layers\.(\d+)\.", name)
    number = -1 if layer is None else int(layer[1])
    makes_entries = ".compressor." in name or ".indexer.wk." in name
    return number > first or (number == first and not makes_entries)


def cache_bytes_read(config: DeepseekV41Config, context: int) -> float:
    """Bytes of the packed cache that a decode reads for a sequence of `context` tokens."""
    c, total = config, 0.0
    for layer, ratio in enumerate(c.layer_ratios):
        total += min(context, c.sliding_window) * WINDOW_BYTES
        if ratio:
            total += min(context // ratio, c.index_topk) * ENTRY_BYTES
            total += _scored(c, layer, context // ratio) * KEY_BYTES
    return total


def attention_operations(
    config: DeepseekV41Config, tokens: int, heads_divided: int
) -> tuple[float, float]:
    """A rank's operations of attention and indexers in a prompt: in FP8, and in bfloat16."""
    c, total = config, 0.0
    for layer, ratio in enumerate(c.layer_ratios):
        tail = layer >= c.first_tail_layer
        computed, keys = min(tokens, c.sliding_window) if tail else tokens, float(c.sliding_window)
        if ratio:
            entries = tokens / ratio / (1 if tail else 2)
            keys += min(c.index_topk, entries)
            total += 2 * computed * _scored(c, layer, entries) * c.index_n_heads * c.index_head_dim
        total += 4 * computed * keys * c.num_attention_heads * c.head_dim / heads_divided
    return 0.0, total


def _scored(config: DeepseekV41Config, layer: int, entries: float) -> float:
    """How many of the visible entries a layer scores for a token."""
    c, source = config, config.candidate_source_layer_id
    if layer not in c.index_source_layer_ids or entries <= c.index_topk:
        return 0.0
    if source is None or layer <= source:
        return entries
    return min(entries, c.candidate_topk_blocks * c.candidate_block_size)
