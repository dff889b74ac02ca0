"""The published configurations."""

from dataclasses import replace

from finwhale.models.config_checks import preset
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.dspark_config import DsparkConfig
from finwhale.models.rope_config import YarnScaling

_FLASH = DeepseekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_lora_rank=1024,
    o_groups=8,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    routed_scaling_factor=1.5,
    num_hash_layers=3,
    swiglu_limit=10.0,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=YarnScaling(factor=16.0, original_max_position_embeddings=65536),
    max_position_embeddings=1048576,
    num_nextn_predict_layers=1,
    draft_head="mtp",
)
_PRO = replace(
    _FLASH,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
    index_topk=1024,
    n_routed_experts=384,
    moe_intermediate_size=3072,
    routed_scaling_factor=2.5,
)


def _with_dspark(config: DeepseekV4Config, markov_rank: int) -> DeepseekV4Config:
    layers = config.num_hidden_layers
    head = DsparkConfig(
        block_size=5,
        noise_token_id=128799,
        markov_rank=markov_rank,
        target_layer_ids=tuple(range(layers - 3, layers)),
    )
    return replace(
        config,
        num_nextn_predict_layers=0,
        draft_head="dspark",
        dspark=head,
        compress_ratios=(*config.layer_ratios, 0, 0, 0),
    )


PUBLISHED = {
    "flash": _FLASH,
    "pro": _PRO,
    "flash-0731": _with_dspark(_FLASH, 256),
    "pro-0813": _with_dspark(_PRO, 512),
}


def published(name: str) -> DeepseekV4Config:
    """The published configuration of that name. Raises CheckpointError."""
    return preset(PUBLISHED, name)
