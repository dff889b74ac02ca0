"""Linear layers on a CPU."""

import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_gemm import gemm, gemms
from finwhale.ops.linear import LinearWeight


def prepare_linear(w: LinearWeight) -> LinearWeight:
    """Store the weight as [..., K, M], the order in which a GEMV reads it."""
    cpu_math.limit_blas_threads()
    storage = torch.empty_like(w.weight.mT, memory_format=torch.contiguous_format)
    return LinearWeight(storage.mT, w.input_group)


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    if w.input_group:
        x_NK = torch.from_numpy(cpu_math.round_e4m3(x_NK.numpy(), w.input_group))
    return gemm(w.weight)(x_NK)


def grouped_linear(x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
    assert scales_NS is None, "this table's input is not rounded"
    if w.input_group:
        x_NGK = torch.from_numpy(cpu_math.round_e4m3(x_NGK.numpy(), w.input_group))
    parts = zip(gemms(w.weight), x_NGK.unbind(1), strict=True)
    return torch.stack([multiply(x_NK) for multiply, x_NK in parts], 1)
