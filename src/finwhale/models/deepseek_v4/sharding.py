"""How the ranks of a model divide its weights: tensor parallelism.

A rank holds some heads with their output groups, some rows of the LM head and of DSpark's Markov
head, and a part of every expert's intermediate size. It holds a copy of every other weight. An FP8
block, an FP4 block and a group of 128 activations that are rounded together never span two ranks.

With `Rank.whole_attention`, a rank loads the weights of all heads, and also keeps a copy of those
of its own heads (weight_builder.py).
"""

import re
from dataclasses import replace

from finwhale.checkpoint.formats import FP8_BLOCK
from finwhale.checkpoint.spec import Slice
from finwhale.config import RANK_COUNTS
from finwhale.distributed.rank import Rank
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v4.config import DeepseekV4Config

# Number of values that share a scale when activations are rounded.
GROUP = FP8_BLOCK

# A search is fast if every match starts with the same character.
_ROWS = re.compile(
    r"\.((markov_head\.markov_w2|attn\.wq_b|attn\.wo_a"
    r"|(experts\.\d+|shared_experts)\.w[13])\.weight|attn\.attn_sink)$"
)
_COLUMNS = re.compile(r"\.(attn\.wo_b|(experts\.\d+|shared_experts)\.w2)\.weight$")
_HEADS = re.compile(r"\.attn\.((wq_b|wo_a|wo_b)\.weight|attn_sink)$")


def sharded_axis(name: str) -> int | None:
    """The axis along which the ranks divide a weight; None: every rank holds the whole weight."""
    if name == "head.weight" or _ROWS.search(name):
        return 0
    return 1 if _COLUMNS.search(name) else None


def is_of_heads(name: str) -> bool:
    """Whether a weight belongs to attention's heads or their output groups."""
    return _HEADS.search(name) is not None


def loaded_slice(name: str, shape: tuple[int, ...], rank: Rank) -> Slice | None:
    """The slice of a weight that a rank loads; None: the whole weight."""
    if rank.whole_attention and is_of_heads(name):
        return None
    return rank_slice(name, shape, rank)


def rank_slice(name: str, shape: tuple[int, ...], rank: Rank) -> Slice | None:
    """A rank's slice of a weight of the whole model; None: the whole weight."""
    axis = sharded_axis(name)
    if axis is None or rank.size == 1:
        return None
    length, rest = divmod(shape[axis], rank.size)
    assert not rest, (name, shape, rank)
    return Slice(axis, rank.index * length, (rank.index + 1) * length)


def rank_config(
    config: DeepseekV4Config, size: int, *, round_activations: bool = False
) -> DeepseekV4Config:
    """The sizes of one of `size` ranks. vocab_size stays whole: only the LM head is divided.

    Args:
        round_activations: the model rounds activations in groups of 128, quantised or not.

    Raises:
        FinwhaleError: the ranks cannot divide the model.
    """
    if size == 1:
        return config
    obstacle = _obstacle(config, size, round_activations)
    if obstacle is not None:
        fits = [n for n in RANK_COUNTS if _obstacle(config, n, round_activations) is None]
        raise FinwhaleError(
            f"{size} ranks cannot divide this model: {obstacle}. Set tensor_parallel_size to "
            f"{' or '.join(map(str, fits))}"
        )
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        o_groups=config.o_groups // size,
        moe_intermediate_size=config.moe_intermediate_size // size,
    )


def _obstacle(config: DeepseekV4Config, size: int, round_activations: bool) -> str | None:
    """Why `size` ranks cannot divide the model; None: they can."""
    if size < 1:
        return f"the number of ranks must be at least 1, got {size}"
    if size == 1:
        return None
    for name in ("vocab_size", "num_attention_heads", "o_groups", "moe_intermediate_size"):
        if getattr(config, name) % size:
            return f"{name} {getattr(config, name)} is not a multiple of {size}"
    # Rounding groups divide these widths, and so do FP8 and FP4 blocks.
    widths: dict[str, int] = {}
    if config.quantised or round_activations:
        widths["moe_intermediate_size"] = config.moe_intermediate_size
        widths["o_groups * o_lora_rank"] = config.o_groups * config.o_lora_rank
    if config.quantised:
        widths["num_attention_heads * head_dim"] = config.num_attention_heads * config.head_dim
    for name, width in widths.items():
        if width % (size * GROUP):
            return (
                f"{name} is {width}, and {width // size} values a rank are not a multiple of "
                f"{GROUP}, the size of an FP8 block and of a group of rounded activations"
            )
    return None
