"""Parts of the tables of weights that all models have: mHC, heads, experts and draft heads.

Legend: D hidden_size, A num_attention_heads, C width of a head, Q q_lora_rank, O o_lora_rank,
G output groups, E routed experts, I their width, H residual streams, M (2 + H) * H mHC outputs: H
pre, H post, H * H residual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from finwhale.checkpoint.spec import Shard, Storage, WeightSpec
from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_config import DeepseekConfig
from finwhale.models.dspark_config import DsparkConfig
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import MhcWeight
from finwhale.ops.moe import ExpertWeight
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DsparkParts:
    """Weights that every DSpark head has; it shares embedding and LM head. Norms: float32.

    Attributes:
        main_proj: [D, F*D], for F target layers.
        context_kv: [S*C, D]: the wkv of the S stages, which all read the same input.
        markov_embed: [V,r], for V tokens and the Markov rank r.
        markov_head: [X,r]: this rank's rows.
        confidence: [1, D+r] or [1, D] float32; None: the head has no confidences.
    """

    main_proj: LinearWeight
    main_norm: Tensor
    context_kv: LinearWeight
    markov_embed: Tensor
    markov_head: LinearWeight
    confidence: Tensor | None


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


def _expert_lines(
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
def _of_each_expert(lines: tuple[WeightSpec, ...], num_experts: int) -> tuple[WeightSpec, ...]:
    """The lines for every expert, with its number in place of `{expert}`."""
    others = [(line.name.split("{expert}"), line[1:]) for line in lines]
    return tuple(
        WeightSpec(f"{before}{expert}{after}", *other)
        for expert in range(num_experts)
        for (before, after), other in others
    )


class WeightTable:
    """The table for a configuration of the whole model. `make` lists or allocates a rank's part."""

    config: DeepseekConfig
    fp8: Storage = "fp8_block"
    input_group = 128

    def __init__(self, config: DeepseekConfig, make: WeightList) -> None:
        self.config, self.make = config, make
        make.input_group = self.input_group
        if not config.quantised:
            self.fp8 = "bf16"
        # Matrices that the checkpoint stores in bf16, and that have float32 results.
        self.precise = make.dtype if make.packed else torch.float32

    def _lines(self, prefix: str, part: str, rank: Rank | None = None) -> Lines:
        if prefix.startswith("mtp."):
            part = f"draft head: {part}"
        return Lines(prefix, part, rank or self.make.rank)

    def _wkv(self, attn: str) -> WeightSpec:
        w = self._lines(attn, "attention")
        return w("wkv.weight", (self.config.head_dim, self.config.hidden_size), self.fp8)

    def _head_lines(self, attn: str, selects: bool, rank: Rank) -> HeadLines:
        """selects: the layer has an indexer."""
        c, w = self.config, self._lines(attn, "attention", rank)
        indexer = self._lines(f"{attn}indexer.", "indexer")
        A, C, Q = c.num_attention_heads, c.head_dim, c.q_lora_rank
        G, O = c.o_groups, c.o_lora_rank  # noqa: E741
        index_rows = c.index_n_heads * c.index_head_dim
        return HeadLines(
            wq_b=w("wq_b.weight", (A * C, Q), self.fp8, HEAD_ROWS),
            wo_a=w("wo_a.weight", (G * O, A * C // G), self.fp8, HEAD_ROWS),
            wo_b=w("wo_b.weight", (c.hidden_size, G * O), self.fp8, HEAD_COLUMNS),
            attn_sink=w("attn_sink", (A,), "f32", HEAD_ROWS),
            index_queries=indexer("wq_b.weight", (index_rows, Q), self.fp8) if selects else None,
        )

    def _attention_parts(
        self, attn: str, selects: bool
    ) -> tuple[dict[str, Any], HeadWeights | None]:
        """What every layer's attention has, and all heads if the rank holds them too."""
        c, make, w = self.config, self.make, self._lines(attn, "attention")
        wq_a = w("wq_a.weight", (c.q_lora_rank, c.hidden_size), self.fp8)
        wq_a_wkv = make.projection(wq_a, self._wkv(attn))
        lines = partial(self._head_lines, attn, selects)
        heads, all_heads = head_weights(make, lines, c.o_lora_rank)
        parts = {
            "q_norm": make.tensor(w("q_norm.weight", (c.q_lora_rank,), "bf16")),
            "kv_norm": make.tensor(w("kv_norm.weight", (c.head_dim,), "bf16")),
            "wq_a_wkv": wq_a_wkv,
            "heads": heads,
        }
        return parts, all_heads

    def _experts(self, ffn: str, num_experts: int, fp4: Storage) -> dict[str, ExpertWeight]:
        """The shared expert, and the routed ones."""
        make, sizes = self.make, (self.config.hidden_size, self.config.moe_intermediate_size)
        shared = self._lines(f"{ffn}shared_experts.", "shared expert")
        routed = self._lines(f"{ffn}experts.{{expert}}.", "routed experts")
        lines = _of_each_expert(_expert_lines(routed, *sizes, fp4), num_experts)
        return {
            "shared_experts": make.experts(_expert_lines(shared, *sizes, self.fp8)),
            "experts": make.experts(lines, num_experts),
        }

    def _confidence(self, head: DsparkConfig, w: Lines) -> Tensor | None:
        """The weight of DSpark's confidences. w: the lines of the last stage."""
        if not head.enable_confidence_head:
            return None
        shape = 1, self.config.hidden_size + head.confidence_width
        return self.make.tensor(w("confidence_head.proj.weight", shape, "bf16"))

    def _dspark_input(self, head: DsparkConfig, w: Lines) -> dict[str, Any]:
        """What makes the context's rows. w: the lines of the first stage."""
        make, D = self.make, self.config.hidden_size
        shape = D, len(head.target_layer_ids) * D
        return {
            "main_proj": make.projection(w("main_proj.weight", shape, self.fp8)),
            "main_norm": make.tensor(w("main_norm.weight", (D,), "bf16")),
        }

    def _context_kv(self, stages: Sequence[str]) -> LinearWeight:
        """A stage multiplies the rows of a block by its wkv, and the rows of the context by a copy
        that is stacked with the other stages' wkv.
        """
        return self.make.projection(*(self._wkv(f"{stage}attn.") for stage in stages))

    def _markov(
        self, head: DsparkConfig, w: Lines, embed_name: str, head_name: str
    ) -> dict[str, Any]:
        """The Markov head, whose weights have these names."""
        make, shape = self.make, (self.config.vocab_size, head.markov_rank)
        return {
            "markov_embed": make.tensor(w(f"{embed_name}.weight", shape, "bf16"), make.dtype),
            "markov_head": logits_weight(make, w(f"{head_name}.weight", shape, "bf16", TOKEN_ROWS)),
        }
