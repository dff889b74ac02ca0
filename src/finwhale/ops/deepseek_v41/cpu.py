"""DeepSeek-V4.1's operators on a CPU: a token's bits do not depend on the rest of its step.

The package has the legend.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_math import F32, view
from finwhale.ops.deepseek_v41 import ref
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.mhc.cpu import mixes_of
from finwhale.ops.tables import bind


def mhc_pre_delayed(
    residual_NHD: Tensor, pre_NH: Tensor, w: MhcWeight, params: MhcParams
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    residual: F32 = np.ascontiguousarray(residual_NHD.numpy())
    own = [torch.from_numpy(part) for part in mixes_of(residual, w, params)]
    collapsed = cpu_math.matmul(pre_NH.numpy()[:, None], residual)[:, 0]
    x_ND = cpu_math.rms_norm(collapsed, view(w.norm), params.rms_eps)
    return torch.from_numpy(x_ND), own[1], own[2], own[0]


def engram_gate(
    residual_NHD: Tensor,
    key_NHD: Tensor,
    value_ND: Tensor,
    q_weight_HD: Tensor,
    k_weight_HD: Tensor,
    eps: float,
) -> Tensor:
    x: F32 = np.ascontiguousarray(residual_NHD.numpy())
    key: F32 = np.ascontiguousarray(key_NHD.numpy())
    product = x * view(q_weight_HD) * view(k_weight_HD) * key
    score = np.add.reduce(product, -1, keepdims=True) * np.float32(x.shape[-1] ** -0.5)
    score = score * cpu_math.inverse_rms(x, eps) * cpu_math.inverse_rms(key, eps)
    root = np.sqrt(np.maximum(np.abs(score), np.float32(1e-6))) * np.sign(score)
    gate = np.reciprocal(np.float32(1) + np.exp(-root))
    return torch.from_numpy(x + gate * value_ND.numpy()[:, None])


def _product(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(cpu_math.matmul_rows(x.numpy(), y.numpy()))


OPS = replace(
    ref.OPS,
    select=bind(ref.select_shared, product=_product),
    mhc_pre=mhc_pre_delayed,
    engram_gate=engram_gate,
)
