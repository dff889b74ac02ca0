"""The roundings that the model was trained with, as plain torch: shared by the references.

Source: DeepSeek-V4 technical report, low-precision training; the released inference code rounds
activations to E4M3 with one power-of-two scale a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
MIN_AMAX = 1e-4


def power_of_two_at_least(x: Tensor) -> Tensor:
    """The smallest power of two >= x, exactly, for positive normal float32 x of any shape."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def round_e4m3(x: Tensor, group: int) -> Tensor:
    """x [..., D] rounded to E4M3 with a power-of-two scale for each `group` values along D.

    The scale is amax / 448 rounded up to a power of two, amax at least 1e-4; a last group may be
    shorter. Returns x's shape and dtype: every result is exact in float32 and in bfloat16.
    """
    width = x.shape[-1]
    values = x.float()
    if width % group:
        values = F.pad(values, (0, group - width % group))
    grouped = values.unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1, keepdim=True).clamp_(min=MIN_AMAX)
    scale = power_of_two_at_least(amax.mul_(1.0 / E4M3_MAX))
    rounded = (grouped / scale).to(torch.float8_e4m3fn).float().mul_(scale)
    result: Tensor = rounded.flatten(-2)[..., :width].to(x.dtype)
    return result
