"""Attention of one layer: window, C4 or C128, and the grouped output projection.

Legend: N tokens, D hidden, A heads, C head_dim, G output groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from finwhale.models.deepseek_v4.cache_spec import PagedCache
from finwhale.models.deepseek_v4.compressor import (
    C4Entries,
    C4Weights,
    C128Entries,
    C128Weights,
)
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.rope import Rotations
from finwhale.models.deepseek_v4.step import Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Names as in the checkpoint. wo_a [G, o_lora_rank, A*C/G]; norms and sink float32."""

    wq_a: LinearWeight
    q_norm: Tensor
    wq_b: LinearWeight
    wkv: LinearWeight
    kv_norm: Tensor
    wo_a: LinearWeight
    wo_b: LinearWeight
    attn_sink: Tensor
    compressor: C4Weights | C128Weights | None


class Attention(nn.Module):
    """x [N,D] -> [N,D]; writes the layer's window rows, entries and compressor state."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        weights: AttentionWeights,
        layer: int,
        round_activations: bool,
    ) -> None:
        super().__init__()
        self.rms_norm = ops.rms_norm
        self.linear = ops.linear
        self.grouped_linear = ops.grouped_linear
        self.prepare_query = ops.prepare_query
        self.store_window = ops.store_window
        self.sparse_attention = ops.sparse_attention
        self.inverse_rope = ops.inverse_rope
        self.weights = weights
        self.layer = layer
        self.round_kv = round_activations
        self.eps = config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.groups = config.o_groups
        self.scale = config.head_dim**-0.5
        self.entries: C4Entries | C128Entries | None = None
        if isinstance(weights.compressor, C4Weights):
            self.entries = C4Entries(config, ops, weights.compressor, layer, round_activations)
        elif isinstance(weights.compressor, C128Weights):
            self.entries = C128Entries(config, ops, weights.compressor, layer, round_activations)

    def forward(
        self,
        x_ND: Tensor,
        inputs: StepInputs,
        rotations: Rotations,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        w = self.weights
        rotation = rotations.plain if self.entries is None else rotations.compressed
        q_lora = self.rms_norm(self.linear(x_ND, w.wq_a), w.q_norm, self.eps)
        q_NAC = self.linear(q_lora, w.wq_b).view(-1, self.heads, self.head_dim)
        q_NAC = self.prepare_query(q_NAC, rotation, self.eps)
        window_rows = cache.rows("window", self.layer)
        self.store_window(
            self.linear(x_ND, w.wkv),
            w.kv_norm,
            rotation,
            self.eps,
            self.round_kv,
            window_rows,
            inputs.window_write_slots,
        )
        entry_rows, entry_slots = None, None
        if self.entries is not None:
            entry_rows, entry_slots = self.entries(x_ND, q_lora, inputs, rotations, cache)
        o_NAC = torch.empty_like(q_NAC)
        segments.eager(
            self.sparse_attention,
            q_NAC,
            window_rows,
            inputs.window_slots,
            entry_rows,
            entry_slots,
            w.attn_sink,
            self.scale,
            o_NAC,
        )
        o_NAC = self.inverse_rope(o_NAC, rotation)
        o_NGK = o_NAC.view(-1, self.groups, self.heads * self.head_dim // self.groups)
        out: Tensor = self.linear(self.grouped_linear(o_NGK, w.wo_a).flatten(1), w.wo_b)
        return out
