"""Engram of one layer: rows of a table, addressed by the last tokens, added to residual streams.

Legend: N tokens, S the most tokens of an n-gram, X values of all its rows, H residual streams, D
hidden.
"""

import torch
from torch import Tensor

from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.engram_hash import within
from finwhale.models.deepseek_v41.weight_classes import EngramWeights
from finwhale.ops import Ops
from finwhale.ops.deepseek_v41 import HashTensors, SharedEntryOps


class Engram:
    """Adds to the residual streams before a layer."""

    def __init__(
        self,
        config: DeepseekV41Config,
        ops: Ops,
        shared: SharedEntryOps,
        weights: EngramWeights,
        hashes: HashTensors,
    ) -> None:
        self.config, self.ops, self.shared, self.weights = config, ops, shared, weights
        device = weights.q_weight.device
        hashes = within(hashes, len(weights.embed.rows))
        tensors = hashes.multipliers, hashes.sizes, hashes.starts
        self.hashes = HashTensors(*(tensor.to(device) for tensor in tensors))

    def look_up(self, recalled_NS: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows [N,X] that the compressed ids of the last S tokens address, the newest first."""
        rows, scale = self.weights.embed.rows, self.weights.embed.scale
        return self.shared.look_up(recalled_NS, self.hashes, rows, scale, dtype).flatten(1)

    def __call__(self, streams_NHD: Tensor, rows_NX: Tensor) -> Tensor:
        """rows_NX: those of `look_up`."""
        w, dim = self.weights, streams_NHD.shape[2]
        kv = self.ops.linear(rows_NX, w.wkv)
        key_NHD = kv[:, :-dim].unflatten(1, (-1, dim))
        return self.shared.engram_gate(
            streams_NHD, key_NHD, kv[:, -dim:], w.q_weight, w.k_weight, self.config.rms_norm_eps
        )
