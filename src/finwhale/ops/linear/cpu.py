"""Linear layers on a CPU."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_gemm import Gemm, gemms
from finwhale.ops.cpu_math import F32
from finwhale.ops.host_forms import HostForms
from finwhale.ops.linear import ACTIVATION_GROUP, LinearWeight


@dataclass(frozen=True)
class HostLinear(HostForms, LinearWeight):
    """A weight with its GEMMs, which the first use packs."""

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        return gemms(self.weight)


def prepare_linear(w: LinearWeight) -> HostLinear:
    """Store the weight as [..., K, M], the order in which a GEMV reads it."""
    cpu_math.limit_blas_threads()
    storage = torch.empty_like(w.weight.mT, memory_format=torch.contiguous_format)
    return HostLinear(storage.mT, w.round_input)


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    assert isinstance(w, HostLinear)
    x: F32 = x_NK.numpy()
    return w.gemms[0](cpu_math.round_e4m3(x, ACTIVATION_GROUP) if w.round_input else x)


def grouped_linear(x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
    assert isinstance(w, HostLinear)
    assert scales_NS is None, "this table's input is not rounded"
    x: F32 = x_NGK.numpy()
    if w.round_input:
        x = cpu_math.round_e4m3(x, ACTIVATION_GROUP)
    return torch.stack([multiply(x[:, g]) for g, multiply in enumerate(w.gemms)], 1)
