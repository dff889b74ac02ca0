"""DeepSeek-V4 for training: the whole architecture over [B, T] at once, differentiable, in
plain PyTorch.

It is not an inference engine: it keeps no cache, computes every expert for every token, and
scores every compressed entry.
Parameters have the checkpoint's names, except that the experts of a layer are stacked
(`ffn.experts.w1.weight` [E, I, D]).

Shapes: B rows, T tokens of a row (a multiple of 128), N = B * T, D hidden, A heads, K head_dim,
H residual streams, W compressed entries, E experts, I moe_intermediate_size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rounding import round_activation, round_fp4_weight, round_fp8_weight, round_index
from sinkhorn import sinkhorn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MAX_WHOLE_ROW = 4096  # longer rows attend to C4 entries in chunks of CHUNK queries
CHUNK = 1024
MAX_DOCUMENTS = 2**21  # in one packing


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


Angles = tuple[Tensor, Tensor]  # cos and sin of every token


class Switches(NamedTuple):
    """Bool scalars on the device, so that changing one recompiles nothing."""

    rounding: Tensor  # round weights and activations as the shipped model does
    sparse: Tensor  # C4 attention sees the indexer's top-k entries only


class Batch(NamedTuple):
    tokens: Tensor  # [B, T] int64
    doc: Tensor  # [B, T] int32: a document's number; attention stays inside a document

    def flat_doc(self) -> Tensor:
        """[N]: numbers that also differ between rows."""
        row = torch.arange(len(self.doc), device=self.doc.device, dtype=self.doc.dtype)
        return (self.doc + row[:, None] * MAX_DOCUMENTS).flatten()


class Output(NamedTuple):
    hidden: Tensor  # [B, T, D] after the last norm, input of the shared head
    drafts: list[Tensor]  # [B, T, D] likewise of the MTP layer's steps: position t predicts t + 2
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

    def forward(self, rows: int, length: int) -> Angles:
        """cos and sin [rows * length, rope/2] of rows that all begin at position 0."""
        return self.cos[:length].repeat(rows, 1), self.sin[:length].repeat(rows, 1)


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
        """streams [N, H, D] -> block input [N, D], post [N, H] and comb [N, H, H] in fp32."""
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

    def forward(self, x: Tensor, doc: Tensor, angles: Angles) -> Tensor:
        """x [N, D], doc [N] -> entries [N // ratio, dim] in x's dtype, after norm and rope."""
        cos, sin = angles
        kv = self.wkv(x).unflatten(0, (-1, self.ratio))
        gate = self.wgate(x).unflatten(0, (-1, self.ratio)) + self.ape
        if self.ratio == 4:
            kv_before, kv = kv.split(self.dim, -1)
            gate_before, gate = gate.split(self.dim, -1)
            first = doc[:: self.ratio]
            joined = F.pad(first[1:] == first[:-1], (1, 0), value=False)
            kv_before = F.pad(kv_before[:-1], (0, 0, 0, 0, 1, 0))
            gate_before = F.pad(gate_before[:-1], (0, 0, 0, 0, 1, 0))
            gate_before = torch.where(joined[:, None, None], gate_before, float("-inf"))
            kv, gate = torch.cat((kv_before, kv), 1), torch.cat((gate_before, gate), 1)
        entries = self.norm((kv * gate.softmax(1)).sum(1)).to(x.dtype)
        return rotary(entries, cos[:: self.ratio], sin[:: self.ratio])


class Projected(NamedTuple):
    """The values that an attention block computes before it looks at compressed entries."""

    q: Tensor  # [N, A, K]
    top: Tensor  # [N, A, 1] largest logit of the window and the sink, detached
    total: Tensor  # [N, A, 1] sum of the exponentials of the window and the sink
    out: Tensor  # [N, A, K] fp32: the window's share of the output, not yet divided
    entries: Tensor | None  # [N // ratio, K]
    index_q: Tensor | None  # [N, index heads, index dim]
    index_k: Tensor | None  # [N // 4, index dim]
    index_weights: Tensor | None  # [N, index heads] fp32


class Indexer(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = Fp8Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.weights_proj = Fp32Linear(config.hidden_size, config.index_n_heads)
        self.compressor = Compressor(config, 4, config.index_head_dim)

    def forward(
        self, x: Tensor, q_r: Tensor, doc: Tensor, angles: Angles, switches: Switches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and head weights of the scores, rotated and rounded as in inference."""
        config = self.config
        cos, sin = angles
        q = self.wq_b(q_r, switches).unflatten(-1, (config.index_n_heads, -1))
        q = round_index(rotary(q, cos[:, None], sin[:, None]), switches.rounding)
        k = round_index(self.compressor(x, doc, angles), switches.rounding)
        scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        return q, k, self.weights_proj(x) * scale


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
        """Scores [N, A, 2 * window] of the window, -inf outside it, and the keys [blocks,
        2 * window, K]."""
        window = self.config.sliding_window
        blocks = kv.unflatten(0, (-1, window))
        keys = torch.cat((F.pad(blocks[:-1], (0, 0, 0, 0, 1, 0)), blocks), 1)
        doc_q = doc.unflatten(0, (-1, window))
        doc_k = torch.cat((F.pad(doc_q[:-1], (0, 0, 1, 0), value=-1), doc_q), 1)
        i = torch.arange(window, device=q.device)[:, None] + window
        j = torch.arange(2 * window, device=q.device)[None, :]
        visible = (j <= i) & (j > i - window) & (doc_q[:, :, None] == doc_k[:, None, :])
        folded = q.unflatten(0, (-1, window)).flatten(1, 2)
        scores = torch.matmul(folded, keys.mT).unflatten(1, (window, -1)).flatten(0, 1).float()
        return torch.where(visible.flatten(0, 1)[:, None], scores, float("-inf")), keys

    def queries(self, x: Tensor, angles: Angles, switches: Switches) -> tuple[Tensor, Tensor]:
        """x [N, D] -> the low-rank queries [N, Q] and the scaled queries [N, A, K]."""
        config = self.config
        heads, dim = config.num_attention_heads, config.head_dim
        cos, sin = angles
        q_r = self.q_norm(self.wq_a(x, switches))
        q = rms_norm(
            self.wq_b(q_r, switches).unflatten(-1, (heads, dim)), None, config.rms_norm_eps
        )
        return q_r, rotary(q, cos[:, None], sin[:, None]) * dim**-0.5

    def latent(self, x: Tensor, angles: Angles, switches: Switches) -> Tensor:
        """x [N, D] -> the rows [N, K] that are keys and values, as the cache stores them."""
        return self.round_nope(rotary(self.kv_norm(self.wkv(x, switches)), *angles), switches)

    def project(self, x: Tensor, doc: Tensor, angles: Angles, switches: Switches) -> Projected:
        """x [N, D] -> everything that does not depend on how the tokens are cut into rows."""
        window = self.config.sliding_window
        q_r, q = self.queries(x, angles, switches)
        kv = self.latent(x, angles, switches)
        scores, keys = self.window_scores(q, kv, doc)
        sink = self.attn_sink[:, None]
        top = torch.maximum(scores.amax(-1, keepdim=True), sink).detach()
        e = torch.exp(scores - top)
        total = e.sum(-1, keepdim=True) + torch.exp(sink - top)
        folded = e.to(keys.dtype).unflatten(0, (-1, window)).flatten(1, 2)
        out = torch.matmul(folded, keys).unflatten(1, (window, -1)).flatten(0, 1).float()
        entries = index_q = index_k = index_weights = None
        if self.compressor is not None:
            entries = self.round_nope(self.compressor(x, doc, angles), switches)
        if self.indexer is not None:
            index_q, index_k, index_weights = self.indexer(
                x.detach(), q_r.detach(), doc, angles, switches
            )
        return Projected(q, top, total, out, entries, index_q, index_k, index_weights)

    def output(self, out: Tensor, angles: Angles, switches: Switches) -> Tensor:
        """Attention output [N, A, K] -> block output [N, D]."""
        cos, sin = angles
        groups = self.config.o_groups
        out = rotary(out, cos[:, None], -sin[:, None])
        out = round_activation(out.flatten(1).unflatten(-1, (groups, -1)), 128, switches.rounding)
        wo_a = self.wo_a.rounded_weight(out.dtype, switches).unflatten(0, (groups, -1))
        out = torch.einsum("ngi,goi->ngo", out, wo_a).flatten(1)
        return self.wo_b(out, switches)


def attend_entries(
    near: Projected,
    start: Tensor,
    doc: Tensor,
    entry_doc: Tensor,
    ratio: int,
    index_topk: int,
    sparse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the compressed entries to the attention of C queries of each of B rows.

    Args:
        near: the queries' values [B, C, ...]; entries and index_k are the whole row's [B, W, ...].
        start: position of the first query (an int64 scalar).
        doc, entry_doc: [B, C] and [B, W]: document of each query and of each entry's window.

    Returns the output [B, C, A, K], and the sum and the number of rows of the indexer's loss.
    """
    q, entries = near.q, near.entries
    assert entries is not None
    (C, heads), W = q.shape[1:3], entries.shape[1]
    t = start + torch.arange(C, device=q.device)
    complete = torch.arange(W, device=q.device)[None, :] < ((t + 1) // ratio)[:, None]
    selected = visible = complete & (doc[:, :, None] == entry_doc[:, None, :])
    index_scores = None
    if near.index_q is not None and near.index_k is not None and near.index_weights is not None:
        pairs = torch.matmul(near.index_q.flatten(1, 2), near.index_k.mT)
        pairs = F.relu(pairs.unflatten(1, (C, -1))).float()
        index_scores = (pairs * near.index_weights.unsqueeze(-1)).sum(2)
        masked = torch.where(visible, index_scores.detach(), float("-inf"))
        kth = masked.topk(min(index_topk, W), -1).values[..., -1:]
        selected = visible & ((masked >= kth) | ~sparse)
    far = torch.matmul(q.flatten(1, 2), entries.mT).unflatten(1, (C, heads)).float()
    far = torch.where(selected.unsqueeze(2), far, float("-inf"))
    top = torch.maximum(near.top, far.amax(-1, keepdim=True)).detach()
    shrink = torch.exp(near.top - top)
    e = torch.exp(far - top)
    total = near.total * shrink + e.sum(-1, keepdim=True)
    out = torch.matmul(e.to(q.dtype).flatten(1, 2), entries).unflatten(1, (C, heads)).float()
    out = ((near.out * shrink + out) / total).to(q.dtype)
    if index_scores is None:
        return out, total.new_zeros(()), total.new_zeros(())
    # Cross-entropy of the indexer's distribution over the selected entries to the attention's own.
    target = (e.detach() / total.detach()).mean(2)
    target = target / (target.sum(-1, keepdim=True) + 1e-6)
    log_q = torch.where(selected, index_scores, -1e9).log_softmax(-1)
    loss = -(target * torch.where(selected, log_q, 0.0)).sum(-1)
    rows = (selected.sum(-1) > 1).float()
    return out, (loss * rows).sum(), rows.sum()


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
        """x [N, D] -> weights [N, E] (0 for the experts not chosen) and the share of choices
        [E]."""
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
        return weights, mask.mean(0)


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
        weights = torch.cat((weights, torch.ones_like(weights[..., :1])), -1)
        inner = (F.silu(gate) * up).unflatten(-1, (w1.shape[0], -1)) * weights.unsqueeze(-1)
        inner = round_activation(inner.to(x.dtype), 128, switches.rounding).flatten(-2)
        return F.linear(inner, w2.transpose(0, 1).flatten(1)), load


def begin_attention(
    hc: HyperConnection,
    norm: Norm,
    attention: Attention,
    streams: Tensor,
    doc: Tensor,
    angles: Angles,
    switches: Switches,
) -> tuple[Projected, Tensor, Tensor]:
    x, post, comb = hc.pre(streams)
    return attention.project(norm(x), doc, angles, switches), post, comb


def end_attention(
    hc: HyperConnection,
    attention: Attention,
    streams: Tensor,
    out: Tensor,
    post: Tensor,
    comb: Tensor,
    angles: Angles,
    switches: Switches,
) -> Tensor:
    return hc.post(streams, attention.output(out, angles, switches), post, comb)


def feed_forward(
    hc: HyperConnection, norm: Norm, moe: MoE, streams: Tensor, tokens: Tensor, switches: Switches
) -> tuple[Tensor, Tensor]:
    x, post, comb = hc.pre(streams)
    out, load = moe(norm(x), tokens, switches)
    return hc.post(streams, out, post, comb), load


@dataclass
class Parts:
    """The functions that a layer consists of. Only `attend_entries` sees the rows' length, so a
    change of length compiles little again."""

    begin_attention: Callable[..., tuple[Projected, Tensor, Tensor]] = begin_attention
    attend_entries: Callable[..., tuple[Tensor, Tensor, Tensor]] = attend_entries
    end_attention: Callable[..., Tensor] = end_attention
    feed_forward: Callable[..., tuple[Tensor, Tensor]] = feed_forward

    @classmethod
    def compiled(cls) -> Parts:
        return cls(*(torch.compile(getattr(cls, f.name), dynamic=False) for f in fields(cls)))


class Layer(nn.Module):
    def __init__(self, config: DemoConfig, ratio: int, is_hash: bool) -> None:
        super().__init__()
        self.ratio, self.index_topk = ratio, config.index_topk
        self.attn = Attention(config, ratio)
        self.ffn = MoE(config, is_hash)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config)
        self.hc_ffn = HyperConnection(config)

    def forward(
        self, streams: Tensor, batch: Batch, angles: Angles, switches: Switches, parts: Parts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """streams [N, H, D] -> streams, the indexer's loss, the experts' load [E]."""
        doc = batch.flat_doc()
        near, post, comb = parts.begin_attention(
            self.hc_attn, self.attn_norm, self.attn, streams, doc, angles, switches
        )
        index_loss = streams.new_zeros((), dtype=torch.float32)
        if self.ratio:
            out, index_loss = self.far_attention(near, batch, switches, parts)
        else:
            out = (near.out / near.total).to(near.q.dtype)
        streams = parts.end_attention(
            self.hc_attn, self.attn, streams, out, post, comb, angles, switches
        )
        streams, load = parts.feed_forward(
            self.hc_ffn, self.ffn_norm, self.ffn, streams, batch.tokens.flatten(), switches
        )
        return streams, index_loss, load

    def far_attention(
        self, near: Projected, batch: Batch, switches: Switches, parts: Parts
    ) -> tuple[Tensor, Tensor]:
        """Output [N, A, K] and the indexer's loss. Long rows go in chunks of queries, whose scores
        are computed again for the gradient."""
        B, T = batch.tokens.shape
        rows = Projected(*(x if x is None else x.unflatten(0, (B, -1)) for x in near))
        chunk = CHUNK if self.ratio == 4 and T > MAX_WHOLE_ROW else T
        outs, losses, counts = [], [], []
        for start in range(0, T, chunk):
            part = Projected(
                *(x if x is None else x[:, start : start + chunk] for x in rows)
            )._replace(entries=rows.entries, index_k=rows.index_k)
            args = (
                part,
                torch.tensor(start, device=batch.doc.device),
                batch.doc[:, start : start + chunk],
                batch.doc[:, :: self.ratio],
                self.ratio,
                self.index_topk,
                switches.sparse,
            )
            if chunk < T:
                out, loss, count = checkpoint(
                    parts.attend_entries, *args, use_reentrant=False, preserve_rng_state=False
                )
            else:
                out, loss, count = parts.attend_entries(*args)
            outs.append(out)
            losses.append(loss)
            counts.append(count)
        whole = torch.cat(outs, 1) if len(outs) > 1 else outs[0]
        index_loss = torch.stack(losses).sum() / (torch.stack(counts).sum() + 1)
        return whole.flatten(0, 1), index_loss


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


class DemoModel(nn.Module):
    def __init__(self, config: DemoConfig, dtype: torch.dtype = torch.float32) -> None:
        """dtype: of the activations and of the weights as multiplied; parameters are always
        fp32."""
        super().__init__()
        self.config, self.dtype, self.parts = config, dtype, Parts()
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

    def streams(
        self, batch: Batch, switches: Switches, features: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Residual streams [N, H, D] of the last layer, the indexers' loss, the experts' loads.

        features: receives the mean [N, D] over the residual streams after every layer.
        """
        plain, compressed = (
            self.rope(*batch.tokens.shape),
            self.compressed_rope(*batch.tokens.shape),
        )
        x = F.embedding(batch.tokens.flatten(), self.embed.weight).to(self.dtype)
        streams = x.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        index_losses, loads = [], []
        for layer in self.layers:
            angles = compressed if layer.ratio else plain
            streams, index_loss, load = layer(streams, batch, angles, switches, self.parts)
            if features is not None:
                features.append(streams.mean(1))
            if layer.ratio == 4:
                index_losses.append(index_loss)
            if not layer.ffn.gate.is_hash:
                loads.append(load)
        return streams, torch.stack(index_losses).mean(), loads

    def forward(self, batch: Batch, switches: Switches, draft_steps: int = 1) -> Output:
        """draft_steps: how often the MTP layer runs, from the second time on its own streams."""
        B, T = batch.tokens.shape
        streams, index_loss, loads = self.streams(batch, switches)
        hidden = self.norm(self.hc_head(streams)).unflatten(0, (B, T))
        following = F.pad(batch.tokens[:, 1:], (0, 1)).flatten()
        next_embedding = F.embedding(following, self.embed.weight).to(self.dtype)
        mtp, angles = self.mtp[0], self.rope(B, T)
        drafts, mtp_loads = [], []
        for step in range(draft_steps):
            if step:  # a further draft starts from the layer's own streams one token before
                streams = F.pad(streams[:-1], (0, 0, 0, 0, 1, 0))
            streams = mtp.combine(streams, next_embedding, switches)
            streams, _, load = mtp(streams, batch, angles, switches, self.parts)
            drafts.append(mtp.norm(mtp.hc_head(streams)).unflatten(0, (B, T)))
            mtp_loads.append(load)
        return Output(hidden, drafts, index_loss, torch.stack([*loads, mtp_loads[0]]))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V] in the model's dtype."""
        return F.linear(hidden, self.head.weight.to(hidden.dtype))
