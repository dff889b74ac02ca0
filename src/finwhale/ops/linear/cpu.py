"""Linear layers on a CPU, in numpy."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import host
from finwhale.ops.host import F32
from finwhale.ops.linear import ACTIVATION_GROUP, LinearWeight


@dataclass(frozen=True, slots=True)
class TransposedWeight(LinearWeight):
    """A weight that lies in memory as [..., K, M]; `weight` and `matrix` are views of it."""

    matrix: F32 | None = None


def prepare_linear(w: LinearWeight) -> LinearWeight:
    host.limit_blas_threads()
    if w.weight.device.type == "meta":
        return w
    storage = torch.empty_like(w.weight.mT, memory_format=torch.contiguous_format)
    return TransposedWeight(storage.mT, w.round_input, matrix=storage.numpy())


def matrix_of(w: LinearWeight) -> F32:
    """[..., K, M]."""
    if isinstance(w, TransposedWeight) and w.matrix is not None:
        return w.matrix
    matrix: F32 = w.weight.mT.numpy()
    return matrix


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    x: F32 = x_NK.numpy()
    if w.round_input:
        x = host.round_e4m3(x, ACTIVATION_GROUP)
    return torch.from_numpy(host.matmul_rows(x, matrix_of(w)))


def grouped_linear(x_NGK: Tensor, w: LinearWeight) -> Tensor:
    x: F32 = x_NGK.numpy()
    matrix_GKM = matrix_of(w)
    if w.round_input:
        x = host.round_e4m3(x, ACTIVATION_GROUP)
    out_NGM = np.empty((*x.shape[:2], matrix_GKM.shape[2]), np.float32)

    def run(rows: slice) -> None:
        np.matmul(x[rows, :, None], matrix_GKM, out_NGM[rows, :, None])

    host.split_rows(x.shape[0], matrix_GKM.size, run)
    return torch.from_numpy(out_NGM)
