"""Linear layers, the definition.

A row of the result never depends on how many other rows there are: chunked prefill equals whole
prefill and a request in a batch equals the request alone, bit for bit. BLAS libraries keep that
promise on a CPU only for some row counts, so `matmul_rows` pads to a multiple of ROW_TILE.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.ops.linear import ACTIVATION_GROUP, LinearWeight
from finwhale.ops.rounding import round_e4m3, unscaled_e4m3

# MKL's sgemm takes other paths, with other orders of summation, for 1, 2, 3, 5, 6, 7, 9, 10 and 11
# rows; from there on and for multiples of four it has been seen to use one.
ROW_TILE = 4


def prepare_linear(w: LinearWeight) -> LinearWeight:
    return w


def matmul_rows(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
    """x [N, K] @ weight [M, K]^T, each row's bits independent of N."""
    rows = x_NK.shape[0]
    extra = -rows % ROW_TILE
    if extra == 0 or x_NK.device.type != "cpu":
        return F.linear(x_NK, weight_MK)
    padded = x_NK.expand(ROW_TILE, -1) if rows == 1 else F.pad(x_NK, (0, 0, 0, extra))
    return F.linear(padded, weight_MK)[:rows]


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    if w.round_input:
        x_NK = round_e4m3(x_NK, ACTIVATION_GROUP)
    return matmul_rows(x_NK.to(w.weight.dtype), w.weight)


def grouped_input(like_NX: Tensor, head_dim: int, w: LinearWeight) -> tuple[Tensor, Tensor | None]:
    groups, _, width = w.weight.shape
    return like_NX.new_empty(like_NX.shape[0], groups, width), None


def grouped_linear(x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
    if scales_NS is not None:
        x_NGK = unscaled_e4m3(x_NGK.flatten(1), scales_NS).view(x_NGK.shape)
    elif w.round_input:
        x_NGK = round_e4m3(x_NGK, ACTIVATION_GROUP)
    x_NGK = x_NGK.to(w.weight.dtype)
    return torch.stack(
        [matmul_rows(x, weight) for x, weight in zip(x_NGK.unbind(1), w.weight, strict=True)], 1
    )
