"""The whole DeepSeek-V4 model: start here.

embedding -> H equal residual streams -> decoder layers, each with its mHC post step pending ->
post step -> residual streams. `compute_logits` collapses the residual streams (hc_head), normalises
and projects them.

Legend: N tokens, R rows of this rank, M rows whose logits are wanted, H residual streams, D hidden,
V vocabulary, X tokens of it whose rows of the LM head this rank holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.base import DeepseekModel
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.deepseek_v4.dspark import DsparkContext, DsparkHead, DsparkWeights, Features
from finwhale.models.deepseek_v4.kernel_sizes import launch_sizes, library_gemm_rows
from finwhale.models.deepseek_v4.layer import (
    DecoderLayer,
    LayerWeights,
    SharedParts,
    mhc_params,
    post_step,
    serve_others,
)
from finwhale.models.deepseek_v4.mtp import MtpLayer, MtpWeights
from finwhale.models.protocol import DividedSteps
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import HcHeadWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """One rank's weights. embed [V,D]; head [V,D], or the rank's rows of it; hc_head contains the
    final norm.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    hc_head: HcHeadWeight
    head: LinearWeight
    mtp: MtpWeights | None
    dspark: DsparkWeights | None


# The side streams of the draft head's features and context.
FEATURE_STREAM, CONTEXT_STREAM = 0, 2


class DeepseekV4(DeepseekModel):
    """One rank of the model. options: those of DeepseekModel."""

    config: DeepseekV4Config
    part: DeepseekV4Config
    weights: ModelWeights

    def __init__(
        self,
        config: DeepseekV4Config,
        ops: Ops,
        weights: ModelWeights,
        *,
        round_activations: bool,
        **options: Any,
    ) -> None:
        super().__init__(config, ops, weights, round_activations=round_activations, **options)
        self.linear = ops.linear
        self.hc_head = ops.hc_head
        self.params = mhc_params(config)
        context = LayerContext(
            config=self.part,
            ops=ops,
            round_activations=round_activations,
            side_streams=self.side_streams,
            ranks=self.ranks,
        )
        self.layers: Sequence[DecoderLayer] = [
            DecoderLayer(context, layer, i) for i, layer in enumerate(weights.layers)
        ]
        self.draft_head: MtpLayer | DsparkHead | None = None
        self.draft_context: DsparkContext | None = None
        shared = SharedParts(
            first_layer=config.num_hidden_layers,
            embed=weights.embed,
            head=weights.head,
            run_layers=self.run_layers,
        )
        if weights.mtp is not None:
            self.draft_head = MtpLayer(context, weights.mtp, shared)
        elif weights.dspark is not None:
            self.draft_head = DsparkHead(context, weights.dspark, shared)
            self.draft_context = DsparkContext(context, weights.dspark, self.tables)

    @property
    def divided_steps(self) -> DividedSteps | None:
        if self.weights.layers[0].attn.all_heads is None:
            return None
        return DividedSteps(
            self.ranks.divided_tokens, self.ranks.rank.size, launch_sizes(self.config)
        )

    @property
    def residual_shape(self) -> tuple[int, int]:
        return self.config.hc_mult, self.config.hidden_size

    def __call__(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        """Compute N tokens and write their state; returns the residual streams [N,H,D]."""
        streams = self._embedded(inputs)
        if self.draft_context is None:
            return self.run_layers(self.layers, streams, inputs, cache, segments)
        features = Features(self.draft_context.targets, streams)
        streams = self.run_layers(self.layers, streams, inputs, cache, segments, features)
        self.draft_context.write(features, inputs, cache)
        return streams

    def forward_with_logits(
        self, inputs: StepInputs, cache: PagedCache, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Side streams compute the draft head's features beside the layers, and write its context
        beside the LM head.
        """
        context = self.draft_context
        if context is None or self.ranks.divides_tokens(len(inputs.token_ids)):
            streams = self(inputs, cache, segments)
            return self.compute_logits(streams), streams
        beside = partial(self.side_streams.start, FEATURE_STREAM)
        streams = self._embedded(inputs)
        features = Features(context.targets, streams, beside)
        streams = self.run_layers(self.layers, streams, inputs, cache, segments, features)
        self.side_streams.start(
            CONTEXT_STREAM, lambda: context.write(features, inputs, cache), after=FEATURE_STREAM
        )
        logits = self.compute_logits(streams)
        self.side_streams.join(CONTEXT_STREAM)
        return logits, streams

    def serve_others(self, lane_rows: int) -> None:
        serve_others((layer.ffn for layer in self.layers), self.weights.embed[:0], lane_rows)

    def run_one_of_each(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        streams = self._embedded(inputs)
        if self.draft_context is not None:
            features = Features(self.draft_context.targets, streams)
            for layer in self.draft_context.targets:
                features.add(layer, streams)
            self.draft_context.write(features, inputs, cache)
        return self.run_layers(self._one_of_each(), streams, inputs, cache, segments)

    def run_library_gemms(self, num_rows: int, num_tokens: int) -> None:
        streams = torch.zeros(num_rows, *self.residual_shape, dtype=self.dtype, device=self.device)
        for rows in library_gemm_rows(num_rows):
            self.compute_logits(streams[:rows])
        x_ND = torch.zeros(
            num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device
        )
        for layer in self._one_of_each():
            if layer.attn.compressor is not None:
                for rows in library_gemm_rows(num_tokens):
                    layer.attn.compressor.project(x_ND[:rows])

    def record_routed_experts(self, max_tokens: int) -> Tensor:
        config = self.config
        shape = max_tokens, config.num_hidden_layers, config.num_experts_per_tok
        dtype = torch.uint8 if config.n_routed_experts <= 256 else torch.int16
        routed = torch.zeros(shape, dtype=dtype, device=self.device)
        for number, layer in enumerate(self.layers):
            layer.ffn.routed = routed[:, number]
        return routed

    def _embedded(self, inputs: StepInputs) -> Tensor:
        """The residual streams of this rank's rows."""
        embedded = self.weights.embed.index_select(0, self.ranks.own_rows(inputs.token_ids))
        return embedded[:, None].expand(-1, self.config.hc_mult, -1)

    def _one_of_each(self) -> list[DecoderLayer]:
        """One layer of each kind of attention and router.

        They include the first layer, which has no pending post step before it.
        """
        found: list[DecoderLayer] = []
        seen: set[object] = set()
        for i, layer in enumerate(self.layers):
            kinds = {
                ("ratio", self.config.layer_ratios[i]),
                ("hashed", self.config.is_hash_layer(i)),
            }
            if not kinds <= seen:
                seen |= kinds
                found.append(layer)
        return found if len(found) > 1 else list(self.layers)[:2]

    def run_layers(
        self,
        layers: Sequence[DecoderLayer],
        streams_RHD: Tensor,
        inputs: StepInputs,
        cache: PagedCache,
        segments: Segments,
        features: Features | None = None,
    ) -> Tensor:
        """Run residual streams through `layers` and the last post step.

        Args:
            streams_RHD: only this rank's rows (`TensorParallel.own_rows`).
            features: filled after their target layers, with this rank's rows.

        Returns:
            [N,H,D]: the residual streams of all tokens.
        """
        num_tokens = len(inputs.token_ids)
        if self.ranks.divides_tokens(num_tokens):
            own = inputs.tokens.part(self.ranks.rank.rows(num_tokens))
            inputs = replace(inputs, local_tokens=own)
        first, *others = layers
        state = first(streams_RHD, inputs, self.tables, cache, segments)
        for number, layer in enumerate(others):
            # The next layer completes this one's post step.
            on_residual = None
            if features is not None and features.wants(number):
                on_residual = partial(features.add, number)
            state = layer(state, inputs, self.tables, cache, segments, on_residual)
        streams = post_step(self.ops, *state)
        if features is not None and features.wants(len(others)):
            features.add(len(others), streams)
        return self.ranks.all_gather_rows(streams, num_tokens)

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of the residual streams [M,H,D]."""
        hidden = self.hc_head(streams_MHD, self.weights.hc_head, self.params)
        return self.linear(hidden, self.weights.head).float()
