"""mHC on a CPU, in numpy. Legend: N tokens, H residual streams, D hidden."""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import host
from finwhale.ops.host import F32, constant
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight


def _mixes(flat_NK: F32, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float) -> F32:
    mixes = host.matmul_rows(flat_NK, fn.numpy().T)
    np.divide(mixes, host.rms(flat_NK, rms_eps), mixes)
    np.multiply(mixes, scale.numpy(), mixes)
    np.add(mixes, base.numpy(), mixes)
    return mixes


@lru_cache(maxsize=8)
def _scaled_identity(size: int, scale: float) -> F32:
    return np.identity(size, np.float32) * np.float32(scale)


def sinkhorn(mix_NHH: F32, num_iters: int, eps: float) -> F32:
    """As ref.sinkhorn: u_i <- sum_j mix_ij / v_j + eps u_i and likewise for v.

    A half step is one product of [mix | eps I] with (1/v ; u), and one reciprocal. An iteration
    that changes no bit of u and v would change none for ever after: it is the last. Iterations
    take turns between two states, since a product must not write what it reads.
    """
    N, H, _ = mix_NHH.shape
    factors = np.empty((2, N, H, 2 * H), np.float32)
    factors[0, :, :, :H] = mix_NHH
    factors[1, :, :, :H] = mix_NHH.swapaxes(1, 2)
    factors[:, :, :, H:] = _scaled_identity(H, eps)
    # Of even and of odd iterations: (1/v ; u) and (1/u ; v) of each token.
    states = np.ones((2, 2, N, 2 * H, 1), np.float32)
    times_row: Callable[[F32, F32], object]
    times_column: Callable[[F32, F32], object]
    if N == 1:
        vectors = states[:, :, 0, :, 0]
        times_row, times_column = factors[0, 0].dot, factors[1, 0].dot
    else:
        vectors = states
        times_row, times_column = (partial(np.matmul, factor) for factor in factors)
    (even_u, even_v), (odd_u, odd_v) = vectors
    first: tuple[slice, ...] = (slice(0, H),)
    second: tuple[slice, ...] = (slice(H, 2 * H),)
    if N > 1:
        first, second = (slice(None), *first), (slice(None), *second)
    times_column(odd_v, even_v[second])
    np.reciprocal(even_v[second], even_u[first])
    turns = [
        (even_u, odd_u[second], even_v[first], even_v, odd_v[second], odd_u[first]),
        (odd_u, even_u[second], odd_v[first], odd_v, even_v[second], even_u[first]),
    ]
    even, odd = states
    for i in range(num_iters - 1):
        for_u, u, inverse_u, for_v, v, inverse_v = turns[i & 1]
        times_row(for_u, u)
        np.reciprocal(u, inverse_u)
        times_column(for_v, v)
        np.reciprocal(v, inverse_v)
        if even.tobytes() == odd.tobytes():
            break
    if num_iters == 1:
        inverse_u, inverse_v = even_u[second], even_u[first]
    out: F32 = mix_NHH * inverse_u.reshape(N, H, 1)
    np.multiply(out, inverse_v.reshape(N, 1, H), out)
    return out


def _pre(residual_NHD: F32, w: MhcWeight, params: MhcParams) -> tuple[F32, F32, F32]:
    N, H, D = residual_NHD.shape
    mixes = _mixes(residual_NHD.reshape(N, H * D), w.fn, w.scale, w.base, params.rms_eps)
    gates, res_NHH = mixes[:, : 2 * H], mixes[:, 2 * H :].reshape(N, H, H)
    np.negative(gates, gates)
    np.subtract(res_NHH, np.maximum.reduce(res_NHH, axis=-1, keepdims=True), res_NHH)
    np.exp(mixes, mixes)
    np.add(gates, constant(1.0), gates)
    np.reciprocal(gates, gates)
    pre_NH = np.add(gates[:, :H], constant(params.eps))
    post_NH = np.multiply(gates[:, H:], constant(2.0))
    mix_NHH = np.divide(res_NHH, np.add.reduce(res_NHH, axis=-1, keepdims=True))
    np.add(mix_NHH, constant(params.eps), mix_NHH)
    res_NHH = sinkhorn(mix_NHH, params.num_iters, params.eps)
    collapsed = np.matmul(pre_NH[:, None], residual_NHD)[:, 0]
    return host.rms_norm(collapsed, w.norm.numpy(), params.rms_eps), post_NH, res_NHH


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
    flat = streams.reshape(streams.shape[0], -1)
    pre = _mixes(flat, w.fn, w.scale, w.base, params.rms_eps)
    np.negative(pre, pre)
    np.exp(pre, pre)
    np.add(pre, constant(1.0), pre)
    np.reciprocal(pre, pre)
    np.add(pre, constant(params.eps), pre)
    collapsed = np.matmul(pre[:, None], streams)[:, 0]
    return torch.from_numpy(host.rms_norm(collapsed, w.norm.numpy(), params.rms_eps))
