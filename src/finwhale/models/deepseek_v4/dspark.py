"""DSpark, a DraftHead: three decoder layers that draft a block of tokens in one pass.

Source: arXiv 2607.05147. The head has two parts:

- `DsparkContext` runs at the end of every forward of the model. It writes one row for each token
  and stage into the window's pages, from the residual streams after some of the model's layers.
- `DsparkHead.draft` runs the stages on a block: the newest token and noise tokens. Each row of the
  block sees the window before the block and the whole block. The row of the newest token predicts
  the first draft, the next row the second, and so on. A Markov head corrects each prediction, given
  the draft before it.

The stages write the block's rows into the window's pages too, at the positions of their tokens. The
model's next forward overwrites the rows of accepted drafts. No token sees the other rows, because a
context ends before the newest token.

Legend: N tokens, R rows of this rank, B sequences, G rows of a block, D hidden, H residual streams,
C head_dim, F features of a token (one for each target layer), S stages, V vocabulary, X tokens of
it that this rank computes, W window.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_config import DeepseekConfig
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.deepseek_v4.layer import DraftLayers, LayerWeights, SharedParts
from finwhale.models.protocol import Drafts
from finwhale.models.rope import RotaryTables
from finwhale.models.step_inputs import ChooseDraft, DraftStart, Segments, StepInputs
from finwhale.models.weight_parts import DsparkParts
from finwhale.ops import Ops
from finwhale.ops.attention import RowForm
from finwhale.ops.drafts import BlockShape, ConfidenceWeight
from finwhale.ops.mhc import HcHeadWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class DsparkWeights(DsparkParts):
    """The head's own weights. hc_head contains the norm before the LM head."""

    layers: tuple[LayerWeights, ...]
    hc_head: HcHeadWeight


class Features:
    """The features of a step's tokens: the mean of their residual streams after each target layer.

    Args:
        beside: runs work on a side stream, which the caller joins; None: all work runs in order.

    Attributes:
        values: [R, F*D].
    """

    def __init__(
        self,
        target_layers: Sequence[int],
        streams_RHD: Tensor,
        beside: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        self._targets = tuple(target_layers)
        self._width = streams_RHD.shape[2]
        self._beside = beside
        # The side stream reads these tensors, so they must live until the caller has joined it.
        self._read: list[Tensor] = []
        rows, width = len(streams_RHD), self._width * len(self._targets)
        self.values = streams_RHD.new_empty(rows, width)

    def wants(self, layer: int) -> bool:
        return layer in self._targets

    def add(self, layer: int, streams_RHD: Tensor) -> None:
        """Store the feature of the residual streams after a target layer."""
        at = self._targets.index(layer) * self._width
        feature = self.values[:, at : at + self._width]
        if self._beside is None:
            torch.mean(streams_RHD, 1, out=feature)
        else:
            self._read.append(streams_RHD)
            self._beside(lambda: torch.mean(streams_RHD, 1, out=feature))


class DsparkContext:
    """Computes and stores the stages' rows of the tokens that the model computes."""

    def __init__(self, context: LayerContext, weights: DsparkWeights, tables: RotaryTables) -> None:
        config, ops = context.config, context.ops
        assert config.dspark is not None
        self.weights, self.ranks, self.tables = weights, context.ranks, tables
        self.linear, self.rms_norm = ops.linear, ops.rms_norm
        self.store_window_rows = ops.store_window_rows
        self.eps, self.head_dim = config.rms_norm_eps, config.head_dim
        self.round_kv = context.round_activations
        self.targets = config.dspark.target_layer_ids
        self.first_layer = config.num_hidden_layers

    def write(self, features: Features, inputs: StepInputs, cache: PagedCache) -> None:
        """Write each stage's row kv = rope(kv_norm(wkv m)), m = main_norm(main_proj features)."""
        w = self.weights
        main = self.rms_norm(self.linear(features.values, w.main_proj), w.main_norm, self.eps)
        kv = self.ranks.all_gather_rows(self.linear(main, w.context_kv), len(inputs.token_ids))
        for stage, (layer, kv_NC) in enumerate(
            zip(w.layers, kv.split(self.head_dim, 1), strict=True)
        ):
            form = RowForm(layer.attn.kv_norm, self.tables.plain, self.eps, self.round_kv)
            window = cache.rows("window", self.first_layer + stage, inputs.tables)
            self.store_window_rows(kv_NC, form, inputs.tokens, window)


class BlockDrafts(ABC):
    """Drafts a block of tokens. The model's forward has written the context.

    DeepSeek-V4.1's head shares this class.

    Args:
        weights: of which this class reads the Markov head.
    """

    def __init__(self, config: DeepseekConfig, ops: Ops, weights: DsparkParts) -> None:
        assert config.dspark is not None
        self.sizes, self.ops = config.dspark, ops
        self._markov_embed, self._markov_head = weights.markov_embed, weights.markov_head
        self._shape = BlockShape(
            num_tokens=self.sizes.num_rows,
            noise_id=self.sizes.noise_token_id,
            window=config.sliding_window,
        )

    def __call__(
        self,
        inputs: StepInputs,
        streams_NHD: Tensor,
        next_token_ids: Tensor,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        """Returns rows without values, [N,0,D].

        A draft reads only the context, which the model's forward has written.
        """
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
        first = self.sizes.num_rows - self.sizes.block_size
        block = self.run_block(start, cache, segments)[:, first : first + num_drafts]
        logits = self.block_logits(block.flatten(0, 1)).unflatten(0, block.shape[:2])
        ids: list[Tensor] = []
        for k in range(num_drafts):
            # The Markov head corrects a draft's logits by the token before it.
            rows = self._markov_embed.index_select(0, ids[-1] if ids else start.newest_ids)
            markov = self.ops.linear(rows, self._markov_head).float()
            ids.append(choose(logits[:, k] + markov, k))
        ids_BK = torch.stack(ids, 1)
        return Drafts(ids=ids_BK.T, confidences=self.confidences(block, start.newest_ids, ids_BK))

    def block_inputs(self, start: DraftStart) -> StepInputs:
        """The inputs of a step with each sequence's block."""
        window = start.tables["window"]
        block = self.ops.make_blocks(start.newest_ids, start.tokens, window, self._shape)
        return StepInputs(
            token_ids=block.ids,
            tokens=block.tokens,
            tables=start.tables,
            extra_kv_slots=block.extra_kv_slots,
            lane_rows=start.lane_rows * self.sizes.num_rows,
        )

    @abstractmethod
    def run_block(self, start: DraftStart, cache: PagedCache, segments: Segments) -> Tensor:
        """Run the stages on one block for each sequence; returns their result [B,G,..]."""

    @abstractmethod
    def block_logits(self, rows: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of M rows of blocks, without Markov head."""

    @abstractmethod
    def confidences(self, block: Tensor, newest_B: Tensor, ids_BK: Tensor) -> Tensor | None:
        """[K,B] float32: of drafts [B,K], given their rows of the block; None: there is no head."""

    def serve_others_tokens(self, lane_rows: int) -> None:  # noqa: B027
        pass  # `__call__` runs no layer


class DsparkHead(DraftLayers, BlockDrafts):
    """DeepSeek-V4's head: the context is written by `DsparkContext`."""

    def __init__(self, context: LayerContext, weights: DsparkWeights, shared: SharedParts) -> None:
        config = context.config
        DraftLayers.__init__(self, context, weights.layers, weights.hc_head, shared)
        BlockDrafts.__init__(self, config, context.ops, weights)
        self.weights, self.num_streams = weights, config.hc_mult
        self._confidence: ConfidenceWeight | None = None
        if weights.confidence is not None:
            with_markov = self.sizes.confidence_head_with_markov
            self._confidence = ConfidenceWeight(
                weights.hc_head, weights.confidence, weights.markov_embed if with_markov else None
            )

    def run_block(self, start: DraftStart, cache: PagedCache, segments: Segments) -> Tensor:
        """Run the stages on one block for each sequence; returns residual streams [B,G,H,D]."""
        inputs = self.block_inputs(start)
        embedded = self.embed.index_select(0, self.ranks.own_rows(inputs.token_ids))
        streams = embedded[:, None].expand(-1, self.num_streams, -1)
        out = self.run_layers(self.layers, streams, inputs, cache, segments)
        return out.view(-1, self.sizes.num_rows, *out.shape[1:])

    def block_logits(self, rows: Tensor) -> Tensor:
        return self.compute_logits(rows)

    def confidences(self, block: Tensor, newest_B: Tensor, ids_BK: Tensor) -> Tensor | None:
        if self._confidence is None:
            return None
        own = self._confidence, self.params
        return self.ops.draft_confidences(block, newest_B, ids_BK, *own).T

    def serve_others(self, num_drafts: int, lane_rows: int) -> None:
        self.serve_layers(lane_rows * self.sizes.num_rows)
