"""How the ranks of a model divide its weights.

A rank holds some heads with their output groups, some rows of the LM head and of DSpark's Markov
head, and a part of every expert's intermediate size. It holds a copy of every other weight. An FP8
block, an FP4 block and a group of 128 activations that are rounded together never span two ranks.

With `Rank.whole_attention`, a rank loads the weights of all heads, and also keeps a copy of those
of its own heads. With `Rank.data_parallel`, the ranks divide the experts only. The table
(weights.py) says for each weight how it is divided.
"""

from dataclasses import replace

from finwhale.config import RANK_COUNTS
from finwhale.distributed.rank import Rank
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v4.config import DeepseekV4Config

# Number of values that share a scale when activations are rounded, and rows and columns of a block
# of an FP8 weight.
GROUP = 128


def rank_config(
    config: DeepseekV4Config, rank: Rank, *, round_activations: bool = False
) -> DeepseekV4Config:
    """The sizes of a rank. vocab_size stays whole: only the LM head is divided.

    Args:
        round_activations: the model rounds activations in groups of 128, quantised or not.

    Raises:
        FinwhaleError: the ranks cannot divide the model.
    """
    size = rank.size
    if size == 1:
        return config
    obstacle = _obstacle(config, rank, round_activations)
    if obstacle is not None:
        others = [replace(rank, size=count) for count in RANK_COUNTS]
        fits = [r.size for r in others if _obstacle(config, r, round_activations) is None]
        option = "data_parallel_size" if rank.data_parallel else "tensor_parallel_size"
        raise FinwhaleError(
            f"{size} ranks cannot divide this model: {obstacle}. Set {option} to "
            f"{' or '.join(map(str, fits))}"
        )
    heads = 1 if rank.data_parallel else size
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // heads,
        o_groups=config.o_groups // heads,
        moe_intermediate_size=config.moe_intermediate_size // size,
    )


def _obstacle(config: DeepseekV4Config, rank: Rank, round_activations: bool) -> str | None:
    """Why as many ranks as `rank` names cannot divide the model; None: they can."""
    size, data_parallel = rank.size, rank.data_parallel
    if size < 1:
        return f"the number of ranks must be at least 1, got {size}"
    if size == 1:
        return None
    divided = ("vocab_size", "num_attention_heads", "o_groups", "moe_intermediate_size")
    for name in divided[-1:] if data_parallel else divided:
        if getattr(config, name) % size:
            return f"{name} {getattr(config, name)} is not a multiple of {size}"
    # Rounding groups divide these widths, and so do FP8 and FP4 blocks.
    widths: dict[str, int] = {}
    if config.quantised or round_activations:
        widths["moe_intermediate_size"] = config.moe_intermediate_size
    if not data_parallel and (config.quantised or round_activations):
        widths["o_groups * o_lora_rank"] = config.o_groups * config.o_lora_rank
    if not data_parallel and config.quantised:
        widths["num_attention_heads * head_dim"] = config.num_attention_heads * config.head_dim
    for name, width in widths.items():
        if width % (size * GROUP):
            return (
                f"{name} is {width}, and {width // size} values a rank are not a multiple of "
                f"{GROUP}, the size of an FP8 block and of a group of rounded activations"
            )
    return None
