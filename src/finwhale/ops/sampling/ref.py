"""The reference implementation of sampling."""

from collections.abc import Callable

import torch
from torch import Tensor

from finwhale.ops.sampling import (
    AllowedTokens,
    Bias,
    Filters,
    LogprobRows,
    Logprobs,
    Penalties,
    SampledTokens,
    SamplingBatch,
)
from finwhale.ops.sampling.noise import gumbel

LEAST = 2.0**-44  # top_k and top_p drop tokens with a smaller e
# Weights are e * 2^44 with e <= 1: the sum over 2^17 tokens stays below 2^63.
WEIGHT_SCALE = float(1 << 44)
LARGEST = 0x7FFFFFFF  # int32
INFINITY = 0x7F800000  # the bits of a float32

Noise = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]  # noise.gumbel


def sample(logits_SV: Tensor, batch: SamplingBatch, *, noise: Noise = gumbel) -> SampledTokens:
    penalised_SV = logits_SV
    if batch.penalties is not None:
        penalised_SV = penalise(logits_SV, batch.penalties)
    if batch.bias is not None:
        penalised_SV = add(penalised_SV, batch.bias)
    if batch.allowed is not None:
        penalised_SV = restrict(penalised_SV, batch.allowed)
    max_S, ids_S = penalised_SV.max(dim=-1)
    if batch.filters is not None:
        rows_R = slice(None) if batch.filters.rows_R is None else batch.filters.rows_R
        x_RV = penalised_SV[rows_R]
        kept_RV = keep(x_RV, max_S[rows_R], batch.filters)
        values_RV = perturb(x_RV, batch, noise=noise).masked_fill_(~kept_RV, -torch.inf)
        ids_S[rows_R] = values_RV.max(dim=-1).indices
    logprobs = measure(logits_SV, ids_S, batch.logprobs) if batch.logprobs else None
    return SampledTokens(ids_S=ids_S, valid_S=max_S.isfinite(), logprobs=logprobs)


def penalise(logits_SV: Tensor, p: Penalties) -> Tensor:
    x_N = logits_SV[p.rows_N, p.ids_N]
    x_N = torch.where(x_N > 0, x_N / p.repetition_N, x_N * p.repetition_N)
    x_N = x_N - p.frequency_N * p.counts_N
    x_N = x_N - p.presence_N * (p.counts_N > 0)
    return logits_SV.index_put((p.rows_N, p.ids_N), x_N)


def add(logits_SV: Tensor, b: Bias) -> Tensor:
    x_N = logits_SV[b.rows_N, b.ids_N] + b.values_N
    return logits_SV.index_put((b.rows_N, b.ids_N), x_N)


def restrict(logits_SV: Tensor, a: AllowedTokens) -> Tensor:
    bit_32 = torch.arange(32, dtype=torch.int32, device=logits_SV.device)
    set_GV = (a.words_GW[:, :, None] >> bit_32 & 1).flatten(1)[:, : logits_SV.shape[1]]
    x_GV = logits_SV[a.rows_G].masked_fill_(set_GV == 0, -torch.inf)
    return logits_SV.index_copy(0, a.rows_G, x_GV)


def perturb(x_RV: Tensor, batch: SamplingBatch, first: int = 0, noise: Noise = gumbel) -> Tensor:
    """logit + temperature * noise of the rows that draw, for the tokens from `first` on."""
    f = batch.filters
    assert f is not None and batch.positions_R is not None
    noise_RV = noise(f.seeds_R, f.indices_R, batch.positions_R, x_RV.shape[1], first)
    return x_RV + f.temperature_R[:, None] * noise_RV


def keep(x_RV: Tensor, max_R: Tensor, f: Filters) -> Tensor:
    """Which tokens the filters keep: bool [R,V]."""
    # Subtract before dividing: a tiny temperature then gives -inf and 0, never inf - inf.
    e_RV = ((x_RV - max_R[:, None]) / f.temperature_R[:, None]).exp_()
    kept_RV = torch.ones_like(e_RV, dtype=torch.bool)
    if f.min_p_R is not None:
        kept_RV = e_RV >= f.min_p_R[:, None]
    if f.top_k_rows_K is not None and f.top_k_K is not None:
        x_KV = x_RV[f.top_k_rows_K]
        top = x_KV.topk(f.max_top_k, dim=-1).values
        kth_K1 = top.gather(-1, f.top_k_K[:, None] - 1)
        kept_RV[f.top_k_rows_K] &= (x_KV >= kth_K1) & (e_RV[f.top_k_rows_K] >= LEAST)
    if f.top_p_rows_P is not None and f.top_p_P is not None:
        weights_PV = (e_RV * kept_RV)[f.top_p_rows_P].mul_(WEIGHT_SCALE).to(torch.int64)
        order_PV = x_RV[f.top_p_rows_P].sort(dim=-1, descending=True, stable=True).indices
        sorted_PV = weights_PV.gather(-1, order_PV)
        sum_PV = sorted_PV.cumsum(-1)
        enough_P1 = f.top_p_P[:, None] * sum_PV[:, -1:]
        first_PV = (sum_PV - sorted_PV < enough_P1) & (sorted_PV > 0)
        kept_RV[f.top_p_rows_P] = torch.empty_like(first_PV).scatter_(-1, order_PV, first_PV)
    return kept_RV


def best_candidates(
    logits_SV: Tensor, batch: SamplingBatch, first: int, *, noise: Noise = gumbel
) -> Tensor:
    if batch.needs_whole_rows:
        raise ValueError("candidates of a part of the vocabulary need a batch without filters")
    values_SV = logits_SV
    if batch.filters is not None:
        rows_R = slice(None) if batch.filters.rows_R is None else batch.filters.rows_R
        values_SV = logits_SV.clone()
        values_SV[rows_R] = perturb(logits_SV[rows_R], batch, first, noise)
    max_S, ids_S = values_SV.max(dim=-1)
    bits_S = (max_S + 0.0).view(torch.int32)
    order_S = torch.where(bits_S < 0, bits_S ^ LARGEST, bits_S).masked_fill_(max_S.isnan(), LARGEST)
    return ((order_S.long() << 32) + LARGEST - (ids_S + first))[:, None]


def merge_candidates(candidates_SC: Tensor) -> SampledTokens:
    best_S = candidates_SC.amax(dim=-1)
    order_S = best_S >> 32
    finite_S = (order_S < INFINITY) & (order_S > -INFINITY - 1)
    return SampledTokens(ids_S=LARGEST - (best_S & LARGEST), valid_S=finite_S)


def measure(logits_SV: Tensor, ids_S: Tensor, wanted: tuple[LogprobRows, ...]) -> Logprobs:
    num_rows = logits_SV.shape[0]
    width = max(w.num_top for w in wanted)
    out = Logprobs(
        token_S=logits_SV.new_full((num_rows,), torch.nan),
        rank_S=ids_S.new_zeros(num_rows),
        top_SL=logits_SV.new_full((num_rows, width), torch.nan),
        top_ids_SL=ids_S.new_full((num_rows, width), -1),
    )
    for w in wanted:
        x_GV, ids_G1 = logits_SV[w.rows_G], ids_S[w.rows_G, None]
        logprobs_GV = x_GV.log_softmax(-1)
        out.token_S[w.rows_G] = logprobs_GV.gather(-1, ids_G1)[:, 0]
        out.rank_S[w.rows_G] = (x_GV > x_GV.gather(-1, ids_G1)).sum(-1) + 1
        if w.num_top:
            # topk guarantees no order among equals, so sort by id, then stably by logit.
            top_GL = x_GV.topk(w.num_top, dim=-1).indices.sort(dim=-1).values
            order_GL = x_GV.gather(-1, top_GL).sort(dim=-1, descending=True, stable=True).indices
            top_GL = top_GL.gather(-1, order_GL)
            out.top_ids_SL[w.rows_G, : w.num_top] = top_GL
            out.top_SL[w.rows_G, : w.num_top] = logprobs_GV.gather(-1, top_GL)
    return out
