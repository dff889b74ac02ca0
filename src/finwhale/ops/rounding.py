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


def scaled_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [..., D] in whole groups -> (E4M3 of x / scale [..., D], float32 scales [..., D/group]).

    The scale is amax / 448 rounded up to a power of two, amax at least 1e-4.
    """
    grouped = x.float().unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1).clamp_(min=MIN_AMAX)
    scale = power_of_two_at_least(amax.mul_(1.0 / E4M3_MAX))
    return (grouped / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2), scale


def unscaled_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """What `scaled_e4m3` stands for, float32."""
    grouped = values.float().unflatten(-1, (scale.shape[-1], -1))
    result: Tensor = grouped.mul_(scale[..., None]).flatten(-2)
    return result


def round_e4m3(x: Tensor, group: int) -> Tensor:
    """x [..., D] rounded to E4M3 with a power-of-two scale for each `group` values along D.

    As `scaled_e4m3`, but a last group may be shorter. Returns x's shape and dtype: every result is
    exact in float32 and in bfloat16.
    """
    width = x.shape[-1]
    values = F.pad(x, (0, -width % group)) if width % group else x
    return unscaled_e4m3(*scaled_e4m3(values, group))[..., :width].to(x.dtype)
