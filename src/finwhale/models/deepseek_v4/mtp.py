"""Multi-token prediction, a DraftHead: one more decoder layer, which drafts one token at a time.

Legend: N tokens, M rows whose logits are wanted, H residual streams, D hidden, V vocabulary, X
tokens of it whose rows of the LM head this rank holds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.deepseek_v4.layer import DraftLayers, LayerWeights, SharedParts
from finwhale.models.protocol import Drafts
from finwhale.models.step_inputs import ChooseDraft, DraftStart, Segments, StepInputs
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import HcHeadWeight
from finwhale.ops.paging import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpWeights:
    """The MTP layer's own weights; it shares embedding and LM head. Norms: [D] float32."""

    enorm: Tensor
    hnorm: Tensor
    e_proj: LinearWeight
    h_proj: LinearWeight
    layer: LayerWeights
    hc_head: HcHeadWeight


class MtpLayer(DraftLayers):
    """Predicts the token after the next with one more layer, an ordinary decoder layer.

    It shares the model's embedding, LM head, rotary tables and CUDA side streams.
    """

    def __init__(self, context: LayerContext, weights: MtpWeights, shared: SharedParts) -> None:
        super().__init__(context, [weights.layer], weights.hc_head, shared)
        self.weights, self.rms_norm = weights, context.ops.rms_norm
        self.eps = context.config.rms_norm_eps

    def __call__(
        self,
        inputs: StepInputs,
        streams_NHD: Tensor,
        next_token_ids: Tensor,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        """Compute the residual streams that predict the token after next_token_ids.

        In a further draft step, `streams_NHD` come from this layer instead of the model.

        Each stream is h = h_proj(hnorm(stream)) + e_proj(enorm(embedding of the next token)).
        """
        w = self.weights
        embedded = self.rms_norm(self.embed.index_select(0, next_token_ids), w.enorm, self.eps)
        normed = self.rms_norm(streams_NHD, w.hnorm, self.eps)
        from_streams = self.linear(normed.flatten(0, 1), w.h_proj).view_as(streams_NHD)
        streams = from_streams + self.linear(embedded, w.e_proj)[:, None]
        return self.run_layers(self.layers, self.ranks.own_rows(streams), inputs, cache, segments)

    def draft(
        self,
        start: DraftStart,
        num_drafts: int,
        cache: PagedCache,
        segments: Segments,
        choose: ChooseDraft,
    ) -> Drafts:
        """Draft tokens after each sequence's newest token.

        The inputs for each further draft are the previous draft and this layer's residual streams.
        """
        streams, tokens, positions = start.hidden, start.tokens, start.tokens.positions
        drafts = [choose(self.compute_logits(streams), 0)]
        for step in range(1, num_drafts):
            read = Tokens(
                positions=torch.where(positions < 0, positions, positions + step),
                sequence=tokens.sequence,
                query_start=tokens.query_start,
                max_len=tokens.max_len,
                max_query=1,
            )
            inputs = StepInputs(
                token_ids=drafts[-1], tokens=read, tables=start.tables, lane_rows=start.lane_rows
            )
            streams = self(inputs, streams, drafts[-1], cache, segments)
            drafts.append(choose(self.compute_logits(streams), step))
        return Drafts(ids=torch.stack(drafts))

    def serve_others_tokens(self, lane_rows: int) -> None:
        self.serve_layers(lane_rows)

    def serve_others(self, num_drafts: int, lane_rows: int) -> None:
        for _ in range(1, num_drafts):
            self.serve_layers(lane_rows)
