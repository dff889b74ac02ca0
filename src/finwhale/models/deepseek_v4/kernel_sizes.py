"""Sizes with which the model's kernels are compiled or loaded before the first step."""

from finwhale.models.deepseek_config import DeepseekConfig
from finwhale.ops.launch.sizes import ModelSizes

# cuBLAS has one kernel for 8k + 1 to 8k + 8 rows, and others for some multiples of 8 alone, such as
# 2,752 (seen on H200s).
GEMM_ROWS = 8


def launch_sizes(config: DeepseekConfig) -> ModelSizes:
    """The sizes that launch signatures depend on. config: the sizes of a rank's part."""
    values = config.num_attention_heads * config.head_dim
    width, inner = config.hidden_size, config.moe_intermediate_size
    linears = {
        (1, 1, width),
        (1, 1, config.q_lora_rank),
        (1, 1, inner * config.n_shared_experts),
        (1, config.o_groups, values // config.o_groups),
        (1, 1, config.o_groups * config.o_lora_rank),
        (config.hc_mult, 1, width),  # the MTP layer's projection of each residual stream
    }
    if config.dspark is not None:
        linears |= {
            (1, 1, len(config.dspark.target_layer_ids) * width),
            (1, 1, config.dspark.markov_rank),
        }
    return ModelSizes(
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        window=config.sliding_window,
        index_topk=config.index_topk,
        complete_ratios=tuple({ratio for ratio in config.layer_ratios if ratio > 4}),
        num_experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        linears=frozenset(linears),
    )


def library_gemm_rows(most: int) -> list[int]:
    """Numbers of rows up to `most` with which cuBLAS chooses all of its kernels."""
    return [rows for rows in range(1, most + 1) if rows % GEMM_ROWS in (0, 1)]
