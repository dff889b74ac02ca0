"""mHC on a CPU, in numpy. Legend: N tokens, H residual streams, D hidden."""

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import host
from finwhale.ops.host import F32, F64, constant, view
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight


def _mixes(flat_NK: F32, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float) -> F32:
    mixes_NM = host.matmul_rows(flat_NK, view(fn).T)
    rows, mixes = (flat_NK[0], mixes_NM[0]) if len(flat_NK) == 1 else (flat_NK, mixes_NM)
    np.multiply(mixes, host.inverse_rms(rows, rms_eps), mixes)
    np.multiply(mixes, view(scale), mixes)
    np.add(mixes, view(base), mixes)
    return mixes_NM


# Up to this many tokens, loops over Python's floats beat numpy's calls on tiny arrays.
FEW_TOKENS = 6
# Tokens whose factors stay in the nearest cache while they are iterated.
TOKEN_BLOCK = 256


def sinkhorn(mix_NHH: F32, num_iters: int, eps: float) -> F32:
    """As ref.sinkhorn: u_i <- sum_j mix_ij / v_j + eps u_i and likewise for v.

    In float64, whose sums and products are the same bits in both forms below: each adds its terms
    one after the other.
    """
    N, H, _ = mix_NHH.shape
    if N <= FEW_TOKENS and H == 4:
        factors = [
            _reciprocal_factors(mix, num_iters, eps) for mix in mix_NHH.reshape(N, 16).tolist()
        ]
        inverse = np.array(factors).reshape(N, 2, H)
    else:
        inverse = np.empty((N, 2, H))
        for start in range(0, N, TOKEN_BLOCK):
            some = slice(start, start + TOKEN_BLOCK)
            _iterate(mix_NHH[some], num_iters, eps, inverse[some])
    scale = np.multiply(inverse[:, 0, :, None], inverse[:, 1, None, :])
    out: F32 = np.multiply(mix_NHH, scale, dtype=np.float32, casting="same_kind")
    return out


def _reciprocal_factors(mix: list[float], num_iters: int, eps: float) -> tuple[float, ...]:
    """1/u and 1/v of one token; mix row by row."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = mix
    p = q = r = s = 1.0
    w = 1.0 / (v0 := a0 + b0 + c0 + d0 + eps)
    x = 1.0 / (v1 := a1 + b1 + c1 + d1 + eps)
    y = 1.0 / (v2 := a2 + b2 + c2 + d2 + eps)
    z = 1.0 / (v3 := a3 + b3 + c3 + d3 + eps)
    u0 = u1 = u2 = u3 = 1.0
    for _ in range(num_iters - 1):
        p = 1.0 / (u0 := a0 * w + a1 * x + a2 * y + a3 * z + eps * u0)
        q = 1.0 / (u1 := b0 * w + b1 * x + b2 * y + b3 * z + eps * u1)
        r = 1.0 / (u2 := c0 * w + c1 * x + c2 * y + c3 * z + eps * u2)
        s = 1.0 / (u3 := d0 * w + d1 * x + d2 * y + d3 * z + eps * u3)
        w = 1.0 / (v0 := a0 * p + b0 * q + c0 * r + d0 * s + eps * v0)
        x = 1.0 / (v1 := a1 * p + b1 * q + c1 * r + d1 * s + eps * v1)
        y = 1.0 / (v2 := a2 * p + b2 * q + c2 * r + d2 * s + eps * v2)
        z = 1.0 / (v3 := a3 * p + b3 * q + c3 * r + d3 * s + eps * v3)
    return p, q, r, s, w, x, y, z


def _iterate(mix_NHH: F32, num_iters: int, eps: float, inverse_N2H: F64) -> None:
    """Write 1/u and 1/v of many tokens; tokens lie along the last axis.

    A half step multiplies [mix^T ; eps] by [1/v ; u], each 1/v_j once for every u_i that it goes
    into, adds the H + 1 terms up, and writes the reciprocals to where the next half step wants
    them.
    """
    N, H, _ = mix_NHH.shape
    mix = mix_NHH.transpose(1, 2, 0)
    by_column, by_row, terms = np.full((3, H + 1, H, N), eps)
    by_column[:H] = mix
    by_row[:H] = mix.swapaxes(0, 1)
    for_u, for_v = np.ones((2, H + 1, H, N))
    u, v = for_u[H], for_v[H]
    u_column, v_column = u[:, None], v[:, None]

    np.multiply(by_column, for_v, terms)
    np.add.reduce(terms, 0, None, v)
    np.reciprocal(v_column, for_u[:H])
    for _ in range(num_iters - 1):
        np.multiply(by_row, for_u, terms)
        np.add.reduce(terms, 0, None, u)
        np.reciprocal(u_column, for_v[:H])
        np.multiply(by_column, for_v, terms)
        np.add.reduce(terms, 0, None, v)
        np.reciprocal(v_column, for_u[:H])
    inverse_N2H[:, 0] = for_v[:H, 0].T
    inverse_N2H[:, 1] = for_u[:H, 0].T


def _pre(residual_NHD: F32, w: MhcWeight, params: MhcParams) -> tuple[F32, F32, F32]:
    N, H, D = residual_NHD.shape
    mixes = _mixes(residual_NHD.reshape(N, H * D), w.fn, w.scale, w.base, params.rms_eps)
    gates, res_NHH = mixes[:, : 2 * H], mixes[:, 2 * H :].reshape(N, H, H)
    np.negative(gates, gates)
    np.minimum(gates, constant(80.0), out=gates)  # e^80 is finite, and 1 / e^80 is 0 in any sum
    np.subtract(res_NHH, np.maximum.reduce(res_NHH, -1)[..., None], res_NHH)
    np.exp(mixes, mixes)
    np.add(gates, constant(1.0), gates)
    np.reciprocal(gates, gates)
    pre_NH = np.add(gates[:, :H], constant(params.eps))
    post_NH = np.multiply(gates[:, H:], constant(2.0))
    mix_NHH = np.divide(res_NHH, np.add.reduce(res_NHH, -1)[..., None])
    np.add(mix_NHH, constant(params.eps), mix_NHH)
    res_NHH = sinkhorn(mix_NHH, params.num_iters, params.eps)
    collapsed = np.matmul(pre_NH[:, None], residual_NHD)[:, 0]
    return host.rms_norm(collapsed, view(w.norm), params.rms_eps), post_NH, res_NHH


def _post(x_ND: F32, post_NH: F32, res_NHH: F32, residual_NHD: F32) -> F32:
    mixed: F32 = np.matmul(res_NHH.swapaxes(1, 2), residual_NHD)
    np.add(mixed, np.multiply(post_NH[:, :, None], x_ND[:, None]), mixed)
    return mixed


def mhc_pre(residual_NHD: Tensor, w: MhcWeight, params: MhcParams) -> tuple[Tensor, Tensor, Tensor]:
    residual = np.ascontiguousarray(residual_NHD.numpy())
    x, post, res = _pre(residual, w, params)
    return torch.from_numpy(x), torch.from_numpy(post), torch.from_numpy(res)


def mhc_post(x_ND: Tensor, post_NH: Tensor, res_NHH: Tensor, residual_NHD: Tensor) -> Tensor:
    return torch.from_numpy(
        _post(x_ND.numpy(), post_NH.numpy(), res_NHH.numpy(), residual_NHD.numpy())
    )


def mhc_post_pre(
    x_ND: Tensor,
    post_NH: Tensor,
    res_NHH: Tensor,
    residual_NHD: Tensor,
    w: MhcWeight,
    params: MhcParams,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams = _post(x_ND.numpy(), post_NH.numpy(), res_NHH.numpy(), residual_NHD.numpy())
    x, post, res = _pre(streams, w, params)
    return (
        torch.from_numpy(x),
        torch.from_numpy(post),
        torch.from_numpy(res),
        torch.from_numpy(streams),
    )


def hc_head(streams_NHD: Tensor, w: HcHeadWeight, params: MhcParams) -> Tensor:
    streams: F32 = np.ascontiguousarray(streams_NHD.numpy())
    N, H, D = streams.shape
    flat = streams.reshape(N, H * D)
    pre = _mixes(flat, w.fn, w.scale, w.base, params.rms_eps)
    np.negative(pre, pre)
    np.minimum(pre, constant(80.0), out=pre)
    np.exp(pre, pre)
    np.add(pre, constant(1.0), pre)
    np.reciprocal(pre, pre)
    np.add(pre, constant(params.eps), pre)
    collapsed = np.matmul(pre[:, None], streams)[:, 0]
    return torch.from_numpy(host.rms_norm(collapsed, view(w.norm), params.rms_eps))
