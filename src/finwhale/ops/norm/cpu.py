"""RMSNorm on a CPU, in numpy."""

import torch
from torch import Tensor

from finwhale.ops import cpu_math


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.from_numpy(cpu_math.rms_norm(x_ND.numpy(), cpu_math.view(weight_D), eps))
