"""The reference implementation of linear layers, for any device and dtype.

A row's bits may depend on the batch, because BLAS libraries choose the order of a sum by the number
of rows. The CPU table (ops/cpu_gemm.py) and `batch_invariant` on a GPU are batch-invariant.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.ops.linear import LinearWeight, RoundedInput
from finwhale.ops.rounding import round_e4m3, unscaled_e4m3


def prepare_linear(w: LinearWeight) -> LinearWeight:
    return w


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    if w.input_group:
        x_NK = round_e4m3(x_NK, w.input_group)
    x_NK = x_NK.to(w.weight.dtype)
    dtype = w.out_dtype or w.weight.dtype
    return F.linear(x_NK.to(dtype), w.weight.to(dtype))


def grouped_form(w: LinearWeight, head_dim: int) -> RoundedInput | None:
    return None


def grouped_linear(x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
    if scales_NS is not None:
        x_NGK = unscaled_e4m3(x_NGK.flatten(1), scales_NS).view(x_NGK.shape)
    elif w.input_group:
        x_NGK = round_e4m3(x_NGK, w.input_group)
    x_NGK = x_NGK.to(w.weight.dtype)
    return torch.stack(
        [F.linear(x, weight) for x, weight in zip(x_NGK.unbind(1), w.weight, strict=True)], 1
    )
