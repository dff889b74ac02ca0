"""DeepSeek-V4.1's text model as its formulas: one sequence, no cache, no batching.

This is a definition for the tests, to be read beside the authors' inference/model.py and
inference/engram.py (revision dba1be0a). It takes the values of config.json under their official
names and plain weights under the checkpoint's names, and computes in the dtype of the weights:
float64 for a definition.

`roundings` applies what the model was trained with: window rows, entries, index queries and keys
rounded as their caches store them, and the inputs of FP8 and FP4 weights rounded to E4M3. The
weights are given dequantised.

The authors keep activations in bfloat16, which this file does not. Float32 inside of an operation:
norms, mHC, rope, the router, the pair compressor up to its norm, the experts between w1 and w2, an
Engram's gate, the attention's softmax, the head. In bfloat16: the indexer's products and scores,
what the ratio-1 compressor, wk and weights_proj compute, and wo_a.

Legend: T tokens, D hidden, H residual streams, A heads, C head_dim, W entries, V vocabulary,
G rows of a DSpark block, K drafts, N rows of an Engram table that one token reads.
"""

import enum
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Config = Mapping[str, Any]


class Roundings(enum.Enum):
    """Which of the trained roundings apply; nemo-automodel has those of the caches alone."""

    NONE = enum.auto()
    CACHES = enum.auto()
    ALL = enum.auto()


@dataclass
class Output:
    """What the model computes of one text.

    Attributes:
        logits: [T,V].
        streams: [T,H,D] at the attention input of each layer, after its Engram; then those after
            the last layer.
        selections: of each layer, which entries each token attends to [T,W] bool; None for a
            layer that has its window alone.
        features: what DSpark reads [T,3D]: the streams' means at the attention inputs of
            dspark_target_layer_ids, one after the other.
        entries: of each KV source, its entries and its index keys.
    """

    logits: Tensor
    streams: list[Tensor]
    selections: list[Tensor | None]
    features: Tensor
    entries: dict[int, tuple[Tensor, Tensor]]


@dataclass
class Replay:
    """What is computed of a text whose first tokens are cached, by the authors' published scheme.

    The values of tokens before `tail` mean nothing.

    Attributes:
        cached: number of tokens whose entries are those of `entries`.
        first: the first token that windows have, in the layers before the last KV source.
        tail: the first one from there on. These layers compute no earlier token, except that the
            KV source writes its entries.
        entries: what another run made of the cached tokens (`Output.entries`).
    """

    cached: int = 0
    first: int = 0
    tail: int = 0
    entries: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Block:
    """The results of one DSpark pass.

    Attributes:
        hidden: [G,D], collapsed and not normalised; the confidence head reads it so.
        logits: [K,V], with the Markov head's share: what each draft is chosen from.
        confidences: [K], before the sigmoid.
    """

    hidden: Tensor
    logits: Tensor
    confidences: Tensor


class Part:
    """The weights under a prefix, with the configuration and the roundings."""

    def __init__(
        self, weights: Weights, config: Config, roundings: Roundings, prefix: str = ""
    ) -> None:
        self.weights, self.config, self.roundings, self.prefix = weights, config, roundings, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def under(self, prefix: str) -> "Part":
        return Part(self.weights, self.config, self.roundings, self.prefix + prefix)


@dataclass
class Shared:
    """The results of attention layers that later layers use.

    Attributes:
        entries: the newest KV source's [W,C], with rope, rounded.
        keys: its index keys [W, index_head_dim].
        ratio: its compression ratio.
        selection: the newest index source's [T,W] bool.
        candidates: the candidate source's [T,W] bool.
        replay: what is cached.
        own: of each KV source so far, its entries and keys.
    """

    entries: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    ratio: int = 0
    selection: Tensor = field(default_factory=lambda: torch.empty(0))
    candidates: Tensor = field(default_factory=lambda: torch.empty(0))
    replay: Replay = field(default_factory=Replay)
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def text_config(config: Config) -> Config:
    """The text model's values of a config.json, nested or not."""
    nested: Config = config.get("text_config", config)
    return nested


def forward(
    weights: Weights,
    config: Config,
    ids: Sequence[int],
    compressed: Sequence[int],
    roundings: Roundings = Roundings.NONE,
    image: Sequence[bool] | None = None,
    replay: Replay | None = None,
) -> Output:
    """The model of one text.

    Args:
        compressed: the Engram's token map (see `token_map`).
        image: which tokens belong to an image span; none by default. Their embeddings are those
            of their ids.
        replay: None: all layers compute all tokens.
    """
    config = text_config(config)
    model = Part(weights, config, roundings)
    tokens, images = torch.tensor(ids), torch.tensor(image or [False] * len(ids))
    streams = weights["embed.weight"][tokens][:, None].expand(-1, config["hc_mult"], -1)
    pre = first_pre(streams)
    shared = Shared(replay=replay or Replay())
    captured, selections = [], []
    for i in range(config["num_hidden_layers"]):
        w = model.under(f"layers.{i}.")
        if i in config["engram_layer_ids"]:
            rows = engram_rows(config, i, ids, compressed, images.tolist())
            streams = engram(w.under("engram."), streams, rows, images)
        captured.append(streams)
        x, post, comb, attention_pre = mhc(w, "hc_attn_", streams, pre)
        x = rms_norm(x, w["attn_norm.weight"], config)
        streams = mhc_post(attention(w.under("attn."), i, x, shared), streams, post, comb)
        selections.append(shared.selection if config["compress_ratios"][i] else None)
        x, post, comb, pre = mhc(w, "hc_ffn_", streams, attention_pre)
        x = rms_norm(x, w["ffn_norm.weight"], config)
        top = config["num_experts_per_tok"]
        streams = mhc_post(moe(w.under("ffn."), x, top, images), streams, post, comb)
    hidden = rms_norm(collapse(streams, pre), weights["norm.weight"], config)
    features = [captured[i].mean(1) for i in config["dspark_target_layer_ids"]]
    logits = hidden @ weights["head.weight"].T
    return Output(logits, [*captured, streams], selections, torch.cat(features, 1), shared.own)


# --- Residual streams (mHC) ---


def first_pre(streams: Tensor) -> Tensor:
    """The first sublayer reads residual stream 0; all of them are equal there."""
    pre = streams.new_zeros(streams.shape[:2])
    pre[:, 0] = 1
    return pre


def mhc(w: Part, hc: str, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sublayer's input by the *previous* sublayer's `pre`, and this one's post, comb and pre.

    The norm's mean is over all H·D values of a token; the authors multiply by fn first and by the
    norm's factor after. The Sinkhorn is V4's: softmax of the rows,
    plus eps; then the columns, and hc_sinkhorn_iters - 1 times the rows and the columns, each
    divided by its sum plus eps.
    """
    n, eps = w.config["hc_mult"], w.config["hc_eps"]
    mixes = rms_norm(streams.flatten(1), None, w.config) @ w[hc + "fn"].T
    scale, base = w[hc + "scale"], w[hc + "base"]
    next_pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(w.config["hc_sinkhorn_iters"] - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return collapse(streams, pre), post, comb, next_pre


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("th,thd->td", pre, streams)


def mhc_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """comb [T, from, to]."""
    return post[:, :, None] * out[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)


# --- Attention ---


def attention(w: Part, layer: int, x: Tensor, shared: Shared) -> Tensor:
    """A KV source and an index source first replace what they own in `shared`."""
    config, positions = w.config, torch.arange(len(x))
    ratio = config["compress_ratios"][layer]
    q_lora = rms_norm(linear(w, "wq_a", x), w["q_norm.weight"], config)
    q = queries(w, q_lora, positions, ratio)
    keys = window_rows(w, x, positions, ratio)
    distance = positions[:, None] - positions
    in_tail = layer >= max(config["kv_source_layer_ids"], default=layer + 1)
    first = shared.replay.tail if in_tail else shared.replay.first
    visible = (distance >= 0) & (distance < config["sliding_window"]) & (positions >= first)
    if ratio:
        if layer in config["kv_source_layer_ids"]:
            latent = compress(w.under("compressor."), ratio, x)
            first_tokens = torch.arange(len(latent)) * ratio
            entries = rope(latent, first_tokens, config, ratio)
            shared.entries, shared.ratio = round_entries(entries, w.roundings), ratio
            shared.keys = index_keys(w.under("indexer."), latent, first_tokens, ratio)
            if count := shared.replay.cached // ratio:
                cached = [part[:count] for part in shared.replay.entries[layer]]
                shared.entries = torch.cat([cached[0], shared.entries[count:]])
                shared.keys = torch.cat([cached[1], shared.keys[count:]])
            shared.own[layer] = shared.entries, shared.keys
        assert shared.ratio == ratio, f"layer {layer} has no KV source of its ratio"
        if layer in config["index_source_layer_ids"]:
            scores = index_scores(w.under("indexer."), x, q_lora, ratio, shared.keys)
            select(config, layer, scores, shared)
        keys = torch.cat([keys, shared.entries])
        visible = torch.cat([visible, shared.selection], 1)
    return project(w, attend(w, q, keys, visible), positions, ratio)


def queries(w: Part, q_lora: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """[T,A,C]. Unlike V4's, no norm follows wq_b."""
    q = linear(w, "wq_b", q_lora).view(len(q_lora), -1, w.config["head_dim"])
    return rope(q, positions, w.config, ratio)


def window_rows(w: Part, x: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """[T,C], rounded together with their rope values; the rope is that of the layer's ratio."""
    kv = rms_norm(linear(w, "wkv", x), w["kv_norm.weight"], w.config)
    return round_window_rows(rope(kv, positions, w.config, ratio), w.roundings)


def attend(w: Part, q: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """[T,A,C]: one softmax over all visible rows and the head's sink, which has no value."""
    logits = torch.einsum("tac,kc->tak", q, keys) / math.sqrt(w.config["head_dim"])
    logits = logits.masked_fill(~visible[:, None], -math.inf)
    sink = w["attn_sink"].expand(len(q), -1)[:, :, None]
    shares = torch.cat([logits, sink], 2).softmax(2)[:, :, :-1]
    return torch.einsum("tak,kc->tac", shares, keys)


def project(w: Part, out: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """Undo the rope, and project each group of heads by itself; wo_a's input is not rounded."""
    out = rope(out, -positions, w.config, ratio).flatten(1)
    groups = w.config["o_groups"]
    wo_a = w["wo_a.weight"].view(groups, w.config["o_lora_rank"], -1)
    grouped = torch.einsum("tgi,goi->tgo", out.unflatten(1, (groups, -1)), wo_a)
    return linear(w, "wo_b", grouped.flatten(1))


def compress(w: Part, ratio: int, x: Tensor) -> Tensor:
    """The latents [W,C] of all complete groups of `ratio` tokens, without rope.

    The softmax is over the tokens of a group, for each value by itself. The authors' weights and
    inputs are float32 here for ratio 2 and bfloat16 for ratio 1, never FP8.
    """
    groups = x[: len(x) // ratio * ratio].unflatten(0, (len(x) // ratio, ratio))
    kv = groups @ w["wkv.weight"].T
    if ratio > 1:
        kv = (groups @ w["wgate.weight"].T).softmax(1) * kv
    kv = kv.sum(1)
    return rms_norm(kv, w["norm.weight"], w.config)


# --- Indexer ---


def index_keys(w: Part, latent: Tensor, first_tokens: Tensor, ratio: int) -> Tensor:
    """[W, index_head_dim]; the norm is before the rope, which turns the last values."""
    keys = rms_norm(latent @ w["wk.weight"].T, w["k_norm.weight"], w.config)
    return round_index(rope(keys, first_tokens, w.config, ratio), w.roundings)


def index_scores(w: Part, x: Tensor, q_lora: Tensor, ratio: int, keys: Tensor) -> Tensor:
    """[T,W]: the score of every entry, by this layer's queries and the KV source's keys."""
    heads, dim = w.config["index_n_heads"], w.config["index_head_dim"]
    q = linear(w, "wq_b", q_lora).view(-1, heads, dim)
    q = round_index(rope(q, torch.arange(len(x)), w.config, ratio), w.roundings)
    weight = x @ w["weights_proj.weight"].T / math.sqrt(dim * heads)
    return torch.einsum("th,thw->tw", weight, torch.einsum("thc,wc->thw", q, keys).relu_())


def select(config: Config, layer: int, scores: Tensor, shared: Shared) -> None:
    """Replace the selection and, at the candidate source, the candidates.

    Layers after the candidate source choose among the candidates; the source itself among all.
    If fewer candidates than index_topk are visible, the authors' code fills the selection with
    other visible entries, and nemo-automodel does not. The released sizes cannot tell: 2048
    blocks of 8 hold more than 512 entries, or all that are visible.
    """
    count = scores.shape[1]
    visible_counts = (torch.arange(len(scores)) + 1) // shared.ratio
    visible = torch.arange(count) < visible_counts[:, None]
    scores = scores.masked_fill(~visible, -math.inf)
    source = config["candidate_source_layer_id"]
    if layer == source:
        shared.candidates = candidates(config, scores, visible_counts)
    elif 0 <= source < layer:
        scores = scores.masked_fill(~shared.candidates, -math.inf)
    shared.selection = best(scores, config["index_topk"])


def candidates(config: Config, scores: Tensor, visible_counts: Tensor) -> Tensor:
    """[T,W]: the entries of the best blocks; the newest visible entry's block is always one."""
    size = config["candidate_block_size"]
    blocks = F.pad(scores, (0, -scores.shape[1] % size), value=-math.inf).unflatten(1, (-1, size))
    of_blocks = blocks.amax(2)
    newest = torch.div(visible_counts - 1, size, rounding_mode="floor")
    of_blocks[torch.arange(of_blocks.shape[1]) == newest[:, None]] = math.inf
    kept = best(of_blocks, config["candidate_topk_blocks"])
    return kept.repeat_interleave(size, 1)[:, : scores.shape[1]]


def best(scores: Tensor, topk: int) -> Tensor:
    """Which are among the topk highest of their row, [T,W] bool; never one of -inf."""
    highest = scores.topk(min(topk, scores.shape[1]), 1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, highest, True) & (
        scores > -math.inf
    )


# --- Mixture of experts ---


def moe(w: Part, x: Tensor, topk: int, images: Tensor) -> Tensor:
    """The bias decides which experts, not their weights. Image tokens have a bias of their own."""
    scores = F.softplus(x @ w["gate.weight"].T).sqrt()
    bias = torch.where(images[:, None], w["gate.bias_vl"], w["gate.bias"])
    chosen = (scores + bias).topk(topk, 1).indices
    share = scores.gather(1, chosen)
    share = share / (share.sum(1, keepdim=True) + 1e-20) * w.config["routed_scaling_factor"]
    out = swiglu(w.under("shared_experts."), x)
    for e in range(len(scores[0])):
        weight = (share * (chosen == e)).sum(1, keepdim=True)
        out = out + swiglu(w.under(f"experts.{e}."), x, weight)
    return out


def swiglu(w: Part, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """The routing weight [T,1] multiplies the hidden values before w2's input is rounded."""
    limit = w.config["swiglu_limit"]
    gate = linear(w, "w1", x).clamp(max=limit)
    up = linear(w, "w3", x).clamp(-limit, limit)
    hidden = F.silu(gate) * up
    return linear(w, "w2", hidden if weight is None else weight * hidden)


# --- Engram ---


def token_map(texts: Sequence[str], tokens: Sequence[str]) -> list[int]:
    """The compressed id of each token. Tokens with the same normalised text share one.

    The authors normalise with the tokenizers library, whose steps differ from Python's own in
    three ways: marks of every category are stripped; each character becomes lower
    case by itself, so that a final sigma is no other letter; and stripping leaves the separators
    U+001C to U+001F. Its tables are of an older Unicode, too, but no token of DeepSeek's vocabulary
    has a newer character. A text that normalises to nothing stays as it is.

    Args:
        texts: what each id decodes to by itself, special tokens included.
        tokens: the vocabulary's entry of each id, the key where the text has a U+FFFD.
    """
    numbers: dict[str, int] = {}
    keys = (
        token if "\ufffd" in text else normalised(text) or text
        for text, token in zip(texts, tokens, strict=True)
    )
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def normalised(text: str) -> str:
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c.lower() for c in text if not unicodedata.category(c).startswith("M"))
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else re.sub(r"^[^\S\x1c-\x1f]+|[^\S\x1c-\x1f]+$", "", text)


def engram_primes(config: Config) -> dict[int, list[int]]:
    """Of each Engram layer, the sizes [N] of its parts of the table: by n-gram, then by head.

    They are the primes from engram_vocab_size upwards. (The authors begin anew for each n-gram, and
    pass over the primes that are taken, which are always all of the smaller ones.)
    """
    size, primes = config["engram_vocab_size"], {}
    for layer in config["engram_layer_ids"]:
        sizes: list[int] = []
        while len(sizes) < (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]:
            if all(size % i for i in range(2, math.isqrt(size) + 1)):
                sizes.append(size)
            size += 1
        primes[layer] = sizes
    return primes


def engram_multipliers(config: Config, layer: int) -> list[int]:
    """Odd numbers, one a token of the longest n-gram; their products stay below 2^63.

    NumPy does not promise that another version draws the same ones.
    """
    bound = max(1, (2**63 - 1) // config["engram_compressed_vocab_size"] // 2)
    draw = np.random.default_rng(10007 * layer)
    numbers = draw.integers(0, bound, config["engram_max_ngram_size"], dtype=np.int64)
    return [2 * int(number) + 1 for number in numbers]


def engram_rows(
    config: Config,
    layer: int,
    ids: Sequence[int],
    compressed: Sequence[int],
    images: Sequence[bool],
) -> Tensor:
    """The rows [T,N] of the layer's table that each token reads.

    An n-gram ends at the token. Before the text's start, and from an image token on backwards,
    its tokens are the compressed id of engram_pad_token_id.
    """
    pad = compressed[config["engram_pad_token_id"]]
    sizes, multipliers = engram_primes(config)[layer], engram_multipliers(config, layer)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    heads = config["engram_n_heads"]
    rows = []
    for t in range(len(ids)):
        hashed, blocked, row = 0, False, []
        for back, multiplier in enumerate(multipliers):
            blocked = blocked or back > t or images[t - back]
            hashed ^= (pad if blocked else compressed[ids[t - back]]) * multiplier
            if back:
                part = range((back - 1) * heads, back * heads)
                row += [starts[i] + hashed % sizes[i] for i in part]
        rows.append(row)
    return torch.tensor(rows)


def engram(w: Part, streams: Tensor, rows: Tensor, images: Tensor) -> Tensor:
    """Add the gated value to every residual stream; image tokens stay as they are.

    wkv gives a key for each stream and, after all keys, one value. Each norm's mean is over the D
    values of one stream. The root's sign is the dot product's; the sign of 0 is positive.
    """
    eps, dim = w.config["rms_norm_eps"], streams.shape[2]
    kv = linear(w, "wkv", w["embed.weight"][rows].flatten(1))
    key, value = kv[:, :-dim].view(streams.shape), kv[:, -dim:]
    rstd = torch.rsqrt(streams.square().mean(2) + eps) * torch.rsqrt(key.square().mean(2) + eps)
    dot = (streams * w["q_weight"] * w["k_weight"] * key).sum(2) * rstd / math.sqrt(dim)
    gate = torch.sigmoid(dot.abs().clamp(min=1e-6).sqrt().copysign(dot))
    return streams + gate.masked_fill(images[:, None], 0)[:, :, None] * value[:, None]


# --- DSpark ---


def draft(
    weights: Weights,
    config: Config,
    features: Tensor,
    newest: int,
    drafts: Sequence[int],
    roundings: Roundings = Roundings.NONE,
) -> Block:
    """Compute a block; returns its drafts' logits and confidences, given the drafts before each.

    The block is the newest token, whose features are not known, and noise tokens; it begins at
    the position after the last feature. Row k gives draft k + 1.

    Args:
        features: of all tokens before the newest (`Output.features`).
        drafts: x_1 to x_K; the Markov head reads x_0, the newest, to x_(K-1).
    """
    config = text_config(config)
    model = Part(weights, config, roundings)
    stages, count = config["num_nextn_predict_layers"], config["dspark_block_size"]
    first, last = model.under("mtp.0."), model.under(f"mtp.{stages - 1}.")
    main = rms_norm(linear(first, "main_proj", features), first["main_norm.weight"], config)
    ids = torch.tensor([newest] + [config["dspark_noise_token_id"]] * (count - 1))
    streams = weights["embed.weight"][ids][:, None].expand(-1, config["hc_mult"], -1)
    pre = first_pre(streams)
    for i in range(stages):
        w = model.under(f"mtp.{i}.")
        x, post, comb, attention_pre = mhc(w, "hc_attn_", streams, pre)
        x = rms_norm(x, w["attn_norm.weight"], config)
        streams = mhc_post(block_attention(w.under("attn."), x, main), streams, post, comb)
        x, post, comb, pre = mhc(w, "hc_ffn_", streams, attention_pre)
        x = rms_norm(x, w["ffn_norm.weight"], config)
        top = config["dspark_num_experts_per_tok"]
        out = moe(w.under("ffn."), x, top, torch.zeros(len(x), dtype=torch.bool))
        streams = mhc_post(out, streams, post, comb)
    hidden = collapse(streams, pre)
    base = rms_norm(hidden, last["norm.weight"], config) @ weights["head.weight"].T
    before = last["markov_head.embed.weight"][torch.tensor([newest, *drafts[:-1]])]
    logits = base[: len(before)] + before @ last["markov_head.head.weight"].T
    seen = torch.cat([hidden[: len(before)], before], 1)
    return Block(hidden, logits, seen @ last["confidence_head.proj.weight"][0])


def block_attention(w: Part, x: Tensor, main: Tensor) -> Tensor:
    """Every row sees the last sliding_window rows before the block, and the whole block."""
    positions = torch.arange(len(main) + len(x))
    keys = window_rows(w, torch.cat([main, x]), positions, 0)
    keys = keys[max(0, len(main) - w.config["sliding_window"]) :]
    q_lora = rms_norm(linear(w, "wq_a", x), w["q_norm.weight"], w.config)
    positions = positions[len(main) :]
    visible = torch.ones(len(x), len(keys), dtype=torch.bool)
    out = attend(w, queries(w, q_lora, positions, 0), keys, visible)
    return project(w, out, positions, 0)


# --- Projections and roundings ---


def linear(w: Part, name: str, x: Tensor) -> Tensor:
    """A projection whose weight the checkpoint stores in FP8 or FP4: its input is rounded."""
    if w.roundings is Roundings.ALL:
        x = to_e4m3(x, 32)
    return x @ w[name + ".weight"].T


def round_window_rows(rows: Tensor, roundings: Roundings) -> Tensor:
    return rows if roundings is Roundings.NONE else to_e4m3(rows, 32)


def round_entries(entries: Tensor, roundings: Roundings) -> Tensor:
    """To e2m1, with an E4M3 scale for each 16 values."""
    if roundings is Roundings.NONE:
        return entries
    groups = entries.unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9)
    scale = nearest(amax / 6, mantissa_bits=3, smallest_exponent=-6, largest=448)
    return (e2m1(groups / scale) * scale).flatten(-2)


def round_index(x: Tensor, roundings: Roundings) -> Tensor:
    """Index queries or keys: to e2m1, with a power-of-two scale for each 32 values."""
    if roundings is Roundings.NONE:
        return x
    groups = x.unflatten(-1, (-1, 32))
    scale = power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    return (e2m1(groups / scale) * scale).flatten(-2)


def to_e4m3(x: Tensor, group: int) -> Tensor:
    """To E4M3, with a power-of-two scale for each `group` values."""
    groups = x.unflatten(-1, (-1, group))
    scale = power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    rounded = nearest(groups / scale, mantissa_bits=3, smallest_exponent=-6, largest=448)
    return (rounded * scale).flatten(-2)


def e2m1(x: Tensor) -> Tensor:
    return nearest(x, mantissa_bits=1, smallest_exponent=0, largest=6)


def nearest(x: Tensor, mantissa_bits: int, smallest_exponent: int, largest: float) -> Tensor:
    """The nearest value of a small float format; of two as near, the one with an even mantissa."""
    exponent = (torch.frexp(x).exponent - 1).clamp(min=smallest_exponent)
    step = torch.ldexp(torch.ones_like(x), exponent - mantissa_bits)
    return ((x / step).round() * step).clamp(-largest, largest)


def power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


# --- Norm and rotary embedding ---


def rms_norm(x: Tensor, weight: Tensor | None, config: Config) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"])
    return normed if weight is None else normed * weight


def rope(x: Tensor, positions: Tensor, config: Config, ratio: int) -> Tensor:
    """Rotate the last qk_rope_head_dim values of x [T,...,C], neighbours in pairs.

    The angles are the float32 products of positions and float32 frequencies. Nothing scales the
    result: YaRN's attention factor is not used.
    """
    width = config["qk_rope_head_dim"]
    angle = (positions[:, None].float() * frequencies(config, ratio)).to(x.dtype)
    angle = angle.view(len(angle), *[1] * (x.dim() - 2), width // 2)
    a, b = x[..., -width::2], x[..., -width + 1 :: 2]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return torch.cat([x[..., :-width], turned.flatten(-2)], -1)


def frequencies(config: Config, ratio: int) -> Tensor:
    """[width/2] float32; layers with entries have another base, and YaRN (Peng et al. 2023)."""
    width = config["qk_rope_head_dim"]
    theta = config["compress_rope_theta"] if ratio else config["rope_theta"]
    plain = 1 / theta ** (torch.arange(0, width, 2).float() / width)
    if not ratio:
        return plain
    yarn = config["rope_scaling"]

    def pair_with(turns: float) -> float:
        """Which pair turns this often within the original context."""
        context = yarn["original_max_position_embeddings"]
        return float(width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta)))

    low = max(math.floor(pair_with(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_with(yarn["beta_slow"])), width - 1)
    stretched = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - stretched) + plain / yarn["factor"] * stretched
