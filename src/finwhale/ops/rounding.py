"""The roundings that the model was trained with, in plain torch, for the reference operators.

Source: DeepSeek-V4 technical report, low-precision training; the released inference code rounds
activations to E4M3, and the indexer's queries and keys to FP4 (e2m1), with one power-of-two scale
a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.number_formats import E2M1_MAX, E4M3_MAX, e2m1_codes, e2m1_values

MIN_AMAX = 1e-4
# With this bound, the smallest scale is the smallest normal float32, and every scale's E8M0 byte is
# in 1..253.
MIN_FP4_AMAX = E2M1_MAX * 2.0**-126
FP4_GROUP = 32


def power_of_two_at_least(x: Tensor) -> Tensor:
    """The smallest power of two >= x, exactly, for positive normal float32 x of any shape."""
    bits = x.view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scaled_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [..., D] in whole groups -> (E4M3 of x / scale [..., D], float32 scales [..., D/group]).

    The scale is amax / 448 rounded up to a power of two, where amax is at least 1e-4.
    """
    grouped = x.float().unflatten(-1, (-1, group))
    amax = grouped.abs().amax(-1).clamp_(min=MIN_AMAX)
    scale = power_of_two_at_least(amax.mul_(1.0 / E4M3_MAX))
    return (grouped / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2), scale


def unscaled_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 values of a result of `scaled_e4m3`."""
    grouped = values.float().unflatten(-1, (scale.shape[-1], -1))
    return grouped.mul_(scale[..., None]).flatten(-2)


def round_e4m3(x: Tensor, group: int) -> Tensor:
    """x [..., D] rounded to E4M3 with a power-of-two scale for each `group` values along D.

    Unlike in `scaled_e4m3`, the last group may be shorter. Returns x's shape and dtype: every
    result is exact in float32 and in bfloat16.
    """
    width = x.shape[-1]
    values = F.pad(x, (0, -width % group)) if width % group else x
    return unscaled_e4m3(*scaled_e4m3(values, group))[..., :width].to(x.dtype)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def hadamard(x: Tensor) -> Tensor:
    """x [..., C] times the normalised Sylvester Hadamard matrix of C, float32.

    The matrix is [[H, H], [H, -H]] with entries +-C^-0.5. It is orthogonal and symmetric.

    Raises:
        ValueError: C is not a power of two.
    """
    width = x.shape[-1]
    if not is_power_of_two(width):
        raise ValueError(f"a Hadamard matrix of {width} is not defined: wanted a power of two")
    y, half = x.float(), 1
    while half < width:
        first, second = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return y * width**-0.5


def fp4_group(width: int) -> int:
    """Number of values that share a scale: 32, or the whole width if that is less."""
    return min(FP4_GROUP, width)


def scaled_fp4(x: Tensor, least_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., C] -> (e2m1 codes uint8 [..., C], float32 scales [..., C/32]), C in whole groups.

    The scale is amax / 6 rounded up to a power of two, where amax is at least 6 * 2^-126. x / scale
    is rounded to the nearest of 0 .5 1 1.5 2 3 4 6 and their negatives, ties to the even code.

    Args:
        least_scale: lower bounds of the scales: powers of two, broadcastable to the scales.
    """
    grouped = x.float().unflatten(-1, (-1, fp4_group(x.shape[-1])))
    amax = grouped.abs().amax(-1).clamp_(min=MIN_FP4_AMAX)
    scale = power_of_two_at_least(amax / E2M1_MAX)
    if least_scale is not None:
        scale = torch.maximum(scale, least_scale)
    values = grouped / scale[..., None]
    codes = e2m1_codes(values.abs()) + 8 * (values < 0).to(torch.uint8)
    flat: Tensor = codes.flatten(-2)
    return flat, scale


def unscaled_fp4(codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 values of a result of `scaled_fp4`."""
    grouped = e2m1_values(codes.device)[codes.long()].unflatten(-1, (scale.shape[-1], -1))
    return grouped.mul_(scale[..., None]).flatten(-2)


def rotate_to_fp4(x: Tensor) -> Tensor:
    """Rotate an index query or key x [..., C] by `hadamard`, then round it to FP4, for scoring.

    Returns x's dtype: every result is exact in float32 and in bfloat16.
    """
    return unscaled_fp4(*scaled_fp4(hadamard(x))).to(x.dtype)
