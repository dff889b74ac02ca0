"""DeepSeek-V4 for training: the whole architecture over [B, T] at once, differentiable, in
plain PyTorch.

It is not an inference engine: it keeps no cache, computes every expert for every token, and
scores every compressed entry.
Parameters have the checkpoint's names, except that the experts of a layer are stacked
(`ffn.experts.w1.weight` [E, I, D]).

Shapes: B sequences, T tokens (a multiple of 128), D hidden, A heads, K head_dim, H residual
streams, W compressed entries, E experts, I moe_intermediate_size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rounding import round_activation, round_fp4_weight, round_fp8_weight
from sinkhorn import sinkhorn
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The fields of config.json that the model reads, under their own names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    compress_ratios: list[int]
    num_hash_layers: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: dict[str, Any]
    max_position_embeddings: int
    rms_norm_eps: float

    @classmethod
    def load(cls, path: Path | str) -> DemoConfig:
        values = json.loads(Path(path).read_text())
        return cls(**{f.name: values[f.name] for f in fields(cls)})


class Switches(NamedTuple):
    """Bool scalars on the device, so that changing one recompiles nothing."""

    rounding: Tensor  # round weights and activations as the shipped model does
    sparse: Tensor  # C4 attention sees the indexer's top-k entries only


class Batch(NamedTuple):
    tokens: Tensor  # [B, T] int64
    doc: Tensor  # [B, T] int32: a document's number; attention stays inside a document


class Output(NamedTuple):
    hidden: Tensor  # [B, T, D] after the last norm, input of the shared head
    mtp_hidden: Tensor  # [B, T, D] likewise of the MTP layer: position t predicts token t + 2
    index_loss: Tensor  # mean over C4 layers
    expert_load: Tensor  # [score-routed layers, E] share of the choices


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(x.dtype).float()
    return y.to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the interleaved pairs of the last 2 * cos.shape[-1] channels of x; cos and sin
    broadcast to x[..., pairs]."""
    rope_dim = 2 * cos.shape[-1]
    nope, rope = x[..., :-rope_dim], x[..., -rope_dim:].float().unflatten(-1, (-1, 2))
    even, odd = rope[..., 0], rope[..., 1]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((nope, rotated.to(x.dtype)), -1)


def rotary_frequencies(config: DemoConfig, compressed: bool) -> Tensor:
    """Inverse frequencies [rope/2]: theta plain, or compress_rope_theta under YaRN (without its
    magnitude factor)."""
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not compressed:
        return inverse
    yarn = config.rope_scaling
    original = yarn["original_max_position_embeddings"]

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(yarn["beta_fast"])), 0)
    high = min(math.ceil(correction(yarn["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    return inverse / yarn["factor"] * ramp + inverse * (1 - ramp)


class Rope(nn.Module):
    """cos and sin [max_position, rope/2] of one frequency set."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DemoConfig, compressed: bool) -> None:
        super().__init__()
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angle = positions[:, None] * rotary_frequencies(config, compressed)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, start: int, end: int, step: int) -> tuple[Tensor, Tensor]:
        return self.cos[start:end:step], self.sin[start:end:step]


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Fp8Linear(nn.Module):
    """A linear whose weight is shipped in FP8 and whose input is rounded to e4m3 per 1x128."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def rounded_weight(self, dtype: torch.dtype, switches: Switches) -> Tensor:
        return round_fp8_weight(self.weight, switches.rounding).to(dtype)

    def forward(self, x: Tensor, switches: Switches) -> Tensor:
        x = round_activation(x, 128, switches.rounding)
        return F.linear(x, self.rounded_weight(x.dtype, switches))


class Fp32Linear(nn.Module):
    """A linear whose weight is shipped in BF16 and whose output stays in fp32 (compressors,
    router, indexer weights)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.to(x.dtype).float())


class HyperConnection(nn.Module):
    """mHC of one block: `pre` collapses the streams, `post` spreads the block's output and
    mixes the streams."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        h = config.hc_mult
        self.config = config
        self.fn = nn.Parameter(torch.randn(h * (2 + h), h * config.hidden_size) * 0.002)
        base = torch.zeros(h * (2 + h))
        base[2 * h :] = 4.0 * torch.eye(h).flatten()
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.ones(3))

    def pre(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [B, T, H, D] -> block input [B, T, D], post [B, T, H] and comb [B, T, H, H]
        in fp32."""
        h, eps = self.config.hc_mult, self.config.hc_eps
        flat = streams.flatten(-2).float()
        mixes = F.linear(flat, self.fn) * torch.rsqrt(
            flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps
        )
        pre = torch.sigmoid(mixes[..., :h] * self.scale[0] + self.base[:h]) + eps
        post = 2 * torch.sigmoid(mixes[..., h : 2 * h] * self.scale[1] + self.base[h : 2 * h])
        comb = (mixes[..., 2 * h :] * self.scale[2] + self.base[2 * h :]).unflatten(
            -1, (h, h)
        ).softmax(-1) + eps
        comb = sinkhorn(comb, self.config.hc_sinkhorn_iters, eps)
        return (pre.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype), post, comb

    def post(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """streams'_k = post_k * out + sum_j comb[j, k] * streams_j."""
        mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(-2)).sum(-3)
        return (mixed + post.unsqueeze(-1) * out.float().unsqueeze(-2)).to(streams.dtype)


class HyperHead(nn.Module):
    """Collapses the streams for the last norm. Its parameters are named hc_head_{fn,base,scale}
    in the checkpoint."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.fn = nn.Parameter(
            torch.randn(config.hc_mult, config.hc_mult * config.hidden_size) * 0.002
        )
        self.base = nn.Parameter(torch.zeros(config.hc_mult))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(-2).float()
        mixes = F.linear(flat, self.fn) * torch.rsqrt(
            flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps
        )
        weights = torch.sigmoid(mixes * self.scale + self.base) + self.config.hc_eps
        return (weights.unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype)


class Compressor(nn.Module):
    """One entry per `ratio` tokens: a gated mean of their kv; at ratio 4 also of the window
    before, in a second half."""

    def __init__(self, config: DemoConfig, ratio: int, dim: int) -> None:
        super().__init__()
        self.ratio, self.dim = ratio, dim
        width = 2 * dim if ratio == 4 else dim
        self.wkv = Fp32Linear(config.hidden_size, width)
        self.wgate = Fp32Linear(config.hidden_size, width)
        self.ape = nn.Parameter(torch.zeros(ratio, width))
        self.norm = Norm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, doc: Tensor, rope: Rope) -> Tensor:
        """x [B, T, D], doc [B, T] -> entries [B, T // ratio, dim] in x's dtype, after norm and
        rope."""
        T = x.shape[1]
        kv = self.wkv(x).unflatten(1, (-1, self.ratio))
        gate = self.wgate(x).unflatten(1, (-1, self.ratio)) + self.ape
        if self.ratio == 4:
            kv_before, kv = kv.split(self.dim, -1)
            gate_before, gate = gate.split(self.dim, -1)
            first = doc[:, :: self.ratio]
            joined = F.pad(first[:, 1:] == first[:, :-1], (1, 0), value=False)
            kv_before = F.pad(kv_before[:, :-1], (0, 0, 0, 0, 1, 0))
            gate_before = F.pad(gate_before[:, :-1], (0, 0, 0, 0, 1, 0))
            gate_before = torch.where(joined[:, :, None, None], gate_before, float("-inf"))
            kv, gate = torch.cat((kv_before, kv), 2), torch.cat((gate_before, gate), 2)
        entries = self.norm((kv * gate.softmax(2)).sum(2)).to(x.dtype)
        return rotary(entries, *rope(0, T, self.ratio))


class Indexer(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = Fp8Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.weights_proj = Fp32Linear(config.hidden_size, config.index_n_heads)
        self.compressor = Compressor(config, 4, config.index_head_dim)

    def forward(
        self, x: Tensor, q_r: Tensor, doc: Tensor, rope: Rope, switches: Switches
    ) -> Tensor:
        """Scores [B, T, W] in fp32 of every C4 entry for every query, causal or not."""
        cos, sin = rope(0, x.shape[1], 1)
        q = self.wq_b(q_r, switches).unflatten(-1, (self.config.index_n_heads, -1))
        q = round_activation(rotary(q, cos[:, None], sin[:, None]), 128, switches.rounding)
        k = round_activation(self.compressor(x, doc, rope), 128, switches.rounding)
        scale = self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5
        weights = self.weights_proj(x) * scale
        scores = torch.matmul(q.flatten(1, 2), k.mT).unflatten(1, (-1, self.config.index_n_heads))
        return (F.relu(scores).float() * weights.unsqueeze(-1)).sum(2)


class Attention(nn.Module):
    def __init__(self, config: DemoConfig, ratio: int) -> None:
        super().__init__()
        self.config, self.ratio = config, ratio
        heads, dim, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.wq_a = Fp8Linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = Norm(config.q_lora_rank, eps)
        self.wq_b = Fp8Linear(config.q_lora_rank, heads * dim)
        self.wkv = Fp8Linear(config.hidden_size, dim)
        self.kv_norm = Norm(dim, eps)
        self.wo_a = Fp8Linear(heads * dim // config.o_groups, config.o_groups * config.o_lora_rank)
        self.wo_b = Fp8Linear(config.o_groups * config.o_lora_rank, config.hidden_size)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.compressor = Compressor(config, ratio, dim) if ratio else None
        self.indexer = Indexer(config) if ratio == 4 else None

    def round_nope(self, kv: Tensor, switches: Switches) -> Tensor:
        nope = kv.shape[-1] - self.config.qk_rope_head_dim
        return torch.cat(
            (round_activation(kv[..., :nope], 64, switches.rounding), kv[..., nope:]), -1
        )

    def window_scores(self, q: Tensor, kv: Tensor, doc: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, T, A, 2 * window] of the window, -inf outside it, and the keys [B, blocks,
        2 * window, K]."""
        window = self.config.sliding_window
        blocks = kv.unflatten(1, (-1, window))
        keys = torch.cat((F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks), 2)
        doc_q = doc.unflatten(1, (-1, window))
        doc_k = torch.cat((F.pad(doc_q[:, :-1], (0, 0, 1, 0), value=-1), doc_q), 2)
        i = torch.arange(window, device=q.device)[:, None] + window
        j = torch.arange(2 * window, device=q.device)[None, :]
        visible = (j <= i) & (j > i - window) & (doc_q[..., :, None] == doc_k[..., None, :])
        folded = q.unflatten(1, (-1, window)).flatten(2, 3)
        scores = torch.matmul(folded, keys.mT).unflatten(2, (window, -1)).flatten(1, 2).float()
        return torch.where(visible.flatten(1, 2)[:, :, None], scores, float("-inf")), keys

    def forward(
        self, x: Tensor, doc: Tensor, rope: Rope, switches: Switches
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> output [B, T, D] and the indexer's loss (0 without one)."""
        config, (_B, T, _) = self.config, x.shape
        heads, dim, window = config.num_attention_heads, config.head_dim, config.sliding_window
        cos, sin = rope(0, T, 1)
        q_r = self.q_norm(self.wq_a(x, switches))
        q = rms_norm(
            self.wq_b(q_r, switches).unflatten(-1, (heads, dim)), None, config.rms_norm_eps
        )
        q = rotary(q, cos[:, None], sin[:, None]) * dim**-0.5
        kv = self.round_nope(rotary(self.kv_norm(self.wkv(x, switches)), cos, sin), switches)

        scores, keys = self.window_scores(q, kv, doc)
        sink = self.attn_sink[:, None]
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        index_loss = x.new_zeros((), dtype=torch.float32)
        if self.compressor is None:
            top = top.detach()
            e = torch.exp(scores - top)
            total = e.sum(-1, keepdim=True) + torch.exp(sink - top)
            out = self.attend_window(e, keys, window)
        else:
            entries = self.round_nope(self.compressor(x, doc, rope), switches)
            visible = self.visible_entries(doc)
            selected, index_scores = visible, None
            if self.indexer is not None:
                index_scores = self.indexer(x.detach(), q_r.detach(), doc, rope, switches)
                selected = self.select(index_scores.detach(), visible, switches)
            far = torch.matmul(q.flatten(1, 2), entries.mT).unflatten(1, (T, heads)).float()
            far = torch.where(selected.unsqueeze(2), far, float("-inf"))
            top = torch.maximum(top, far.amax(-1, keepdim=True)).detach()
            e, e_far = torch.exp(scores - top), torch.exp(far - top)
            total = e.sum(-1, keepdim=True) + e_far.sum(-1, keepdim=True) + torch.exp(sink - top)
            out = self.attend_window(e, keys, window)
            out = (
                out
                + torch.matmul(e_far.to(x.dtype).flatten(1, 2), entries)
                .unflatten(1, (T, heads))
                .float()
            )
            if index_scores is not None:
                target = (e_far.detach() / total.detach()).mean(2)
                index_loss = self.index_loss(index_scores, target, selected)
        out = rotary((out / total).to(x.dtype), cos[:, None], -sin[:, None])
        out = round_activation(
            out.flatten(2).unflatten(-1, (config.o_groups, -1)), 128, switches.rounding
        )
        wo_a = self.wo_a.rounded_weight(x.dtype, switches).unflatten(0, (config.o_groups, -1))
        out = torch.einsum("btgi,goi->btgo", out, wo_a).flatten(2)
        return self.wo_b(out, switches), index_loss

    def attend_window(self, e: Tensor, keys: Tensor, window: int) -> Tensor:
        """e [B, T, A, 2 * window] times the keys, which are the values too -> [B, T, A, K] fp32."""
        folded = e.to(keys.dtype).unflatten(1, (-1, window)).flatten(2, 3)
        return torch.matmul(folded, keys).unflatten(2, (window, -1)).flatten(1, 2).float()

    def visible_entries(self, doc: Tensor) -> Tensor:
        """[B, T, W]: the entry's window is complete and begins in the query's own document."""
        t = torch.arange(doc.shape[1], device=doc.device)
        w = torch.arange(doc.shape[1] // self.ratio, device=doc.device)
        complete = w[None, :] < ((t + 1) // self.ratio)[:, None]
        return complete & (doc[:, :, None] == doc[:, None, :: self.ratio])

    def select(self, scores: Tensor, visible: Tensor, switches: Switches) -> Tensor:
        masked = torch.where(visible, scores, float("-inf"))
        kth = masked.topk(min(self.config.index_topk, masked.shape[-1]), -1).values[..., -1:]
        return visible & ((masked >= kth) | ~switches.sparse)

    def index_loss(self, scores: Tensor, target: Tensor, selected: Tensor) -> Tensor:
        """Cross-entropy of the indexer's distribution over the selected entries to the
        attention's own (detached)."""
        mass = target.sum(-1, keepdim=True)
        log_q = torch.where(selected, scores, -1e9).log_softmax(-1)
        rows = (selected.sum(-1) > 1).float()
        loss = -(target / (mass + 1e-6) * torch.where(selected, log_q, 0.0)).sum(-1)
        return (loss * rows).sum() / (rows.sum() + 1)


class Experts(nn.Module):
    """Stacked weights of a layer's routed experts: w1, w3 [E, I, D], w2 [E, D, I]."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, outputs, inputs) * inputs**-0.5)


class Mlp(nn.Module):
    """The shared expert's three matrices."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.w1 = Fp8Linear(config.hidden_size, config.moe_intermediate_size)
        self.w2 = Fp8Linear(config.moe_intermediate_size, config.hidden_size)
        self.w3 = Fp8Linear(config.hidden_size, config.moe_intermediate_size)


class Gate(nn.Module):
    bias: Tensor
    tid2eid: Tensor

    def __init__(self, config: DemoConfig, is_hash: bool) -> None:
        super().__init__()
        self.config, self.is_hash = config, is_hash
        self.weight = nn.Parameter(
            torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5
        )
        if is_hash:
            table = torch.arange(config.num_experts_per_tok).repeat(config.vocab_size, 1)
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> weights [B, T, E] (0 for the experts not chosen) and the share of
        choices [E]."""
        scores = F.softplus(F.linear(x.float(), self.weight.to(x.dtype).float())).sqrt()
        if self.is_hash:
            chosen = self.tid2eid[tokens]
        else:
            chosen = (scores + self.bias).detach().topk(self.config.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        weights = scores * mask
        weights = (
            weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.routed_scaling_factor
        )
        return weights, mask.mean((0, 1))


class MoE(nn.Module):
    def __init__(self, config: DemoConfig, is_hash: bool) -> None:
        super().__init__()
        self.config = config
        count, hidden, inner = (
            config.n_routed_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        self.gate = Gate(config, is_hash)
        self.experts = nn.ModuleDict(
            {
                "w1": Experts(count, hidden, inner),
                "w2": Experts(count, inner, hidden),
                "w3": Experts(count, hidden, inner),
            }
        )
        self.shared_experts = Mlp(config)

    def forward(self, x: Tensor, tokens: Tensor, switches: Switches) -> tuple[Tensor, Tensor]:
        """Every expert runs on every token, the shared one as the last; weights of those not
        chosen are zero."""
        limit, shared = self.config.swiglu_limit, self.shared_experts
        weights, load = self.gate(x, tokens)

        def joined(name: str, fp8: Fp8Linear) -> Tensor:
            routed = round_fp4_weight(self.experts[name].weight, switches.rounding).to(x.dtype)
            return torch.cat((routed, fp8.rounded_weight(x.dtype, switches)[None]), 0)

        w1, w2, w3 = joined("w1", shared.w1), joined("w2", shared.w2), joined("w3", shared.w3)
        rounded = round_activation(x, 128, switches.rounding)
        gate = F.linear(rounded, w1.flatten(0, 1)).float().clamp(max=limit)
        up = F.linear(rounded, w3.flatten(0, 1)).float().clamp(-limit, limit)
        inner = (F.silu(gate) * up).to(x.dtype).unflatten(-1, (w1.shape[0], -1))
        inner = round_activation(inner, 128, switches.rounding)
        weights = torch.cat((weights, torch.ones_like(weights[..., :1])), -1)
        inner = (inner.float() * weights.unsqueeze(-1)).to(x.dtype).flatten(-2)
        return F.linear(inner, w2.transpose(0, 1).flatten(1)), load


class Layer(nn.Module):
    def __init__(self, config: DemoConfig, ratio: int, is_hash: bool) -> None:
        super().__init__()
        self.ratio = ratio
        self.attn = Attention(config, ratio)
        self.ffn = MoE(config, is_hash)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config)
        self.hc_ffn = HyperConnection(config)

    def forward(
        self, streams: Tensor, batch: Batch, rope: Rope, switches: Switches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """streams [B, T, H, D] -> streams, the indexer's loss, the experts' load [E]."""
        x, post, comb = self.hc_attn.pre(streams)
        out, index_loss = self.attn(self.attn_norm(x), batch.doc, rope, switches)
        streams = self.hc_attn.post(streams, out, post, comb)
        x, post, comb = self.hc_ffn.pre(streams)
        out, load = self.ffn(self.ffn_norm(x), batch.tokens, switches)
        return self.hc_ffn.post(streams, out, post, comb), index_loss, load


class Mtp(Layer):
    """The draft layer: from the streams at t and the embedding of token t + 1 to a prediction
    of token t + 2."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__(config, 0, False)
        self.enorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.e_proj = Fp8Linear(config.hidden_size, config.hidden_size)
        self.h_proj = Fp8Linear(config.hidden_size, config.hidden_size)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hc_head = HyperHead(config)

    def combine(self, streams: Tensor, next_embedding: Tensor, switches: Switches) -> Tensor:
        e = self.e_proj(self.enorm(next_embedding), switches)
        return self.h_proj(self.hnorm(streams), switches) + e.unsqueeze(-2)

    def predict(
        self, streams: Tensor, next_embedding: Tensor, batch: Batch, rope: Rope, switches: Switches
    ) -> tuple[Tensor, Tensor]:
        """streams [B, T, H, D], next_embedding [B, T, D] -> hidden [B, T, D] for the shared
        head, experts' load."""
        streams = self.combine(streams, next_embedding, switches)
        streams, _, load = self(streams, batch, rope, switches)
        return self.norm(self.hc_head(streams)), load


class DemoModel(nn.Module):
    def __init__(self, config: DemoConfig, dtype: torch.dtype = torch.float32) -> None:
        """dtype: of the activations and of the weights as multiplied; parameters are always
        fp32."""
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, config.compress_ratios[i], i < config.num_hash_layers)
            for i in range(config.num_hidden_layers)
        )
        self.hc_head = HyperHead(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = nn.ModuleList([Mtp(config)])
        self.rope = Rope(config, compressed=False)
        self.compressed_rope = Rope(config, compressed=True)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.5 * config.hidden_size**-0.5)

    def streams(self, batch: Batch, switches: Switches) -> tuple[Tensor, Tensor, list[Tensor]]:
        x = F.embedding(batch.tokens, self.embed.weight).to(self.dtype)
        streams = x.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        index_losses, loads = [], []
        for layer in self.layers:
            rope = self.compressed_rope if layer.ratio else self.rope
            streams, index_loss, load = layer(streams, batch, rope, switches)
            if layer.ratio == 4:
                index_losses.append(index_loss)
            if not layer.ffn.gate.is_hash:
                loads.append(load)
        return streams, torch.stack(index_losses).mean(), loads

    def forward(self, batch: Batch, switches: Switches) -> Output:
        streams, index_loss, loads = self.streams(batch, switches)
        hidden = self.norm(self.hc_head(streams))
        following = F.pad(batch.tokens[:, 1:], (0, 1))
        next_embedding = F.embedding(following, self.embed.weight).to(self.dtype)
        mtp_hidden, load = self.mtp[0].predict(streams, next_embedding, batch, self.rope, switches)
        return Output(hidden, mtp_hidden, index_loss, torch.stack([*loads, load]))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V] in the model's dtype."""
        return F.linear(hidden, self.head.weight.to(hidden.dtype))
