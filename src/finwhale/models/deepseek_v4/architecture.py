"""DeepSeek-V4's entry in the registry: the functions that the engine and the commands use."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from finwhale.chat.effort import effort_ladder
from finwhale.checkpoint.spec import Storage
from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.sharding import is_of_heads, rank_config
from finwhale.models.deepseek_v4.weight_builder import WeightBuilder
from finwhale.models.deepseek_v4.weight_loading import WeightLoading
from finwhale.models.deepseek_v4.weights import ignored_prefixes, weight_specs
from finwhale.models.protocol import Architecture
from finwhale.ops import Ops

# Attention's weights are whole on every rank if they take at most this part of a GPU's memory.
WHOLE_ATTENTION_PART = 24


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
    ratios = config.layer_ratios
    kinds = ", ".join(
        f"{ratios.count(ratio)} {name}"
        for ratio, name in ((0, "window only"), (4, "C4"), (128, "C128"))
        if ratio in ratios
    )
    return {
        "layers": f"{config.num_hidden_layers}: {kinds}",
        "routing": f"{config.num_hash_layers} layers by hash, "
        f"{config.num_hidden_layers - config.num_hash_layers} by score",
        "draft head": _draft_head(config),
        "hidden size": f"{config.hidden_size} in {config.hc_mult} residual streams",
        "attention": f"{config.num_attention_heads} heads of {config.head_dim}, window "
        f"{config.sliding_window}, top {config.index_topk} of the C4 entries",
        "experts": f"{config.num_experts_per_tok} of {config.n_routed_experts} and "
        f"{config.n_shared_experts} shared, width {config.moe_intermediate_size}",
        "vocabulary": f"{config.vocab_size:,}",
        "context": f"{config.max_position_embeddings:,} tokens",
        "weights": (
            f"FP8 {config.weight_block_size[0]}x{config.weight_block_size[1]} "
            f"({config.scale_format} scales), experts {config.expert_dtype.upper()}"
            if config.quantised
            else "not quantised"
        ),
    }


def _draft_head(config: DeepseekV4Config) -> str:
    head = config.dspark
    if head is None:
        return "MTP, one layer" if config.draft_head == "mtp" else "none"
    return (
        f"DSpark: blocks of {head.block_size} tokens in {config.num_draft_layers} stages, Markov "
        f"rank {head.markov_rank}, reads layers {', '.join(map(str, head.target_layer_ids))}"
    )


def part_of(name: str) -> str:
    """Name the part of the model that a tensor belongs to; all layers share their names."""
    pieces = name.split(".")
    prefix = "draft head: " if pieces[0] == "mtp" else ""
    if pieces[0] not in ("layers", "mtp"):
        return "embedding and head" if pieces[0] in ("embed", "head") else "final norm and hc head"
    match pieces[2:]:
        case ["attn", "indexer", *_]:
            return prefix + "indexer"
        case ["attn", "compressor", *_]:
            return prefix + "compressor"
        case ["attn", *_]:
            return prefix + "attention"
        case ["ffn", "experts", *_]:
            return prefix + "routed experts"
        case ["ffn", "shared_experts", *_]:
            return prefix + "shared expert"
        case ["ffn", *_]:
            return prefix + "router"
        case ["markov_head", *_]:
            return prefix + "Markov head"
        case _:
            return prefix + ("norms, mHC and projections" if prefix else "norms and mHC")


def weight_bytes(config: DeepseekV4Config, dtype: torch.dtype, ops: Ops, ranks: int = 1) -> int:
    """Bytes of one rank's weights in the operator table's memory layout."""
    return _bytes_of(config, dtype, ops, Rank(0, ranks))


def whole_attention_bytes(
    config: DeepseekV4Config, dtype: torch.dtype, ops: Ops, ranks: int = 1
) -> int:
    """Bytes that `Rank.whole_attention` adds to the weights of one of several ranks."""
    # It does not depend on the experts, and fewer of them take less time.
    config = replace(config, n_routed_experts=config.num_experts_per_tok)
    part, both = (_bytes_of(config, dtype, ops, Rank(0, ranks, whole)) for whole in (False, True))
    return both - part


def _bytes_of(config: DeepseekV4Config, dtype: torch.dtype, ops: Ops, rank: Rank) -> int:
    return WeightBuilder(
        config,
        dtype=dtype,
        device=torch.device("meta"),
        round_activations=True,
        ops=ops,
        rank=rank,
    ).num_bytes


def fits_whole_attention(config: DeepseekV4Config, total: int) -> bool:
    """Whether `Rank.whole_attention` adds little to a rank's weights, on GPUs of `total` bytes."""
    values = sum(
        math.prod(spec.shape)
        for spec in weight_specs(config).values()
        if is_of_heads(spec.name) or spec.name.endswith(".indexer.wq_b.weight")
    )
    return values * (1 if config.quantised else 2) * WHOLE_ATTENTION_PART <= total


DEEPSEEK_V4 = Architecture(
    read_config=DeepseekV4Config.from_dict,
    check_rounding=DeepseekV4Config.check_index_rotation,
    rank_config=rank_config,
    weight_specs=weight_specs,
    ignored_prefixes=ignored_prefixes,
    kernel_obstacles=kernel_obstacles,
    cache_groups=cache_spec,
    begin_loading=WeightLoading,
    build=DeepseekV4,
    chat_dialect=effort_ladder,
    describe=describe,
    part_of=part_of,
    weight_bytes=weight_bytes,
    whole_attention_bytes=whole_attention_bytes,
    fits_whole_attention=fits_whole_attention,
)
