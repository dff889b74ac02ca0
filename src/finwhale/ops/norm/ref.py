"""The reference implementation of RMSNorm."""

import torch
from torch import Tensor


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = x_ND.float()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (x * rstd).mul_(weight_D).to(x_ND.dtype)
