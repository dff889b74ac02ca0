"""How a kernel is launched beside the one before it."""

from typing import Any

import torch
from torch import Tensor


def early_launch(x: Tensor, pays: bool = True) -> dict[str, Any]:
    """Launch options: start while the kernel before ends, where the GPU can (Hopper and later).

    Such a kernel takes a constexpr PDL and, where that is true, begins with gdc_launch_dependents
    and reads nothing that another kernel writes before gdc_wait. One that waits first and lets the
    next start then promises more: what was written before itself is there when the next one starts
    (the experts' rounding does so for their products, which read where their tokens are).
    """
    if x.device.type != "cuda" or torch.version.hip or not pays:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
