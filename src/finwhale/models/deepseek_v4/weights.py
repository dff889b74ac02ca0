"""The table of DeepSeek-V4's weights by official name."""

from collections.abc import Mapping
from functools import lru_cache

from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.distributed.rank import ALONE, Rank
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.dspark_config import NUM_STAGES, DsparkConfig
from finwhale.models.deepseek_v4.sharding import loaded_slice, rank_config

# --- The name table -------------------------------------------------------------------------------
# D hidden_size, V vocab_size, A num_attention_heads, C head_dim, Q q_lora_rank, O o_lora_rank,
# G o_groups, J index_n_heads, K index_head_dim, E n_routed_experts, I moe_intermediate_size,
# H hc_mult, M (2 + H) * H mHC outputs: H pre, H post, H * H residual.


# A start asks for them several times.
@lru_cache(maxsize=2)
def weight_specs(config: DeepseekV4Config, rank: Rank = ALONE) -> Mapping[str, WeightSpec]:
    """Every tensor of a checkpoint of this configuration, in file order, by name.

    The table omits `.scale` tensors, which belong to their weights. If the configuration is not
    quantised, the storage of every FP8 and FP4 weight is "bf16". `config` describes the whole
    model; each spec names the slice that `rank` loads.

    Raises:
        FinwhaleError: this number of ranks cannot divide the model.
    """
    rank_config(config, rank.size)
    D, V = config.hidden_size, config.vocab_size
    specs = [
        WeightSpec("embed.weight", (V, D), "bf16"),
        WeightSpec("head.weight", (V, D), "bf16"),
        WeightSpec("norm.weight", (D,), "bf16"),
        *_hc_head("", config),
    ]
    for i, ratio in enumerate(config.layer_ratios):
        specs += _layer(f"layers.{i}", config, ratio, config.is_hash_layer(i))
    for i in range(config.num_nextn_predict_layers):
        specs += _mtp(f"mtp.{i}", config)
    if config.dspark is not None:
        specs += _dspark(config, config.dspark)
    if rank.size > 1:
        specs = [
            WeightSpec(name, shape, storage, loaded_slice(name, shape, rank))
            for name, shape, storage, _ in specs
        ]
    return {spec.name: spec for spec in specs}


def ignored_prefixes(config: DeepseekV4Config) -> dict[str, str]:
    """Name prefixes of tensors that the loader ignores, each with the reason."""
    if config.draft_head is None:
        return {"mtp.": "the model runs without its draft head"}
    return {}


def _layer(layer: str, config: DeepseekV4Config, ratio: int, hashed: bool) -> list[WeightSpec]:
    D, H = config.hidden_size, config.hc_mult
    M = (2 + H) * H
    return [
        WeightSpec(f"{layer}.attn_norm.weight", (D,), "bf16"),
        WeightSpec(f"{layer}.ffn_norm.weight", (D,), "bf16"),
        WeightSpec(f"{layer}.hc_attn_fn", (M, H * D), "f32"),
        WeightSpec(f"{layer}.hc_attn_base", (M,), "f32"),
        WeightSpec(f"{layer}.hc_attn_scale", (3,), "f32"),
        WeightSpec(f"{layer}.hc_ffn_fn", (M, H * D), "f32"),
        WeightSpec(f"{layer}.hc_ffn_base", (M,), "f32"),
        WeightSpec(f"{layer}.hc_ffn_scale", (3,), "f32"),
        *_attention(f"{layer}.attn", config, ratio),
        *_moe(f"{layer}.ffn", config, hashed),
    ]


def _attention(attn: str, config: DeepseekV4Config, ratio: int) -> list[WeightSpec]:
    D, A, C = config.hidden_size, config.num_attention_heads, config.head_dim
    Q, O, G = config.q_lora_rank, config.o_lora_rank, config.o_groups  # noqa: E741
    J, K = config.index_n_heads, config.index_head_dim
    fp8 = _quantised(config, "fp8_block")
    specs = [
        WeightSpec(f"{attn}.q_norm.weight", (Q,), "bf16"),
        WeightSpec(f"{attn}.kv_norm.weight", (C,), "bf16"),
        WeightSpec(f"{attn}.attn_sink", (A,), "f32"),
        WeightSpec(f"{attn}.wq_a.weight", (Q, D), fp8),
        WeightSpec(f"{attn}.wq_b.weight", (A * C, Q), fp8),
        WeightSpec(f"{attn}.wkv.weight", (C, D), fp8),
        WeightSpec(f"{attn}.wo_a.weight", (G * O, A * C // G), fp8),
        WeightSpec(f"{attn}.wo_b.weight", (D, G * O), fp8),
    ]
    if ratio:
        specs += _compressor(f"{attn}.compressor", D, C, ratio)
    if ratio == 4:
        specs += [
            WeightSpec(f"{attn}.indexer.wq_b.weight", (J * K, Q), fp8),
            WeightSpec(f"{attn}.indexer.weights_proj.weight", (J, D), "bf16"),
            *_compressor(f"{attn}.indexer.compressor", D, K, ratio),
        ]
    return specs


def _compressor(compressor: str, hidden: int, dim: int, ratio: int) -> list[WeightSpec]:
    width = 2 * dim if ratio == 4 else dim  # ratio 4: the two overlapping halves Ca and Cb
    return [
        WeightSpec(f"{compressor}.wkv.weight", (width, hidden), "bf16"),
        WeightSpec(f"{compressor}.wgate.weight", (width, hidden), "bf16"),
        WeightSpec(f"{compressor}.ape", (ratio, width), "f32"),
        WeightSpec(f"{compressor}.norm.weight", (dim,), "bf16"),
    ]


def _moe(ffn: str, config: DeepseekV4Config, hashed: bool) -> list[WeightSpec]:
    D, V, E = config.hidden_size, config.vocab_size, config.n_routed_experts
    I, top = config.moe_intermediate_size, config.num_experts_per_tok  # noqa: E741
    fp8 = _quantised(config, "fp8_block")
    expert = _quantised(config, "fp4" if config.expert_dtype == "fp4" else "fp8_block")
    specs = [WeightSpec(f"{ffn}.gate.weight", (E, D), "bf16")]
    if hashed:
        specs.append(WeightSpec(f"{ffn}.gate.tid2eid", (V, top), "i64"))
    else:
        specs.append(WeightSpec(f"{ffn}.gate.bias", (E,), "f32"))
    specs += [
        WeightSpec(f"{ffn}.shared_experts.w1.weight", (I, D), fp8),
        WeightSpec(f"{ffn}.shared_experts.w3.weight", (I, D), fp8),
        WeightSpec(f"{ffn}.shared_experts.w2.weight", (D, I), fp8),
    ]
    for e in range(E):
        specs += [
            WeightSpec(f"{ffn}.experts.{e}.w1.weight", (I, D), expert),
            WeightSpec(f"{ffn}.experts.{e}.w3.weight", (I, D), expert),
            WeightSpec(f"{ffn}.experts.{e}.w2.weight", (D, I), expert),
        ]
    return specs


def _mtp(mtp: str, config: DeepseekV4Config) -> list[WeightSpec]:
    D = config.hidden_size
    fp8 = _quantised(config, "fp8_block")
    return [
        WeightSpec(f"{mtp}.enorm.weight", (D,), "bf16"),
        WeightSpec(f"{mtp}.hnorm.weight", (D,), "bf16"),
        WeightSpec(f"{mtp}.norm.weight", (D,), "bf16"),
        WeightSpec(f"{mtp}.e_proj.weight", (D, D), fp8),
        WeightSpec(f"{mtp}.h_proj.weight", (D, D), fp8),
        *_hc_head(f"{mtp}.", config),
        *_layer(mtp, config, 0, False),
    ]


def _dspark(config: DeepseekV4Config, head: DsparkConfig) -> list[WeightSpec]:
    D, V = config.hidden_size, config.vocab_size
    of_stage = config.of_stage()
    specs = [
        WeightSpec(
            "mtp.0.main_proj.weight",
            (D, len(head.target_layer_ids) * D),
            _quantised(config, "fp8_block"),
        ),
        WeightSpec("mtp.0.main_norm.weight", (D,), "bf16"),
    ]
    for i in range(NUM_STAGES):
        specs += _layer(f"mtp.{i}", of_stage, 0, False)
    last = f"mtp.{NUM_STAGES - 1}"
    specs += [
        WeightSpec(f"{last}.norm.weight", (D,), "bf16"),
        *_hc_head(f"{last}.", config),
        WeightSpec(f"{last}.markov_head.markov_w1.weight", (V, head.markov_rank), "bf16"),
        WeightSpec(f"{last}.markov_head.markov_w2.weight", (V, head.markov_rank), "bf16"),
    ]
    if head.enable_confidence_head:
        width = D + head.confidence_width
        specs.append(WeightSpec(f"{last}.confidence_head.proj.weight", (1, width), "bf16"))
    return specs


def _hc_head(prefix: str, config: DeepseekV4Config) -> list[WeightSpec]:
    D, H = config.hidden_size, config.hc_mult
    return [
        WeightSpec(f"{prefix}hc_head_fn", (H, H * D), "f32"),
        WeightSpec(f"{prefix}hc_head_base", (H,), "f32"),
        WeightSpec(f"{prefix}hc_head_scale", (1,), "f32"),
    ]


def _quantised(config: DeepseekV4Config, storage: Storage) -> Storage:
    return storage if config.quantised else "bf16"
