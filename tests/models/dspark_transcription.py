"""The DSpark draft head as its formulas: one sequence, no cache, no batching.

Written from the paper (arXiv 2607.05147) as a second definition for the tests. It works in the
dtype of the weights that it is given, and shares the layers' formulas with transcription.py.

Legend: T tokens, G rows of a block, D hidden, H residual streams, A heads, C head_dim, W window.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .transcription import (
    Config,
    Part,
    Weights,
    after_layers,
    linear,
    mhc_post,
    mhc_pre,
    moe,
    rms_norm,
    rope,
    rounded,
    stored,
)

STAGES = 3
LAST = "mtp.2."


@dataclass
class Block:
    """What a draft pass computes.

    Attributes:
        logits: [K,V]: what each draft is chosen from.
        confidences: [K].
    """

    logits: Tensor
    confidences: Tensor


def main_feature(weights: Weights, config: Config, ids: list[int]) -> Tensor:
    """m [T,D] of every token of a text."""
    after = after_layers(weights, config, ids)
    means = [after[i].mean(1) for i in config["dspark_target_layer_ids"]]
    return main_of(weights, config, torch.cat(means, 1))


def main_of(weights: Weights, config: Config, features: Tensor) -> Tensor:
    """m [T,D] of tokens with these features: the means of their streams after the target layers."""
    projected = linear(Part(weights, "mtp.0."), "main_proj", config, features)
    return rms_norm(projected, weights["mtp.0.main_norm.weight"], config["rms_norm_eps"])


def context_rows(weights: Weights, config: Config, main: Tensor, first: int = 0) -> list[Tensor]:
    """Each stage's rows [T,C] of the tokens at positions first, first + 1, ..."""
    positions = torch.arange(first, first + len(main))
    return [
        kv_rows(Part(weights, f"mtp.{i}.attn."), config, main, positions) for i in range(STAGES)
    ]


def kv_rows(w: Part, config: Config, x: Tensor, positions: Tensor) -> Tensor:
    kv = rms_norm(linear(w, "wkv", config, x), w["kv_norm.weight"], config["rms_norm_eps"])
    return stored(rope(kv, positions, config, 0), config)


def draft(
    weights: Weights, config: Config, rows: list[Tensor], newest: int, drafts: list[int]
) -> Block:
    """The logits and the confidence of each draft, given the drafts before it.

    Args:
        rows: each stage's rows of all tokens before the newest one.
        newest: the newest token x_0, which the model has not computed.
        drafts: x_1, x_2, ... x_K; the pass computes the whole block for any K.
    """
    streams = block_streams(weights, config, rows, newest)
    w, eps = Part(weights, LAST), config["rms_norm_eps"]
    mixes = rms_norm(streams.flatten(1), None, eps) @ w["hc_head_fn"].T
    shares = torch.sigmoid(mixes * w["hc_head_scale"] + w["hc_head_base"]) + config["hc_eps"]
    hidden = torch.einsum("gh,ghd->gd", shares, streams)
    base = rms_norm(hidden, w["norm.weight"], eps) @ weights["head.weight"].T
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    first = 0 if config.get("sample_from_anchor", True) else 1
    logits, confidences = [], []
    for k, before in enumerate([newest, *drafts[:-1]]):
        logits.append(base[first + k] + w2 @ w1[before])
        if config.get("enable_confidence_head", True):
            seen = hidden[first + k]
            if config.get("confidence_head_with_markov", True):
                seen = torch.cat([seen, w1[before]])
            confidences.append(torch.sigmoid(seen @ w["confidence_head.proj.weight"][0]))
    return Block(torch.stack(logits), torch.stack(confidences) if confidences else torch.empty(0))


def block_streams(weights: Weights, config: Config, rows: list[Tensor], newest: int) -> Tensor:
    """The streams [G,H,D] of the block after the last stage."""
    count = config["dspark_block_size"] + (not config.get("sample_from_anchor", True))
    ids = torch.tensor([newest, *[config["dspark_noise_token_id"]] * (count - 1)])
    streams = weights["embed.weight"][ids][:, None].expand(-1, config["hc_mult"], -1)
    sizes = {
        name: config.get(f"dspark_{name}") or config[name]
        for name in ("n_routed_experts", "num_experts_per_tok")
    }
    for i in range(STAGES):
        w = Part(weights, f"mtp.{i}.")
        eps = config["rms_norm_eps"]
        x, post, comb = mhc_pre(w, "hc_attn_", config, streams)
        x = rms_norm(x, w["attn_norm.weight"], eps)
        out = block_attention(w.under("attn."), config, x, rows[i])
        streams = mhc_post(out, streams, post, comb)
        x, post, comb = mhc_pre(w, "hc_ffn_", config, streams)
        x = rms_norm(x, w["ffn_norm.weight"], eps)
        out = moe(w.under("ffn."), {**config, **sizes}, False, x, ids, None)
        streams = mhc_post(out, streams, post, comb)
    return streams


def block_attention(w: Part, config: Config, x: Tensor, before: Tensor) -> Tensor:
    """Every row sees the last W rows before the block, and the whole block."""
    eps, heads, dim = config["rms_norm_eps"], config["num_attention_heads"], config["head_dim"]
    positions = torch.arange(len(before), len(before) + len(x))
    q_lora = rms_norm(linear(w, "wq_a", config, x), w["q_norm.weight"], eps)
    q = rms_norm(linear(w, "wq_b", config, q_lora).view(len(x), heads, dim), None, eps)
    q = rope(q, positions, config, 0)
    window = before[max(0, len(before) - config["sliding_window"]) :]
    keys = torch.cat([window, kv_rows(w, config, x, positions)])
    logits = torch.einsum("gac,kc->gak", q, keys) / math.sqrt(dim)
    sink = w["attn_sink"].expand(len(x), -1)[:, :, None]
    shares = torch.cat([logits, sink], 2).softmax(2)[:, :, :-1]
    out = rope(torch.einsum("gak,kc->gac", shares, keys), -positions, config, 0)
    wo_a = w["wo_a.weight"].view(config["o_groups"], config["o_lora_rank"], -1)
    out = out.flatten(1).unflatten(1, (config["o_groups"], wo_a.shape[2]))
    if config.get("wo_a_input", "fp8") == "fp8":
        out = rounded(out, config)
    return linear(w, "wo_b", config, torch.einsum("tgi,goi->tgo", out, wo_a).flatten(1))
