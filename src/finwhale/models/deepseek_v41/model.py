"""The DeepSeek-V4.1 text model: start here.

embedding -> H equal residual streams -> decoder layers -> collapsed hidden states. A block's input
is collapsed with the mixes of the block before, so the last block's mixes collapse the result.

The ranks divide heads, experts and vocabulary, and each computes all tokens
(deepseek_v4/tensor_parallel.py has the method, and that of data-parallel ranks).

Legend: N tokens, M rows whose logits are wanted, S recalled ids, H residual streams, D hidden,
V vocabulary, X tokens of it whose rows of the LM head this rank holds, or values of Engram's rows.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finwhale.errors import FinwhaleError
from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.base import DeepseekModel
from finwhale.models.deepseek_v4.kernel_sizes import library_gemm_rows
from finwhale.models.deepseek_v4.layer import serve_others
from finwhale.models.deepseek_v41.attention import Published
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.dspark import DsparkHead
from finwhale.models.deepseek_v41.engram import Engram
from finwhale.models.deepseek_v41.engram_hash import engram_hashes
from finwhale.models.deepseek_v41.layer import DecoderLayer, LayerState
from finwhale.models.deepseek_v41.step_parts import StepParts, step_parts
from finwhale.models.deepseek_v41.weight_classes import LayerWeights, ModelWeights
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.deepseek_v41 import HashTensors
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.linear import LinearWeight
from finwhale.weights.tree import leaves

ENGRAM_STREAM = 2  # of SideStreams


class DeepseekV41(DeepseekModel):
    """One rank of the text model.

    Args:
        compressed_ids: [V] int64: Engram's compressed id of each token; None: no layer has Engram.
        options: those of DeepseekModel.
    """

    config: DeepseekV41Config
    weights: ModelWeights

    def __init__(
        self,
        config: DeepseekV41Config,
        ops: Ops,
        weights: ModelWeights,
        compressed_ids: Tensor | None,
        *,
        round_activations: bool,
        **options: Any,
    ) -> None:
        super().__init__(config, ops, weights, round_activations=round_activations, **options)
        assert ops.shared_entries is not None
        self.shared = ops.shared_entries
        self.published = Published()
        self.first_mixes = torch.eye(1, config.hc_mult, device=weights.embed.device)
        self.compressed_ids: Tensor | None = None
        self.ranks.divided_tokens = sys.maxsize  # each rank computes all tokens
        hashes, self.pad = dict[int, HashTensors](), 0
        if config.engram is not None:
            assert compressed_ids is not None
            hashes = engram_hashes(config.engram)
            self.pad = int(compressed_ids[config.engram.pad_token_id])
            self.compressed_ids = compressed_ids.to(weights.embed.device)

        def layers(parts: Sequence[LayerWeights], first: int) -> list[DecoderLayer]:
            shared = config, ops, self.shared, self.ranks, self.side_streams
            make = partial(DecoderLayer, *shared, round_activations=round_activations)
            return [make(part, i, hashes.get(i)) for i, part in enumerate(parts, first)]

        self.layers = layers(weights.layers, 0)
        self.draft_head: DsparkHead | None = None
        if weights.dspark is not None:
            stages = layers(weights.dspark.layers, config.num_hidden_layers)
            self.draft_head = DsparkHead(
                *(config, ops, weights.dspark, stages, self.run_layers, self.serve_layers),
                lambda normed: ops.linear(normed, weights.head).float(),
            )

    @property
    def residual_shape(self) -> tuple[int, int]:
        """The last mixes have collapsed a token's streams to one."""
        return 1, self.config.hidden_size

    @property
    def divided_steps(self) -> None:
        return None

    @property
    def launch_sizes(self) -> ModelSizes:
        top, experts = self.config.stage_experts
        return replace(super().launch_sizes, draft_experts=(experts, top))

    def __call__(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        """Compute N tokens and write their state; returns the collapsed hidden states [N,1,D].

        They are zeros for tokens of prompts that the last layers do not compute (step_parts.py).
        """
        return self._forward(self.layers, inputs, cache, segments)

    def _forward(
        self,
        layers: Sequence[DecoderLayer],
        inputs: StepInputs,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        """`__call__` with some layers. It also writes the draft head's context."""
        parts, head, targets = step_parts(inputs, self.config), self.draft_head, dict[int, Tensor]()
        wanted = () if head is None else head.sizes.target_layer_ids

        def on_input(layer: int, streams_NHD: Tensor) -> None:
            if layer in wanted:
                targets[layer] = streams_NHD.mean(1)

        hidden = whole = self._run(layers, parts, cache, segments, on_input)
        if len(hidden) < len(inputs.token_ids):
            assert parts.tail is not None
            rows, parts = parts.tail.rows, parts.tail.parts
            whole = hidden.new_zeros(len(inputs.token_ids), hidden.shape[1])
            whole.index_copy_(0, rows, hidden)
            # The taps before the tail have all tokens.
            targets |= {i: t[rows] for i, t in targets.items() if len(t) > len(hidden)}
        if head is not None and len(hidden):
            features = torch.cat([targets[layer] for layer in wanted], 1)
            head.write_context(features, parts.inputs, self.tables.plain, cache)
        return whole[:, None]

    def forward_with_logits(
        self, inputs: StepInputs, cache: PagedCache, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        streams = self(inputs, cache, segments)
        return self.compute_logits(streams), streams

    def run_layers(
        self,
        layers: Sequence[DecoderLayer],
        inputs: StepInputs,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        """The collapsed hidden states [N,D] after layers of which the first reads embeddings."""
        return self._run(layers, step_parts(inputs, self.config), cache, segments)

    def _run(
        self,
        layers: Sequence[DecoderLayer],
        parts: StepParts,
        cache: PagedCache,
        segments: Segments,
        on_input: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """`run_layers`, of the tail's tokens [M,D] if the layers cut the step.

        Args:
            on_input: called with each layer's number and the streams at its attention input.
        """
        x = self.weights.embed.index_select(0, parts.inputs.token_ids)
        streams = x[:, None].expand(-1, self.config.hc_mult, -1)
        state: LayerState = None, streams, self.first_mixes.repeat(len(x), 1)
        engrams = {layer.attn.layer: layer.engram for layer in layers if layer.engram is not None}
        looked_up = dict[int, Tensor]()
        if engrams:
            # The layers before Engram's run while its rows are read.
            read = partial(self._look_up, engrams, parts, cache)
            looked_up = self.side_streams.start(ENGRAM_STREAM, read)
        for at, layer in enumerate(layers):
            number = layer.attn.layer
            rotary = self.tables.compressed if layer.attn.ratio else self.tables.plain
            watch = None if on_input is None else partial(on_input, number)
            tail = parts.tail if number == self.config.first_tail_layer else None
            if number in engrams:
                self.side_streams.join(ENGRAM_STREAM)
            where = rotary, cache, self.published, segments, looked_up.pop(number, None)
            state = layer(state, parts, *where, watch, tail)
            if tail is not None:
                parts = tail.parts
                self.side_streams.join(ENGRAM_STREAM)
                looked_up = {i: rows[tail.rows] for i, rows in looked_up.items()}
                if not len(tail.rows):
                    if self.ranks.rank.data_parallel:
                        self.serve_layers(layers[at:], parts.inputs.lane_rows)
                    break
        return self.shared.collapse(layers[-1].streams(state), state[2])

    def _look_up(
        self, engrams: dict[int, Engram], parts: StepParts, cache: PagedCache
    ) -> dict[int, Tensor]:
        """Engram's rows [N,X] by layer."""
        engram = self.config.engram
        assert engram is not None and self.compressed_ids is not None
        rows = cache.rows("engram_ids", engram.layer_ids[0], parts.inputs.tables)
        own = self.compressed_ids.index_select(0, parts.inputs.token_ids)
        recalled_NS = self.shared.recall_ids(
            own, engram.max_ngram_size, self.pad, rows, parts.recalling
        )
        return {i: layer.look_up(recalled_NS, self.dtype) for i, layer in engrams.items()}

    def compute_logits(self, streams_M1D: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of collapsed hidden states."""
        w, hidden_MD = self.weights, streams_M1D.flatten(1)
        normed = self.ops.rms_norm(hidden_MD, w.norm, self.config.rms_norm_eps)
        return self.ops.linear(normed, w.head).float()

    def serve_others(self, lane_rows: int) -> None:
        self.serve_layers(self.layers, lane_rows)

    def serve_layers(self, layers: Sequence[DecoderLayer], lane_rows: int) -> None:
        """Take part in layers in which this data-parallel rank has no tokens."""
        serve_others((layer.ffn for layer in layers), self.weights.embed[:0], lane_rows)

    def record_routed_experts(self, max_tokens: int) -> Tensor:
        raise FinwhaleError("DeepSeek-V4.1 does not return routed experts")

    def run_one_of_each(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        return self._forward(self._one_of_each(), inputs, cache, segments)

    def _one_of_each(self) -> list[DecoderLayer]:
        """Return one layer of each kind. A layer that the draft head reads is a kind of its own."""
        config, found = self.config, dict[object, DecoderLayer]()
        targets = () if config.dspark is None else config.dspark.target_layer_ids
        for number, layer in enumerate(self.layers):
            attn, selects = layer.attn, number in config.index_source_layer_ids
            rule = (attn.ratio, attn.rule.keeps, attn.within_blocks) if selects else attn.ratio
            is_source = number in config.kv_source_layer_ids
            tail, target = number == config.first_tail_layer, number in targets and number
            found.setdefault((rule, is_source, layer.engram is None, tail, target), layer)
        return list(found.values())

    def run_library_gemms(self, num_rows: int, num_tokens: int) -> None:
        w, parts = self.weights, [layer.weights for layer in self._one_of_each()]
        found = leaves([w.dspark, w.head, parts], LinearWeight)
        linears = [part for part in found if isinstance(part, LinearWeight)]
        for weight in {(w.weight.shape, w.weight.dtype): w for w in linears}.values():
            *groups, rows, width = weight.weight.shape
            most = num_rows if rows == len(self.vocab_part) else num_tokens
            x = torch.zeros(most, *groups, width, dtype=self.dtype, device=self.device)
            run = self.ops.grouped_linear if groups else self.ops.linear
            for count in _numbers_of_rows(most, weight.scale):
                run(x[:count], weight)
        shared, limit = w.layers[0].ffn.shared_experts, self.config.swiglu_limit
        x = torch.zeros(num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)
        for count in _numbers_of_rows(num_tokens, shared.scale2):
            self.ops.swiglu_mlp(x[:count], shared, limit)


def _numbers_of_rows(most: int, scale: Tensor | None) -> list[int]:
    """Those for which `run_library_gemms` runs a weight with this scale.

    FP8 weights are expanded each time, so only a part of them: as many odd as even ones.
    """
    return library_gemm_rows(most)[:: 1 if scale is None else 15]
