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
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.layer import DecoderLayer
from finwhale.models.deepseek_v41.weight_classes import DsparkWeights
from finwhale.models.protocol import Drafts
from finwhale.models.step_inputs import ChooseDraft, DraftStart, Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.drafts import BlockShape

RunLayers = Callable[[Sequence[DecoderLayer], StepInputs, PagedCache, Segments], Tensor]


class DsparkHead:
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
        assert config.dspark is not None
        self.config, self.ops, self.weights, self.layers = config, ops, weights, layers
        self.sizes, self.run_layers, self.logits = config.dspark, run_layers, logits
        self.serve_layers = serve_layers
        self._shape = BlockShape(
            num_tokens=self.sizes.num_rows,
            noise_id=self.sizes.noise_token_id,
            window=config.sliding_window,
        )

    def write_context(
        self, features_NX: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> None:
        """Write each stage's row of the model's tokens. features: [N, F*D]."""
        ops, w, eps = self.ops, self.weights, self.config.rms_norm_eps
        main = ops.rms_norm(ops.linear(features_NX, w.main_proj), w.main_norm, eps)
        kv = ops.linear(main, w.context_kv)
        for stage, own in zip(self.layers, kv.split(self.config.head_dim, 1), strict=True):
            stage.attn.store_window_row(own, inputs, rotary, cache)

    def __call__(
        self,
        inputs: StepInputs,
        streams_NHD: Tensor,
        next_token_ids: Tensor,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        """Returns rows without values, [N,0,D]: the model's forward has written the context."""
        return streams_NHD[:, :0]

    def draft(
        self,
        start: DraftStart,
        num_drafts: int,
        cache: PagedCache,
        segments: Segments,
        choose: ChooseDraft,
    ) -> Drafts:
        """Draft after each sequence's newest token. The pass has G rows for any `num_drafts`."""
        assert num_drafts <= self.sizes.block_size
        w, rows = self.weights, self.sizes.num_rows
        block = self.ops.make_blocks(
            start.newest_ids, start.tokens, start.tables["window"], self._shape
        )
        inputs = StepInputs(
            token_ids=block.ids,
            tokens=block.tokens,
            tables=start.tables,
            extra_kv_slots=block.extra_kv_slots,
            lane_rows=start.lane_rows * rows,
        )
        hidden = self.run_layers(self.layers, inputs, cache, segments).unflatten(0, (-1, rows))
        first = rows - self.sizes.block_size
        hidden_BKD = hidden[:, first : first + num_drafts]
        normed = self.ops.rms_norm(
            hidden_BKD.flatten(0, 1).contiguous(), w.norm, self.config.rms_norm_eps
        )
        logits = self.logits(normed).unflatten(0, hidden_BKD.shape[:2])
        ids: list[Tensor] = []
        for k in range(num_drafts):
            before = w.markov_embed.index_select(0, ids[-1] if ids else start.newest_ids)
            markov = self.ops.linear(before, w.markov_head).float()
            ids.append(choose(logits[:, k] + markov, k))
        ids_BK = torch.stack(ids, 1)
        return Drafts(ids=ids_BK.T, confidences=self._confidences(hidden_BKD, start, ids_BK))

    def serve_others_tokens(self, lane_rows: int) -> None:
        pass  # `__call__` runs no layer

    def serve_others(self, num_drafts: int, lane_rows: int) -> None:
        self.serve_layers(self.layers, lane_rows * self.sizes.num_rows)

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """Logits of rows that `__call__` returned: there are none."""
        return streams_MHD.new_zeros(len(streams_MHD), self.config.vocab_size, dtype=torch.float32)

    def _confidences(self, hidden_BKD: Tensor, start: DraftStart, ids_BK: Tensor) -> Tensor | None:
        """[K,B] float32: from hidden states that are not normalised; None: there is no head."""
        w, width = self.weights, hidden_BKD.shape[2]
        if w.confidence is None:
            return None
        scores_BK = hidden_BKD.float() @ w.confidence[0, :width]
        if w.confidence.shape[1] > width:
            before_BK = torch.cat((start.newest_ids[:, None], ids_BK[:, :-1]), 1)
            scores_BK = scores_BK + w.markov_embed[before_BK].float() @ w.confidence[0, width:]
        return torch.sigmoid(scores_BK).T
