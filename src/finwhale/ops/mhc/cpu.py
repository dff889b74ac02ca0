"""mHC on a CPU, in numpy. Legend: N tokens, H residual streams, D hidden."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_math import F32, F64, constant, view
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight


def _mixes(flat_NK: F32, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float) -> F32:
    mixes_NM = cpu_math.matmul_rows(flat_NK, view(fn).T)
    rows, mixes = (flat_NK[0], mixes_NM[0]) if len(flat_NK) == 1 else (flat_NK, mixes_NM)
    np.multiply(mixes, cpu_math.inverse_rms(rows, rms_eps), mixes)
    np.multiply(mixes, view(scale), mixes)
    np.add(mixes, view(base), mixes)
    return mixes_NM


# Up to this many tokens, Python loops over floats are faster than numpy calls on tiny arrays.
FEW_TOKENS = 5
# Number of tokens whose factors stay in the L1 cache during the iterations.
TOKEN_BLOCK = 256


def sinkhorn(mix_NHH: F32, num_iters: int, eps: float) -> F32:
    """Like ref.sinkhorn, in float64: u_i <- sum_j mix_ij / v_j + eps u_i, and likewise for v.

    Returns mix_ij / (u_i v_j). `_factors` and `_iterate` add the terms in the same order, so they
    give the same bits.
    """
    N, H, _ = mix_NHH.shape
    if N <= FEW_TOKENS and H == 4:
        tokens = mix_NHH.reshape(N, 16).tolist()
        factors = np.array([_factors(mix, num_iters, eps) for mix in tokens]).reshape(N, 2, H)
    else:
        factors = np.empty((N, 2, H))
        for start in range(0, N, TOKEN_BLOCK):
            some = slice(start, start + TOKEN_BLOCK)
            _iterate(mix_NHH[some], num_iters, eps, factors[some])
    scale = np.multiply(factors[:, 0, :, None], factors[:, 1, None, :])
    return np.divide(mix_NHH, scale, dtype=np.float32, casting="same_kind")


def _factors(mix: list[float], num_iters: int, eps: float) -> tuple[float, ...]:
    """The factors u and v of one token, whose matrix `mix` has row by row."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = mix
    share = 1.0 / eps
    u0 = u1 = u2 = u3 = 1.0
    v0 = a0 + b0 + c0 + d0 + 1.0 / share
    v1 = a1 + b1 + c1 + d1 + 1.0 / share
    v2 = a2 + b2 + c2 + d2 + 1.0 / share
    v3 = a3 + b3 + c3 + d3 + 1.0 / share
    for _ in range(num_iters - 1):
        u0 = a0 / v0 + a1 / v1 + a2 / v2 + a3 / v3 + u0 / share
        u1 = b0 / v0 + b1 / v1 + b2 / v2 + b3 / v3 + u1 / share
        u2 = c0 / v0 + c1 / v1 + c2 / v2 + c3 / v3 + u2 / share
        u3 = d0 / v0 + d1 / v1 + d2 / v2 + d3 / v3 + u3 / share
        v0 = a0 / u0 + b0 / u1 + c0 / u2 + d0 / u3 + v0 / share
        v1 = a1 / u0 + b1 / u1 + c1 / u2 + d1 / u3 + v1 / share
        v2 = a2 / u0 + b2 / u1 + c2 / u2 + d2 / u3 + v2 / share
        v3 = a3 / u0 + b3 / u1 + c3 / u2 + d3 / u3 + v3 / share
    return u0, u1, u2, u3, v0, v1, v2, v3


def _iterate(mix_NHH: F32, num_iters: int, eps: float, factors_N2H: F64) -> None:
    """Write u and v of many tokens to factors_N2H; in the working arrays tokens are the last axis.

    A half step divides [mix^T ; u] by [v ; 1 / eps]; the sum of the H + 1 rows of quotients is the
    new u. One buffer holds u and 1 / eps, because they are also the divisors of the next half step.
    """
    N, H, _ = mix_NHH.shape
    mix = mix_NHH.transpose(2, 1, 0)
    rows: Any = np.empty((2, H * H + H + 1, N))
    rows[:, -1] = 1.0 / eps
    over_v, over_u = rows[:, :-1].reshape(2, H + 1, H, N)
    by_u, by_v = rows[:, H * H :].reshape(2, H + 1, 1, N)
    over_v[:H] = mix
    over_u[:H] = mix.swapaxes(0, 1)
    u, v = over_v[H], over_u[H]
    u.fill(1.0)
    v.fill(1.0)
    terms = np.empty((H + 1, H, N))

    np.divide(over_u, by_u, terms)
    np.add.reduce(terms, 0, None, v)
    for _ in range(num_iters - 1):
        np.divide(over_v, by_v, terms)
        np.add.reduce(terms, 0, None, u)
        np.divide(over_u, by_u, terms)
        np.add.reduce(terms, 0, None, v)
    factors_N2H[:, 0] = u.T
    factors_N2H[:, 1] = v.T


def mixes_of(residual: F32, w: MhcWeight, params: MhcParams) -> tuple[F32, F32, F32]:
    """A block's pre [N,H], post [N,H] and res [N,H,H] of contiguous residual streams [N,H,D]."""
    N, H, D = residual.shape
    mixes = _mixes(residual.reshape(N, H * D), w.fn, w.scale, w.base, params.rms_eps)
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
    return pre_NH, post_NH, sinkhorn(mix_NHH, params.num_iters, params.eps)


def mhc_pre(residual_NHD: Tensor, w: MhcWeight, params: MhcParams) -> tuple[Tensor, Tensor, Tensor]:
    residual: F32 = np.ascontiguousarray(residual_NHD.numpy())
    pre_NH, post_NH, res_NHH = mixes_of(residual, w, params)
    collapsed = cpu_math.matmul(pre_NH[:, None], residual)[:, 0]
    x_ND = cpu_math.rms_norm(collapsed, view(w.norm), params.rms_eps)
    return torch.from_numpy(x_ND), torch.from_numpy(post_NH), torch.from_numpy(res_NHH)


def mhc_post(x_ND: Tensor, post_NH: Tensor, res_NHH: Tensor, residual_NHD: Tensor) -> Tensor:
    mixed: F32 = cpu_math.matmul(res_NHH.numpy().swapaxes(1, 2), residual_NHD.numpy())
    np.add(mixed, np.multiply(post_NH.numpy()[:, :, None], x_ND.numpy()[:, None]), mixed)
    return torch.from_numpy(mixed)


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
    collapsed = cpu_math.matmul(pre[:, None], streams)[:, 0]
    return torch.from_numpy(cpu_math.rms_norm(collapsed, view(w.norm), params.rms_eps))
