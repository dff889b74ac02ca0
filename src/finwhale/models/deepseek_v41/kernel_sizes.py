"""Sizes with which the model's kernels are compiled or loaded before the first step."""

from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.sharding import rank_config
from finwhale.ops.launch.sizes import ModelSizes


def launch_sizes(config: DeepseekV41Config, rank: Rank) -> ModelSizes:
    """The sizes that a rank's launch signatures depend on. config: of the whole model."""
    c = rank_config(config, rank)
    widths = {c.hidden_size, c.q_lora_rank, c.head_dim, c.moe_intermediate_size}
    widths.add(c.o_groups * c.o_lora_rank)
    if c.engram is not None:
        widths.add(c.engram.num_rows * c.engram.head_dim)
    if c.dspark is not None:
        widths |= {len(c.dspark.target_layer_ids) * c.hidden_size, c.dspark.markov_rank}
    values = c.num_attention_heads * c.head_dim
    grouped = (1, c.o_groups, values // c.o_groups)
    top, experts = c.stage_experts
    return ModelSizes(
        vocab_size=c.vocab_size,
        num_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        window=c.sliding_window,
        index_topk=c.index_topk,
        complete_ratios=(),
        num_experts=c.n_routed_experts,
        experts_per_token=c.num_experts_per_tok,
        linears=frozenset({grouped, *((1, 1, width) for width in widths)}),
        num_ranks=1 if rank.data_parallel else rank.size,
        num_lanes=rank.size if rank.data_parallel else 1,
        draft_experts=(experts, top),
    )
