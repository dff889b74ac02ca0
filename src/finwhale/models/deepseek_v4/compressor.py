"""Compressed entries of one layer: C4 with its lightning indexer, and C128.

Legend: N tokens, D hidden, C head_dim, I index heads, J index_head_dim.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from finwhale.models.deepseek_v4.cache_spec import PagedCache
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.rope import Rotations
from finwhale.models.deepseek_v4.step import StepInputs
from finwhale.ops import Ops
from finwhale.ops.compressor import CompressorWeight
from finwhale.ops.linear import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class C128Weights:
    """wkv_wgate: [2C, D] float32, the checkpoint's wkv above its wgate."""

    wkv_wgate: LinearWeight
    mix: CompressorWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class C4Weights:
    """wkv_wgate [4C, D] and index_wkv_wgate [4J, D] float32: kv above gate, [Ca | Cb] each.

    index_wq_b [I*J, q_lora_rank]; index_weights_proj [I, D] float32.
    """

    wkv_wgate: LinearWeight
    mix: CompressorWeight
    index_wkv_wgate: LinearWeight
    index_mix: CompressorWeight
    index_wq_b: LinearWeight
    index_weights_proj: LinearWeight


class C128Entries(nn.Module):
    """Every complete entry of 128 tokens is visible: returns (pool, slots)."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        weights: C128Weights,
        layer: int,
        round_activations: bool,
    ) -> None:
        super().__init__()
        self.linear = ops.linear
        self.compress = ops.compress
        self.weights = weights
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.round_entries = round_activations

    def forward(
        self,
        x_ND: Tensor,
        q_lora: Tensor,
        inputs: StepInputs,
        rotations: Rotations,
        cache: PagedCache,
    ) -> tuple[Tensor | None, Tensor | None]:
        assert inputs.c128 is not None and inputs.c128_slots is not None
        rows = cache.rows("c128", self.layer)
        self.compress(
            self.linear(x_ND, self.weights.wkv_wgate),
            self.weights.mix,
            inputs.c128,
            rotations.c128_entries,
            self.eps,
            "nope" if self.round_entries else "none",
            cache.rows("c128_state", self.layer),
            rows,
        )
        if inputs.c128_slots.shape[1] == 0:
            return None, None
        return rows, inputs.c128_slots


class C4Entries(nn.Module):
    """The index_topk entries of 4 tokens that the indexer selects: returns (pool, slots)."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        weights: C4Weights,
        layer: int,
        round_activations: bool,
    ) -> None:
        super().__init__()
        self.linear = ops.linear
        self.compress = ops.compress
        self.prepare_index_query = ops.prepare_index_query
        self.select_entries = ops.select_entries
        self.weights = weights
        self.layer = layer
        self.eps = config.rms_norm_eps
        self.round_entries = round_activations
        self.heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.topk = config.index_topk
        self.score_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5

    def forward(
        self,
        x_ND: Tensor,
        q_lora: Tensor,
        inputs: StepInputs,
        rotations: Rotations,
        cache: PagedCache,
    ) -> tuple[Tensor | None, Tensor | None]:
        assert inputs.c4 is not None and inputs.index is not None
        w = self.weights
        rows, keys = cache.rows("c4", self.layer), cache.rows("index_keys", self.layer)
        self.compress(
            self.linear(x_ND, w.wkv_wgate),
            w.mix,
            inputs.c4,
            rotations.c4_entries,
            self.eps,
            "nope" if self.round_entries else "none",
            cache.rows("c4_state", self.layer),
            rows,
        )
        self.compress(
            self.linear(x_ND, w.index_wkv_wgate),
            w.index_mix,
            inputs.c4,
            rotations.c4_entries,
            self.eps,
            "whole" if self.round_entries else "none",
            cache.rows("index_state", self.layer),
            keys,
        )
        if max(inputs.index.max_entries) == 0:
            return None, None
        q_NIJ = self.linear(q_lora, w.index_wq_b).view(-1, self.heads, self.head_dim)
        q_NIJ = self.prepare_index_query(q_NIJ, rotations.compressed, self.round_entries)
        weights_NI = self.linear(x_ND, w.index_weights_proj) * self.score_scale
        return rows, self.select_entries(q_NIJ, weights_NI, keys, inputs.index, self.topk)
