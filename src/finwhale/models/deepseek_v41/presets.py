"""The published configurations."""

from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.engram_config import EngramConfig
from finwhale.models.dspark_config import DsparkConfig
from finwhale.models.rope_config import YarnScaling

_FLASH = DeepseekV41Config(
    vocab_size=129280,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    sliding_window=128,
    compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    n_routed_experts=384,
    num_experts_per_tok=6,
    moe_intermediate_size=2304,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=YarnScaling(factor=16.0, original_max_position_embeddings=65536),
    max_position_embeddings=1048576,
    engram=EngramConfig(
        layer_ids=(1, 14),
        num_embeddings=(384006168, 384016682),
        max_ngram_size=4,
        vocab_size=16000000,
        n_heads=8,
        head_dim=256,
        pad_token_id=2,
        compressed_vocab_size=99092,
    ),
    dspark=DsparkConfig(
        block_size=5,
        noise_token_id=128799,
        markov_rank=256,
        target_layer_ids=(37, 38, 39),
        n_routed_experts=128,
        num_experts_per_tok=3,
    ),
)

PUBLISHED = {"v4.1-flash": _FLASH}
