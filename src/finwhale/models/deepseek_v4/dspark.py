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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.layer import Layer, LayerWeights, mhc_params
from finwhale.models.deepseek_v4.rank_links import RankLinks
from finwhale.models.deepseek_v4.rope import RotaryTables
from finwhale.models.protocol import (
    ChooseDraft,
    Drafts,
    DraftStart,
    PagedCache,
    Segments,
    StepInputs,
)
from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import HcHeadWeight
from finwhale.ops.paging import PageTable, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DsparkWeights:
    """The head's own weights; it shares embedding and LM head. Norms: float32.

    Attributes:
        main_proj: [D, F*D].
        context_kv: [S*C, D]: the stages' wkv, which all read the same input.
        hc_head: contains the norm before the LM head.
        markov_w1: [V,r].
        markov_w2: [X,r]: this rank's rows.
        confidence: [1, D+r] or [1, D] float32; None: the head has no confidences.
    """

    main_proj: LinearWeight
    main_norm: Tensor
    context_kv: LinearWeight
    layers: tuple[LayerWeights, ...]
    hc_head: HcHeadWeight
    markov_w1: Tensor
    markov_w2: LinearWeight
    confidence: Tensor | None


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

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        weights: DsparkWeights,
        round_activations: bool,
        links: RankLinks,
        tables: RotaryTables,
    ) -> None:
        assert config.dspark is not None
        self.weights, self.links, self.tables = weights, links, tables
        self.linear, self.rms_norm, self.prepare_qkv = ops.linear, ops.rms_norm, ops.prepare_qkv
        self.eps, self.head_dim = config.rms_norm_eps, config.head_dim
        self.round_kv = round_activations
        self.targets = config.dspark.target_layer_ids
        self.first_layer = config.num_hidden_layers

    def write(self, features: Features, inputs: StepInputs, cache: PagedCache) -> None:
        """Write each stage's row kv = rope(kv_norm(wkv m)), m = main_norm(main_proj features)."""
        w = self.weights
        main = self.rms_norm(self.linear(features.values, w.main_proj), w.main_norm, self.eps)
        kv = self.links.whole(self.linear(main, w.context_kv), len(inputs.token_ids))
        for stage, (layer, kv_NC) in enumerate(
            zip(w.layers, kv.split(self.head_dim, 1), strict=True)
        ):
            # The operator also normalises a query's latent. A context has none, so the result is
            # not used.
            self.prepare_qkv(
                kv_NC,
                layer.attn.kv_norm,
                kv_NC,
                layer.attn.kv_norm,
                self.tables.plain,
                self.eps,
                self.round_kv,
                inputs.tokens,
                cache.pool("window", self.first_layer + stage),
                inputs.tables["window"],
            )


class RunLayers(Protocol):
    """DeepseekV4.run_layers."""

    def __call__(
        self,
        layers: Sequence[Layer],
        streams_RHD: Tensor,
        inputs: StepInputs,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor: ...


class DsparkHead:
    """Drafts a block of tokens. The model's forward has written the context (`DsparkContext`).

    Args:
        layers: the stages.
        embed, head: the model's embedding [V,D], and this rank's rows of its LM head.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        weights: DsparkWeights,
        layers: Sequence[Layer],
        links: RankLinks,
        embed: Tensor,
        head: LinearWeight,
        run_layers: RunLayers,
    ) -> None:
        assert config.dspark is not None
        self.config, self.weights, self.links = config.dspark, weights, links
        self.layers, self.run_layers = layers, run_layers
        self.embed, self.head = embed, head
        self.rms_norm, self.linear, self.hc_head = ops.rms_norm, ops.linear, ops.hc_head
        self.params = mhc_params(config)
        self.num_streams = config.hc_mult
        rows = self.config.num_rows
        self._steps = torch.arange(1, rows + 1, device=embed.device)
        self._further = further_offsets(config.sliding_window, rows).to(embed.device)

    def __call__(
        self,
        inputs: StepInputs,
        streams_NHD: Tensor,
        next_token_ids: Tensor,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        """Returns the residual streams unchanged.

        A draft reads only the context, which the model's forward has written.
        """
        return streams_NHD

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of the stages' residual streams, without Markov head."""
        hidden = self.hc_head(streams_MHD, self.weights.hc_head, self.params)
        return self.linear(hidden, self.head).float()

    def draft(
        self,
        start: DraftStart,
        num_drafts: int,
        cache: PagedCache,
        segments: Segments,
        choose: ChooseDraft,
    ) -> Drafts:
        """Draft after each sequence's newest token. The pass has G rows for any `num_drafts`."""
        assert num_drafts <= self.config.block_size
        streams_BGHD = self.run_block(start, cache, segments)
        first = self.config.num_rows - self.config.block_size
        streams = streams_BGHD[:, first : first + num_drafts]
        logits = self.compute_logits(streams.flatten(0, 1)).unflatten(0, streams.shape[:2])
        ids: list[Tensor] = []
        markov: list[Tensor] = []
        for k in range(num_drafts):
            newest = ids[-1] if ids else start.newest_ids
            markov.append(self.weights.markov_w1.index_select(0, newest))
            markov_logits = self.linear(markov[-1], self.weights.markov_w2).float()
            ids.append(choose(logits[:, k] + markov_logits, k))
        return Drafts(ids=tuple(ids), confidences=self._confidences(streams, markov))

    def run_block(self, start: DraftStart, cache: PagedCache, segments: Segments) -> Tensor:
        """The residual streams [B,G,H,D] of each sequence's block."""
        size, rows = len(start.newest_ids), self.config.num_rows
        ids = start.newest_ids.new_full((size, rows), self.config.noise_token_id)
        ids[:, 0] = start.newest_ids
        tokens = block_tokens(start.tokens, self._steps)
        inputs = StepInputs(
            token_ids=ids.flatten(),
            tokens=tokens,
            tables=start.tables,
            further_slots=further_slots(tokens, start.tables["window"], self._further),
        )
        embedded = self.embed.index_select(0, self.links.own(inputs.token_ids))
        streams = embedded[:, None].expand(-1, self.num_streams, -1)
        out = self.run_layers(self.layers, streams, inputs, cache, segments)
        return out.view(size, rows, *out.shape[1:])

    def _confidences(self, streams_BKHD: Tensor, markov_BR: Sequence[Tensor]) -> Tensor | None:
        """[K,B] float32 of all drafts at once; None: the head has no confidences.

        A confidence reads the collapsed residual streams before the norm, and the Markov head's
        row of the token before the draft.
        """
        if self.weights.confidence is None:
            return None
        w, params = self.weights.hc_head, self.params
        streams = streams_BKHD.float()
        flat = streams.flatten(2)
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + params.rms_eps)
        mixes = flat @ w.fn.T * scale
        shares = torch.sigmoid(mixes * w.scale + w.base) + params.eps
        hidden = torch.einsum("bkh,bkhd->bkd", shares, streams)
        scores_KB = torch.matmul(hidden, self.weights.confidence[0, : hidden.shape[2]]).T
        if self.config.confidence_head_with_markov:
            markov_KBR = torch.stack(tuple(markov_BR))
            part = self.weights.confidence[0, -markov_KBR.shape[2] :]
            scores_KB = scores_KB + (markov_KBR * part).sum(-1)
        return torch.sigmoid(scores_KB)


def block_tokens(last: Tokens, steps_G: Tensor) -> Tokens:
    """The tokens of a block of G tokens after each sequence's last verified token [B].

    A block after padding is padding.

    Args:
        steps_G: 1 to G.
    """
    rows, start = len(steps_G), last.positions[:, None]
    return Tokens(
        positions=torch.where(start < 0, start, start + steps_G).flatten(),
        sequence=last.sequence[:, None].repeat(1, rows).flatten(),
        query_start=last.query_start * rows,
        max_len=last.max_len + rows,
        max_query=rows,
    )


def further_offsets(window: int, rows: int) -> Tensor:
    """[G,G] int64: the rows that token k of a block sees beyond its own window, relative to the
    block's first position.

    The tokens of a block that begins at p see the rows p-W .. p+G-1. The window of token p+k is the
    rows p+k-W+1 .. p+k. The further rows are those after the token, then those before its window,
    newest first, so that rows before position 0, which do not exist, come last.
    """
    k, j = torch.arange(rows)[:, None], torch.arange(rows)
    later = rows - 1 - k
    return torch.where(j < later, k + 1 + j, k - window - (j - later))


def further_slots(block: Tokens, table: PageTable, offsets_GG: Tensor) -> Tensor:
    """[N,G] int32: the slots of the rows that a block's tokens see beyond their windows; -1: none.

    Args:
        block: blocks of the table's sequences, in order.
        offsets_GG: see `further_offsets`.
    """
    first_B = block.positions.view(-1, len(offsets_GG))[:, 0]
    seen_BGG = first_B[:, None, None] + offsets_GG
    places = seen_BGG // table.rows_per_page - table.first[:, None, None]
    places = places.clamp_(0, table.pages.shape[1] - 1)
    pages = table.pages.gather(1, places.flatten(1)).view_as(places)
    slots = pages * table.rows_per_page + seen_BGG % table.rows_per_page
    none = (seen_BGG < 0) | (first_B < 0)[:, None, None]
    return slots.masked_fill_(none, -1).flatten(0, 1).int()
