"""Engram of one layer: rows of a table, addressed by the last tokens, added to residual streams.

Legend: N tokens, S the most tokens of an n-gram, H residual streams, D hidden.
"""

import torch
from torch import Tensor

from finwhale.checkpoint.formats import dequantise_fp8_rows
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.engram_hash import EngramHash
from finwhale.models.deepseek_v41.weight_classes import EngramWeights
from finwhale.ops import Ops
from finwhale.ops.deepseek_v41 import SharedEntryOps
from finwhale.weights.table import LookupTable


class Engram:
    """Adds to the residual streams before a layer."""

    def __init__(
        self,
        config: DeepseekV41Config,
        ops: Ops,
        shared: SharedEntryOps,
        weights: EngramWeights,
        hashes: EngramHash,
    ) -> None:
        self.config, self.ops, self.shared = config, ops, shared
        self.weights, self.hashes = weights, hashes

    def __call__(self, streams_NHD: Tensor, recalled_NS: Tensor) -> Tensor:
        """recalled_NS: the compressed ids of the last S tokens, the newest first."""
        w, dim = self.weights, streams_NHD.shape[2]
        rows = torch.from_numpy(self.hashes.rows(recalled_NS.cpu().numpy()))
        values = looked_up(w.embed, rows, streams_NHD)
        kv = self.ops.linear(values.flatten(1), w.wkv)
        key_NHD = kv[:, :-dim].unflatten(1, (-1, dim))
        return self.shared.engram_gate(
            streams_NHD, key_NHD, kv[:, -dim:], w.q_weight, w.k_weight, self.config.rms_norm_eps
        )


def looked_up(table: LookupTable, rows_NX: Tensor, like: Tensor) -> Tensor:
    """The values [N,X,K] of rows of a table, on the device and in the dtype of `like`."""
    flat = rows_NX.flatten()
    values = table.rows[flat].to(like.device)
    if table.scale is not None:
        scale = table.scale[flat].to(like.device).view(torch.float8_e8m0fnu)
        values = dequantise_fp8_rows(values, scale, like.dtype)
    found: Tensor = values.to(like.dtype).unflatten(0, rows_NX.shape)
    return found
