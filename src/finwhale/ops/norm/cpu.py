"""RMSNorm on a CPU, in numpy."""

import torch
from torch import Tensor

from finwhale.ops import host


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.from_numpy(host.rms_norm(x_ND.numpy(), host.view(weight_D), eps))
