"""DeepSeek-V4 as its formulas: one sequence, the whole prompt at once, no cache, no batching.

Written from the technical report ("DeepSeek-V4: Towards Highly Efficient Million-Token Context
Intelligence"), to be read beside it: a second definition for the tests, and the only one of the
MTP layer, which transformers leaves out, and of the roundings that the model was trained with
(config["as_trained"]). Works in the dtype of the weights that it is given.

Legend: T tokens, D hidden, H residual streams, A heads, C head_dim, W entries, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Config = Mapping[str, Any]


@dataclass
class Margins:
    """How far apart the last chosen and the first rejected one were, in every discrete choice.

    Attributes:
        chosen: of each layer, the experts that it chose for each token [T,K].
    """

    experts: list[float] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)

    def smallest(self) -> float:
        return min([*self.experts, *self.entries], default=math.inf)


def forward(
    weights: Weights, config: Config, ids: list[int], margins: Margins | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [T,V] and the streams [T,H,D] before the head's collapse."""
    streams = after_layers(weights, config, ids, margins)[-1]
    return head(weights, Part(weights, ""), config, streams), streams


def after_layers(
    weights: Weights, config: Config, ids: list[int], margins: Margins | None = None
) -> list[Tensor]:
    """The streams [T,H,D] after each layer, its post step done."""
    tokens = torch.tensor(ids)
    streams = weights["embed.weight"][tokens][:, None].expand(-1, config["hc_mult"], -1)
    found = []
    for i in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][i]
        hashed = i < config["num_hash_layers"]
        layer = Part(weights, f"layers.{i}.")
        streams = decoder_layer(layer, config, ratio, hashed, streams, tokens, margins)
        found.append(streams)
    return found


def mtp_logits(weights: Weights, config: Config, ids: list[int]) -> Tensor:
    """[T-1,V]: row t predicts token t+2 from the streams at t and the embedding of token t+1."""
    _, streams = forward(weights, config, ids)
    mixed = mtp_layer(weights, config, streams[:-1], ids[1:])
    return head(weights, Part(weights, "mtp.0."), config, mixed)


def draft_logits(
    weights: Weights, config: Config, streams: Tensor, ids: list[int], drafts: list[int]
) -> Tensor:
    """[K,V]: row k is what draft k after the text `ids` is chosen from, given the drafts before it.

    The first draft comes from the model's streams. Each further one comes from one more position
    of the same layer: there the layer reads its own streams of the position before, in place of
    the model's, together with the embedding of the draft before.

    Args:
        streams: the model's, of all tokens of the text but the last.
    """
    rows = []
    following = list(ids[1:])
    for draft in drafts:
        mixed = mtp_layer(weights, config, streams, following)
        rows.append(head(weights, Part(weights, "mtp.0."), config, mixed[-1:]))
        streams = torch.cat([streams, mixed[-1:]])
        following.append(draft)
    return torch.cat(rows)


def mtp_layer(weights: Weights, config: Config, streams: Tensor, following: list[int]) -> Tensor:
    """The MTP layer's streams [T,H,D], from streams and the token that follows each position."""
    tokens = torch.tensor(following)
    w, eps = Part(weights, "mtp.0."), config["rms_norm_eps"]
    embedded = rms_norm(weights["embed.weight"][tokens], w["enorm.weight"], eps)
    before = rms_norm(streams, w["hnorm.weight"], eps)
    mixed = linear(w, "h_proj", config, before) + linear(w, "e_proj", config, embedded)[:, None]
    return decoder_layer(w, config, 0, False, mixed, tokens, None)


class Part:
    """The weights under a prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.weights, self.prefix = weights, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def under(self, prefix: str) -> "Part":
        return Part(self.weights, self.prefix + prefix)


# --- Residual streams (mHC) ---


def decoder_layer(
    w: Part,
    config: Config,
    ratio: int,
    hashed: bool,
    streams: Tensor,
    tokens: Tensor,
    margins: Margins | None,
) -> Tensor:
    x, post, comb = mhc_pre(w, "hc_attn_", config, streams)
    x = rms_norm(x, w["attn_norm.weight"], config["rms_norm_eps"])
    streams = mhc_post(attention(w.under("attn."), config, ratio, x, margins), streams, post, comb)
    x, post, comb = mhc_pre(w, "hc_ffn_", config, streams)
    x = rms_norm(x, w["ffn_norm.weight"], config["rms_norm_eps"])
    return mhc_post(moe(w.under("ffn."), config, hashed, x, tokens, margins), streams, post, comb)


def mhc_pre(w: Part, hc: str, config: Config, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block's input [T,D], and how its output and the streams mix: post [T,H], comb [T,H,H]."""
    n, eps = config["hc_mult"], config["hc_eps"]
    flat = streams.flatten(1)
    mixes = rms_norm(flat, None, config["rms_norm_eps"]) @ w[hc + "fn"].T
    scale, base = w[hc + "scale"], w[hc + "base"]
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(config["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return torch.einsum("th,thd->td", pre, streams), post, comb


def mhc_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post[:, :, None] * out[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)


def head(weights: Weights, w: Part, config: Config, streams: Tensor) -> Tensor:
    mixes = rms_norm(streams.flatten(1), None, config["rms_norm_eps"]) @ w["hc_head_fn"].T
    pre = torch.sigmoid(mixes * w["hc_head_scale"] + w["hc_head_base"]) + config["hc_eps"]
    x = torch.einsum("th,thd->td", pre, streams)
    return rms_norm(x, w["norm.weight"], config["rms_norm_eps"]) @ weights["head.weight"].T


# --- Attention ---


def attention(w: Part, config: Config, ratio: int, x: Tensor, margins: Margins | None) -> Tensor:
    eps, length = config["rms_norm_eps"], x.shape[0]
    heads, head_dim, window = (
        config["num_attention_heads"],
        config["head_dim"],
        config["sliding_window"],
    )
    positions = torch.arange(length)
    q_lora = rms_norm(linear(w, "wq_a", config, x), w["q_norm.weight"], eps)
    q = rms_norm(linear(w, "wq_b", config, q_lora).view(length, heads, head_dim), None, eps)
    q = rope(q, positions, config, ratio)
    keys = rms_norm(linear(w, "wkv", config, x), w["kv_norm.weight"], eps)
    keys = stored(rope(keys, positions, config, ratio), config)
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance < window)
    if ratio:
        entries = stored(compress(w.under("compressor."), config, ratio, x), config)
        complete = torch.arange(entries.shape[0]) < (positions[:, None] + 1) // ratio
        if ratio == 4:
            scores = index_scores(w.under("indexer."), config, x, q_lora)
            complete = top_entries(scores, complete, config["index_topk"], margins)
        keys, visible = torch.cat([keys, entries]), torch.cat([visible, complete], 1)
    logits = torch.einsum("tac,kc->tak", q, keys) / math.sqrt(head_dim)
    logits = logits.masked_fill(~visible[:, None], -math.inf)
    sink = w["attn_sink"].expand(length, -1)[:, :, None]
    shares = torch.cat([logits, sink], 2).softmax(2)[:, :, :-1]
    out = rope(torch.einsum("tak,kc->tac", shares, keys), -positions, config, ratio)
    groups = config["o_groups"]
    wo_a = w["wo_a.weight"].view(groups, config["o_lora_rank"], -1)
    out = out.flatten(1).unflatten(1, (groups, wo_a.shape[2]))
    if config.get("wo_a_input", "fp8") == "fp8":  # else as the authors' code: not rounded
        out = rounded(out, config)
    grouped = torch.einsum("tgi,goi->tgo", out, wo_a)
    return linear(w, "wo_b", config, grouped.flatten(1))


def compress(w: Part, config: Config, ratio: int, x: Tensor) -> Tensor:
    """Entries [W,C], one a complete window of `ratio` tokens."""
    kv, gate = x @ w["wkv.weight"].T, x @ w["wgate.weight"].T
    dim, entries = w["norm.weight"].shape[0], []
    for first in range(0, x.shape[0] - ratio + 1, ratio):
        own = slice(first, first + ratio)
        values, gates = kv[own], gate[own] + w["ape"]
        if ratio == 4:  # the window before in its first half, this one in its second
            values, gates = values[:, dim:], gates[:, dim:]
            if first:
                before = slice(first - ratio, first)
                values = torch.cat([kv[before, :dim], values])
                gates = torch.cat([(gate[before] + w["ape"])[:, :dim], gates])
        entries.append((gates.softmax(0) * values).sum(0))
    if not entries:
        return x.new_zeros(0, dim)
    normed = rms_norm(torch.stack(entries), w["norm.weight"], config["rms_norm_eps"])
    return rope(normed, torch.arange(len(entries)) * ratio, config, ratio)


def index_scores(w: Part, config: Config, x: Tensor, q_lora: Tensor) -> Tensor:
    """The indexer's score of every entry [T,W]."""
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    q = linear(w, "wq_b", config, q_lora).view(-1, heads, dim)
    q = index_form(rope(q, torch.arange(x.shape[0]), config, 4), config)
    keys = index_form(compress(w.under("compressor."), config, 4, x), config)
    weight = x @ w["weights_proj.weight"].T / math.sqrt(dim * heads)
    return torch.einsum("th,thw->tw", weight, torch.einsum("thc,wc->thw", q, keys).relu())


def index_form(x: Tensor, config: Config) -> Tensor:
    """Index queries or keys as trained: times the normalised Hadamard matrix, then FP4."""
    if not config.get("as_trained"):
        return x
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=x.dtype), matrix)
    rotated = x @ matrix / math.sqrt(x.shape[-1])
    return torch.cat([fp4(part) for part in rotated.split(32, -1)], -1)


def fp4(group: Tensor) -> Tensor:
    """To the nearest e2m1 value at the group's power-of-two scale, of two as near the even one."""
    amax = group.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
    mantissa, exponent = torch.frexp(amax / 6)
    scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
    # The even ones first, so that the first minimum is theirs.
    values = torch.tensor([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0], dtype=group.dtype)
    nearest = ((group / scale).abs()[..., None] - values).abs().argmin(-1)
    return values[nearest].copysign(group) * scale


def top_entries(scores: Tensor, complete: Tensor, topk: int, margins: Margins | None) -> Tensor:
    """Which complete entries are among the topk best, [T,W] bool."""
    if scores.shape[1] <= topk:
        return complete
    ranked = scores.masked_fill(~complete, -math.inf).sort(1, descending=True)
    if margins is not None:
        gaps = ranked.values[:, topk - 1] - ranked.values[:, topk]
        margins.entries.extend(gaps[complete.sum(1) > topk].tolist())
    best = torch.zeros_like(complete).scatter(1, ranked.indices[:, :topk], True)
    return best & complete


# --- Mixture of experts ---


def moe(
    w: Part, config: Config, hashed: bool, x: Tensor, tokens: Tensor, margins: Margins | None
) -> Tensor:
    topk = config["num_experts_per_tok"]
    scores = F.softplus(x @ w["gate.weight"].T).sqrt()
    if hashed:
        chosen = w["gate.tid2eid"][tokens]
    else:
        ranked = (scores + w["gate.bias"]).sort(1, descending=True)
        chosen = ranked.indices[:, :topk]
        if margins is not None and scores.shape[1] > topk:
            gaps = ranked.values[:, topk - 1] - ranked.values[:, topk]
            margins.experts.extend(gaps.tolist())
    if margins is not None:
        margins.chosen.append(chosen)
    share = scores.gather(1, chosen)
    share = share / share.sum(1, keepdim=True) * config["routed_scaling_factor"]
    out = swiglu(w.under("shared_experts."), config, x)
    for e in range(config["n_routed_experts"]):
        weight = (share * (chosen == e)).sum(1, keepdim=True)
        out = out + swiglu(w.under(f"experts.{e}."), config, x, weight)
    return out


def swiglu(w: Part, config: Config, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """`weight` [T,1], the routing weight, multiplies the hidden values before w2 rounds them."""
    limit = config["swiglu_limit"]
    gate = linear(w, "w1", config, x).clamp(max=limit)
    up = linear(w, "w3", config, x).clamp(-limit, limit)
    hidden = F.silu(gate) * up
    return linear(w, "w2", config, hidden if weight is None else hidden * weight)


# --- Projections and their roundings ---


def linear(w: Part, name: str, config: Config, x: Tensor) -> Tensor:
    """A projection whose weight the checkpoint stores in FP8 or FP4: its input is rounded."""
    return rounded(x, config) @ w[name + ".weight"].T


def rounded(x: Tensor, config: Config, group: int = 128) -> Tensor:
    """To E4M3, with a power-of-two scale for each `group` values: as trained; else as it is."""
    if not config.get("as_trained"):
        return x
    parts = []
    for part in x.split(group, -1):
        amax = part.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        mantissa, exponent = torch.frexp(amax / 448)
        scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
        parts.append((part / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)
    return torch.cat(parts, -1)


def stored(row: Tensor, config: Config) -> Tensor:
    """A row of the cache: the part without rope is rounded, 64 values a scale."""
    nope = row.shape[-1] - config["qk_rope_head_dim"]
    return torch.cat([rounded(row[..., :nope], config, 64), row[..., nope:]], -1)


# --- Norm and rotary embedding ---


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def rope(x: Tensor, positions: Tensor, config: Config, ratio: int) -> Tensor:
    """Rotate the last qk_rope_head_dim values of x [T,...,C], neighbours in pairs."""
    width = config["qk_rope_head_dim"]
    angle = (positions[:, None].float() * frequencies(config, ratio)).to(x.dtype)
    angle = angle.view(angle.shape[0], *[1] * (x.dim() - 2), width // 2)
    a, b = x[..., -width::2], x[..., -width + 1 :: 2]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return torch.cat([x[..., :-width], turned.flatten(-2)], -1)


def frequencies(config: Config, ratio: int) -> Tensor:
    """[width/2] float32; compressed layers: another base, and YaRN (Peng et al. 2023)."""
    width = config["qk_rope_head_dim"]
    theta = config["compress_rope_theta"] if ratio else config["rope_theta"]
    plain = 1 / theta ** (torch.arange(0, width, 2).float() / width)
    if not ratio:
        return plain
    yarn = config["rope_scaling"]

    def pair_with(turns: float) -> float:
        """Which pair turns this often within the original context."""
        context = yarn["original_max_position_embeddings"]
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_with(yarn["beta_slow"])), width - 1)
    stretched = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - stretched) + plain / yarn["factor"] * stretched
