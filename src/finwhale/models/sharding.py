"""How the ranks of a model divide its weights.

A rank holds some heads with their output groups, some rows of the LM head and of DSpark's Markov
head, and a part of every expert's intermediate size. It holds a copy of every other weight. An FP8
block, an FP4 block and a group of activations that are rounded together never span two ranks.

With `Rank.whole_attention`, a rank loads the weights of all heads, and also keeps a copy of those
of its own heads. With `Rank.data_parallel`, the ranks divide the experts only. A model's table of
weights says for each weight how it is divided.
"""

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from finwhale.config import RANK_COUNTS
from finwhale.distributed.rank import Rank
from finwhale.errors import FinwhaleError


class DividedSizes(Protocol):
    """The part of a configuration, a data class, that says how ranks can divide a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def o_groups(self) -> int: ...
    @property
    def o_lora_rank(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def quantised(self) -> bool: ...
    @property
    def weight_block_size(self) -> tuple[int, int]:
        """Rows and columns of a block of an FP8 weight. As many activations share a scale."""


ConfigT = TypeVar("ConfigT", bound=DividedSizes)


def rank_config(config: ConfigT, rank: Rank, *, round_activations: bool = False) -> ConfigT:
    """The sizes of a rank. vocab_size stays whole: only the LM head is divided.

    Args:
        round_activations: the model rounds activations in groups, quantised or not.

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
    whole: Any = config  # a data class, which a protocol cannot demand
    part: ConfigT = replace(
        whole,
        num_attention_heads=config.num_attention_heads // heads,
        o_groups=config.o_groups // heads,
        moe_intermediate_size=config.moe_intermediate_size // size,
    )
    return part


def _obstacle(config: DividedSizes, rank: Rank, round_activations: bool) -> str | None:
    """Why as many ranks as `rank` names cannot divide the model; None: they can."""
    size, data_parallel, group = rank.size, rank.data_parallel, config.weight_block_size[0]
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
        if width % (size * group):
            return (
                f"{name} is {width}, and {width // size} values a rank are not a multiple of "
                f"{group}, the size of an FP8 block and of a group of rounded activations"
            )
    return None
