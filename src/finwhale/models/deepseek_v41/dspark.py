"""DSpark of DeepSeek-V4.1: three decoder layers that draft a block of tokens in one pass.

deepseek_v4/dspark.py has the method. Here the features are means of the residual streams at the
attention input of the target layers, the stages have their own number of experts, and the last
mixes collapse a block's residual streams.

Legend: N tokens, B sequences, G rows of a block, K drafts, D hidden, C head_dim, F target layers,
X tokens of the vocabulary that this rank computes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.dspark import BlockDrafts
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.layer import DecoderLayer
from finwhale.models.deepseek_v41.weight_classes import DsparkWeights
from finwhale.models.step_inputs import DraftStart, Segments, StepInputs
from finwhale.ops import Ops

RunLayers = Callable[[Sequence[DecoderLayer], StepInputs, PagedCache, Segments], Tensor]


class DsparkHead(BlockDrafts):
    """Writes the stages' rows of the model's tokens, and drafts after them.

    Args:
        layers: the stages.
        run_layers: computes the collapsed hidden states [N,D] of some layers.
        serve_layers: DeepseekV41.serve_layers.
        logits: this rank's logits [M,X] float32 of normalised hidden states.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        ops: Ops,
        weights: DsparkWeights,
        layers: Sequence[DecoderLayer],
        run_layers: RunLayers,
        serve_layers: Callable[[Sequence[DecoderLayer], int], None],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(config, ops, weights)
        self.config, self.weights, self.layers = config, weights, layers
        self.run_layers, self.serve_layers, self.logits = run_layers, serve_layers, logits

    def write_context(
        self, features_NX: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> None:
        """Write each stage's row of the model's tokens. features: [N, F*D]."""
        ops, w, eps = self.ops, self.weights, self.config.rms_norm_eps
        main = ops.rms_norm(ops.linear(features_NX, w.main_proj), w.main_norm, eps)
        kv = ops.linear(main, w.context_kv)
        for stage, own in zip(self.layers, kv.split(self.config.head_dim, 1), strict=True):
            stage.attn.store_window_row(own, inputs, rotary, cache)

    def run_block(self, start: DraftStart, cache: PagedCache, segments: Segments) -> Tensor:
        """Return the hidden states [B,G,D] of the tokens that each sequence may draft next."""
        hidden = self.run_layers(self.layers, self.block_inputs(start), cache, segments)
        return hidden.view(-1, self.sizes.num_rows, hidden.shape[1])

    def block_logits(self, rows: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        return self.logits(self.ops.rms_norm(rows.contiguous(), self.weights.norm, eps))

    def serve_others(self, num_drafts: int, lane_rows: int) -> None:
        self.serve_layers(self.layers, lane_rows * self.sizes.num_rows)

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """Logits of rows that `__call__` returned: there are none."""
        return streams_MHD.new_zeros(len(streams_MHD), self.config.vocab_size, dtype=torch.float32)

    def confidences(self, block: Tensor, newest_B: Tensor, ids_BK: Tensor) -> Tensor | None:
        """From hidden states that are not normalised."""
        w, width = self.weights, block.shape[2]
        if w.confidence is None:
            return None
        scores_BK = block.float() @ w.confidence[0, :width]
        if w.confidence.shape[1] > width:
            before_BK = torch.cat((newest_B[:, None], ids_BK[:, :-1]), 1)
            scores_BK = scores_BK + w.markov_embed[before_BK].float() @ w.confidence[0, width:]
        return torch.sigmoid(scores_BK).T
