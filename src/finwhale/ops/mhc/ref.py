"""The reference implementation of mHC. Legend: N tokens, H residual streams, D hidden."""

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcPost, MhcPre, MhcWeight
from finwhale.ops.norm.ref import rms_norm


def sinkhorn(mix_NHH: Tensor, num_iters: int, eps: float) -> Tensor:
    """Normalise columns, then num_iters - 1 times rows and columns: m <- m / (sum(m) + eps).

    The function iterates factors u, v with m_ij = mix_ij / (u_i v_j): dividing row i by its sum
    plus eps is u_i <- sum_j mix_ij / v_j + eps u_i, and likewise for columns.
    """
    mix_t = mix_NHH.transpose(1, 2)
    v = mix_t.sum(-1, keepdim=True).add_(eps)
    u = torch.ones_like(v)
    for _ in range(num_iters - 1):
        u = torch.baddbmm(u, mix_NHH, v.reciprocal(), beta=eps)
        v = torch.baddbmm(v, mix_t, u.reciprocal(), beta=eps)
    return mix_NHH / u / v.transpose(1, 2)


def _mixes(flat_NK: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float) -> Tensor:
    rstd = torch.rsqrt(flat_NK.square().mean(-1, keepdim=True).add_(rms_eps))
    return F.linear(flat_NK, fn).mul(rstd).mul_(scale).add_(base)


def mixes(residual_NHD: Tensor, w: MhcWeight, params: MhcParams) -> tuple[Tensor, Tensor, Tensor]:
    """A block's pre [N,H], post [N,H] and res [N,H,H] of float32 residual streams."""
    streams = residual_NHD.shape[1]
    projected = _mixes(residual_NHD.flatten(1), w.fn, w.scale, w.base, params.rms_eps)
    gates = torch.sigmoid(projected[:, : 2 * streams])
    logits = projected[:, 2 * streams :].unflatten(1, (streams, streams))
    res_NHH = sinkhorn(logits.softmax(-1).add_(params.eps), params.num_iters, params.eps)
    return gates[:, :streams] + params.eps, gates[:, streams:] * 2.0, res_NHH


def mhc_pre(residual_NHD: Tensor, w: MhcWeight, params: MhcParams) -> tuple[Tensor, Tensor, Tensor]:
    residual = residual_NHD.float()
    pre_NH, post_NH, res_NHH = mixes(residual, w, params)
    collapsed = torch.bmm(pre_NH[:, None], residual).squeeze(1)
    return rms_norm(collapsed, w.norm, params.rms_eps).to(residual_NHD.dtype), post_NH, res_NHH


def mhc_post(x_ND: Tensor, post_NH: Tensor, res_NHH: Tensor, residual_NHD: Tensor) -> Tensor:
    mixed = torch.bmm(res_NHH.transpose(1, 2), residual_NHD.float())
    return mixed.add_(post_NH[:, :, None] * x_ND[:, None].float()).to(residual_NHD.dtype)


def mhc_post_pre(
    x_ND: Tensor,
    post_NH: Tensor,
    res_NHH: Tensor,
    residual_NHD: Tensor,
    w: MhcWeight,
    params: MhcParams,
    *,
    post: MhcPost = mhc_post,
    pre: MhcPre = mhc_pre,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """post, pre: the separate operators of any table."""
    streams = post(x_ND, post_NH, res_NHH, residual_NHD)
    return *pre(streams, w, params), streams


def hc_head(streams_NHD: Tensor, w: HcHeadWeight, params: MhcParams) -> Tensor:
    streams = streams_NHD.float()
    mixes = _mixes(streams.flatten(1), w.fn, w.scale, w.base, params.rms_eps)
    pre = torch.sigmoid(mixes).add_(params.eps)[:, None]
    collapsed = torch.bmm(pre, streams).squeeze(1)
    return rms_norm(collapsed, w.norm, params.rms_eps).to(streams_NHD.dtype)
