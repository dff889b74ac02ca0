"""Parts of the tables of weights that all models have: mHC, heads and experts.

Legend: D hidden_size, A heads of attention, C width of a head, Q q_lora_rank, O o_lora_rank,
G output groups, E routed experts, I their width, H residual streams, M (2 + H) * H mHC outputs: H
pre, H post, H * H residual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from finwhale.checkpoint.spec import Shard, Storage, WeightSpec
from finwhale.distributed.rank import Rank
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import MhcWeight
from finwhale.weights.table import Lines, WeightList

TOKEN_ROWS = Shard(0, "vocabulary")
HEAD_ROWS, HEAD_COLUMNS = Shard(0, "heads"), Shard(1, "heads")
EXPERT_ROWS, EXPERT_COLUMNS = Shard(0, "experts"), Shard(1, "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """The weights of a rank's heads and their output groups, or of all heads.

    Attributes:
        wq_b: [A*C, Q]; in layers with index queries followed by the indexer's wq_b [I*J, Q], for I
            index heads of J values.
        wo_a: [G, O, A*C/G].
        wo_b: [D, G*O].
        attn_sink: [A] float32.
    """

    wq_b: LinearWeight
    wo_a: LinearWeight
    wo_b: LinearWeight
    attn_sink: Tensor


class HeadLines(NamedTuple):
    """The lines of HeadWeights. index_queries: the indexer's wq_b; None: the layer has none."""

    wq_b: WeightSpec
    wo_a: WeightSpec
    wo_b: WeightSpec
    attn_sink: WeightSpec
    index_queries: WeightSpec | None

    @property
    def queries(self) -> Sequence[WeightSpec]:
        """The lines that are stacked in wq_b."""
        return [self.wq_b] if self.index_queries is None else [self.wq_b, self.index_queries]


def head_weights(
    make: WeightList, lines: Callable[[Rank], HeadLines], o_lora_rank: int
) -> tuple[HeadWeights, HeadWeights | None]:
    """This rank's heads, and all heads if the rank holds them too.

    Args:
        lines: the lines of a rank.
    """
    heads = _loaded_heads(make, lines(make.rank), o_lora_rank)
    if not make.rank.whole_attention:
        return heads, None
    local = lines(replace(make.rank, whole_attention=False))
    return _local_heads(make, heads, local, o_lora_rank), heads


def _loaded_heads(make: WeightList, lines: HeadLines, o_lora_rank: int) -> HeadWeights:
    """The heads that the rank loads."""
    return HeadWeights(
        wq_b=make.projection(*lines.queries),
        wo_a=make.grouped(lines.wo_a, o_lora_rank),
        wo_b=make.projection(lines.wo_b),
        attn_sink=make.tensor(lines.attn_sink),
    )


def _local_heads(
    make: WeightList, all_heads: HeadWeights, lines: HeadLines, o_lora_rank: int
) -> HeadWeights:
    """The rank's part of all heads: views where possible, otherwise copies."""
    assert lines.wq_b.slice and lines.wo_a.slice and lines.attn_sink.slice
    queries, sinks = lines.wq_b.slice, lines.attn_sink.slice
    groups = lines.wo_a.slice.over(o_lora_rank)
    return HeadWeights(
        wq_b=(
            all_heads.wq_b.rows(queries.start, queries.stop)
            if lines.index_queries is None
            else make.projection(*lines.queries)
        ),
        wo_a=all_heads.wo_a.rows(groups.start, groups.stop),
        wo_b=make.projection(lines.wo_b),
        attn_sink=all_heads.attn_sink[sinks.start : sinks.stop],
    )


def mhc_weight(
    make: WeightList, w: Lines, block: Literal["attn", "ffn"], D: int, H: int
) -> MhcWeight:
    M = (2 + H) * H
    return MhcWeight(
        norm=make.tensor(w(f"{block}_norm.weight", (D,), "bf16")),
        fn=make.tensor(w(f"hc_{block}_fn", (M, H * D), "f32")),
        base=make.tensor(w(f"hc_{block}_base", (M,), "f32")),
        scale=make.tensor(
            w(f"hc_{block}_scale", (3,), "f32"),
            shape=(M,),
            convert=partial(_scale_of_each_output, hc_mult=H),
        ),
    )


def _scale_of_each_output(scale: Tensor, *, hc_mult: int) -> Tensor:
    """The scales [3] of pre, post and residual outputs, repeated for each output: [M]."""
    counts = hc_mult, hc_mult, hc_mult**2
    return torch.cat([one.expand(count) for one, count in zip(scale, counts, strict=True)])


def logits_weight(make: WeightList, line: WeightSpec) -> LinearWeight:
    """A matrix whose results are logits."""
    return make.matrix(line, dtype=make.dtype, out_dtype=torch.float32 if make.packed else None)


def expert_lines(
    w: Lines, hidden_size: int, width: int, storage: Storage
) -> tuple[WeightSpec, ...]:
    """The matrices of an expert of this width."""
    return (
        w("w1.weight", (width, hidden_size), storage, EXPERT_ROWS),
        w("w3.weight", (width, hidden_size), storage, EXPERT_ROWS),
        w("w2.weight", (hidden_size, width), storage, EXPERT_COLUMNS),
    )


# A model has tens of thousands of experts, and a start lists them several times.
@lru_cache(maxsize=128)
def of_each_expert(lines: tuple[WeightSpec, ...], num_experts: int) -> tuple[WeightSpec, ...]:
    """The lines for every expert, with its number in place of `{expert}`."""
    others = [(line.name.split("{expert}"), line[1:]) for line in lines]
    return tuple(
        WeightSpec(f"{before}{expert}{after}", *other)
        for expert in range(num_experts)
        for (before, after), other in others
    )
