"""The DSpark draft head for training: many blocks of one row of text at once, in plain PyTorch.

The head reads features of a frozen DemoModel. Where inference drafts one block after the newest
token, training drafts a block after each of many anchors, and the text gives the tokens that the
Markov head reads. Source: arXiv 2607.05147. Parameters have the checkpoint's names.

Shapes: N tokens of the text (all rows one after another), D hidden, H residual streams, A heads,
K head_dim, J anchors, G dspark_block_size, R = J * G rows of the blocks, S context rows of a block
(sliding_window), V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from model import (
    Angles,
    Attention,
    Batch,
    DemoConfig,
    DemoModel,
    Fp8Linear,
    HyperConnection,
    HyperHead,
    Layer,
    Norm,
    Rope,
    Switches,
    feed_forward,
)
from torch import Tensor, nn

STAGES = 3
BLOCK_SIZE = 5
MARKOV_RANK = 64
NOISE_TOKEN = 18  # a marker of DeepSeek's tokenizer that no text of the embedded model contains


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """The fields of config.json that describe the head, without their prefix `dspark_`."""

    block_size: int
    noise_token_id: int
    markov_rank: int
    target_layer_ids: tuple[int, ...]

    @classmethod
    def load(cls, path: Path | str) -> DSparkConfig:
        return cls.of(json.loads(Path(path).read_text()))

    @classmethod
    def of(cls, raw: dict[str, Any]) -> DSparkConfig:
        return cls(
            block_size=raw["dspark_block_size"],
            noise_token_id=raw["dspark_noise_token_id"],
            markov_rank=raw["dspark_markov_rank"],
            target_layer_ids=tuple(raw["dspark_target_layer_ids"]),
        )


def dspark_json(base: dict[str, Any]) -> dict[str, Any]:
    """config.json of a base model with a DSpark head instead of the MTP layer."""
    layers = base["num_hidden_layers"]
    return base | {
        "compress_ratios": [*base["compress_ratios"][:layers], *[0] * STAGES],
        "dspark_block_size": BLOCK_SIZE,
        "dspark_noise_token_id": NOISE_TOKEN,
        "dspark_markov_rank": MARKOV_RANK,
        "dspark_target_layer_ids": list(range(layers - STAGES, layers)),
    }


class Features(NamedTuple):
    """The frozen model's features and logits of a text."""

    main: Tensor  # [N, layers * D] concatenated features of the target layers
    hidden: Tensor  # [N, D] after the last norm, input of the LM head


class Anchors(NamedTuple):
    """The newest token of each block, which predicts the tokens after it."""

    at: Tensor  # [J] index into the N tokens
    context: Tensor  # [J, S] indices of the S tokens before the anchor, oldest first
    visible: Tensor  # [J, S] whether a context token exists and is of the anchor's document
    labels: Tensor  # [J, G] the tokens after the anchor; -100 from the end of the document on


class Drafted(NamedTuple):
    hidden: Tensor  # [J, G, D] before the norm
    base_logits: Tensor  # [J, G, V] without the Markov head
    expert_load: Tensor  # [stages, E] share of the choices


@torch.no_grad()
def features_of(model: DemoModel, config: DSparkConfig, batch: Batch, on: Switches) -> Features:
    means: list[Tensor] = []
    streams, _, _ = model.streams(batch, on, means)
    main = torch.cat([means[layer] for layer in config.target_layer_ids], -1)
    return Features(main, model.norm(model.hc_head(streams)))


def choose_anchors(
    batch: Batch, labels: Tensor, size: int, window: int, block: int, generator: torch.Generator
) -> Anchors:
    """`size` random anchors in each row, of tokens that have a next one in their document.

    labels: [B, T] the next token, -100 where there is none. A row with fewer candidates repeats
    tokens without labels.
    """
    B, T = batch.tokens.shape
    device = batch.tokens.device
    order = torch.rand((B, T), generator=generator).to(device) - (labels == -100).float()
    columns = order.topk(size, -1).indices
    return anchors_at(batch, labels, columns, window, block)


def anchors_at(batch: Batch, labels: Tensor, columns: Tensor, window: int, block: int) -> Anchors:
    """Anchors at columns [B, size] of every row."""
    B, T = batch.tokens.shape
    device = batch.tokens.device
    rows = torch.arange(B, device=device)[:, None, None]
    back = columns[..., None] - torch.arange(window, 0, -1, device=device)
    doc = batch.doc[rows, columns[..., None]]
    visible = (back >= 0) & (batch.doc[rows, back.clamp(min=0)] == doc)
    ahead = columns[..., None] + torch.arange(block, device=device)
    found = torch.where(ahead < T, labels[rows, ahead.clamp(max=T - 1)], -100)
    alive = (found != -100).long().cumprod(-1).bool()
    base = rows * T
    return Anchors(
        at=(columns + base[..., 0]).flatten(),
        context=(back.clamp(min=0) + base).flatten(0, 1),
        visible=visible.flatten(0, 1),
        labels=torch.where(alive, found, -100).flatten(0, 1),
    )


class ConfidenceHead(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1, bias=False)
        nn.init.zeros_(self.proj.weight)


class MarkovHead(nn.Module):
    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.5)
        nn.init.zeros_(self.markov_w2.weight)


class Stage(Layer):
    """A decoder layer whose attention sees the context rows and the whole block."""

    def __init__(self, config: DemoConfig, head: DSparkConfig, number: int) -> None:
        super().__init__(config, 0, False)
        if number == 0:
            width = len(head.target_layer_ids) * config.hidden_size
            self.main_proj = Fp8Linear(width, config.hidden_size)
            self.main_norm = Norm(config.hidden_size, config.rms_norm_eps)
        if number == STAGES - 1:
            self.norm = Norm(config.hidden_size, config.rms_norm_eps)
            self.hc_head = HyperHead(config)
            self.markov_head = MarkovHead(config.vocab_size, head.markov_rank)
            self.confidence_head = ConfidenceHead(config.hidden_size + head.markov_rank)


def block_attention(
    hc: HyperConnection,
    norm: Norm,
    attention: Attention,
    streams: Tensor,
    context: Tensor,
    visible: Tensor,
    angles: Angles,
    switches: Switches,
) -> Tensor:
    """Attention of J blocks, not causal inside a block.

    Args:
        streams: [R, H, D]; angles: of the R rows.
        context: [J, S, K] rows before each block; visible [J, S].
    """
    x, post, comb = hc.pre(streams)
    x = norm(x)
    J = len(context)
    _, q = attention.queries(x, angles, switches)
    block = attention.latent(x, angles, switches).unflatten(0, (J, -1))
    keys = torch.cat((context, block), 1)
    scores = torch.matmul(q.unflatten(0, (J, -1)).flatten(1, 2), keys.mT).float()
    seen = torch.cat((visible, torch.ones_like(visible[:, : block.shape[1]])), 1)
    scores = torch.where(seen[:, None], scores, float("-inf"))
    scores = scores.unflatten(1, (block.shape[1], -1))
    sink = attention.attn_sink[:, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink).detach()
    e = torch.exp(scores - top)
    total = e.sum(-1, keepdim=True) + torch.exp(sink - top)
    out = torch.matmul(e.to(keys.dtype).flatten(1, 2), keys).float()
    out = (out.unflatten(1, (block.shape[1], -1)) / total).to(q.dtype).flatten(0, 1)
    return hc.post(streams, attention.output(out, angles, switches), post, comb)


@dataclass
class HeadParts:
    """The functions that a stage consists of."""

    attention: Callable[..., Tensor] = block_attention
    feed_forward: Callable[..., tuple[Tensor, Tensor]] = feed_forward

    @classmethod
    def compiled(cls) -> HeadParts:
        return cls(*(torch.compile(getattr(cls, f.name), dynamic=False) for f in fields(cls)))


class DSparkHead(nn.Module):
    def __init__(
        self, config: DemoConfig, head: DSparkConfig, dtype: torch.dtype = torch.float32
    ) -> None:
        """dtype: of the activations; parameters are always fp32."""
        super().__init__()
        self.config, self.head_config, self.dtype = config, head, dtype
        self.mtp = nn.ModuleList(Stage(config, head, i) for i in range(STAGES))
        self.rope = Rope(config, compressed=False)
        self.parts = HeadParts()

    @torch.no_grad()
    def start_from(self, model: DemoModel) -> None:
        """Begin with the model's own way to the LM head."""
        last = self.mtp[-1]
        last.norm.load_state_dict(model.norm.state_dict())
        last.hc_head.load_state_dict(model.hc_head.state_dict())

    def context_rows(self, main: Tensor, length: int, switches: Switches) -> list[Tensor]:
        """Each stage's rows [N, K] of all tokens, for rows of text of `length` tokens."""
        first = self.mtp[0]
        m = first.main_norm(first.main_proj(main, switches))
        angles = self.rope(len(main) // length, length)
        return [stage.attn.latent(m, angles, switches) for stage in self.mtp]

    def forward(
        self,
        features: Features,
        batch: Batch,
        anchors: Anchors,
        embed: Tensor,
        head: Tensor,
        switches: Switches,
    ) -> Drafted:
        """embed, head: the frozen model's [V, D]."""
        J, G, T = len(anchors.at), self.head_config.block_size, batch.tokens.shape[1]
        ids = torch.full_like(anchors.labels, self.head_config.noise_token_id)
        ids[:, 0] = batch.tokens.flatten()[anchors.at]
        ids = ids.flatten()
        positions = anchors.at[:, None] % T + torch.arange(G, device=ids.device)
        angles = self.rope.cos[positions.flatten()], self.rope.sin[positions.flatten()]
        x = F.embedding(ids, embed).to(self.dtype)
        streams = x.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        loads = []
        rows = self.context_rows(features.main.to(self.dtype), T, switches)
        for stage, kv in zip(self.mtp, rows, strict=True):
            streams = self.parts.attention(
                stage.hc_attn,
                stage.attn_norm,
                stage.attn,
                streams,
                kv.index_select(0, anchors.context.flatten()).unflatten(0, anchors.context.shape),
                anchors.visible,
                angles,
                switches,
            )
            streams, load = self.parts.feed_forward(
                stage.hc_ffn, stage.ffn_norm, stage.ffn, streams, ids, switches
            )
            loads.append(load)
        last = self.mtp[-1]
        hidden = last.hc_head(streams)
        logits = F.linear(last.norm(hidden), head.to(hidden.dtype))
        return Drafted(hidden.unflatten(0, (J, G)), logits.unflatten(0, (J, G)), torch.stack(loads))

    def markov(self, drafted: Drafted, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [J, G, V] and confidence logits [J, G], given the token before each position.

        before: [J, G]; its first column is the anchor.
        """
        last = self.mtp[-1]
        w1 = F.embedding(before, last.markov_head.markov_w1.weight).to(drafted.hidden.dtype)
        w2 = last.markov_head.markov_w2.weight.to(w1.dtype)
        logits = drafted.base_logits + F.linear(w1, w2)
        joined = torch.cat((drafted.hidden, w1), -1).float()
        weight = last.confidence_head.proj.weight.to(w1.dtype).float()
        return logits, F.linear(joined, weight).squeeze(-1)

    @torch.no_grad()
    def propose(
        self, drafted: Drafted, first: Tensor, temperature: float, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Drafts [J, G] and their confidence logits [J, G] by the Markov loop.

        Args:
            first: [J] the anchors' tokens.
            noise: [J, G, V] the target's own Gumbel noise at the drafts' positions; None: greedy.
        """
        drafts, confidences, before = [], [], first
        for k in range(drafted.hidden.shape[1]):
            row = Drafted(
                drafted.hidden[:, k : k + 1],
                drafted.base_logits[:, k : k + 1],
                drafted.expert_load,
            )
            logits, confidence = self.markov(row, before[:, None])
            scores = logits[:, 0].float()
            if noise is not None and temperature:
                scores = scores / temperature + noise[:, k]
            before = scores.argmax(-1)
            drafts.append(before)
            confidences.append(confidence[:, 0])
        return torch.stack(drafts, 1), torch.stack(confidences, 1)
