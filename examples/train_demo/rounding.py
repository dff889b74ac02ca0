"""The number formats of the checkpoint: e4m3 and e2m1 with power-of-two scales, as values and
as straight-through roundings.

Every function returns the rounded values in fp32 (a power of two times an e4m3 or e2m1 number,
so bf16 holds them exactly) and its gradient is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
BLOCK = 128
FP4_GROUP = 32


def power_of_two_at_least(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for positive normal fp32 x; by exponent bits, so exact on
    every device."""
    exponent = (x.contiguous().view(torch.int32) + 0x7FFFFF) >> 23
    return (exponent << 23).view(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """x rounded to the nearest e4m3 value, |x| <= 448."""
    return x.to(torch.float8_e4m3fn).float()


def to_e2m1(x: Tensor) -> Tensor:
    """x rounded to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the
    even mantissa; |x| <= 6."""
    a = x.abs()
    rounded = torch.where(
        a < 2, torch.round(a * 2) / 2, torch.where(a < 4, torch.round(a), torch.round(a / 2) * 2)
    )
    return torch.copysign(rounded, x)


def activation_scale(x: Tensor, group: int) -> Tensor:
    """Scales [..., n / group, 1] of x [..., n]: amax/448 rounded up to a power of two, amax at
    least 1e-4."""
    amax = x.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True).clamp(min=1e-4)
    return power_of_two_at_least(amax / E4M3_MAX)


def rounded_activation(x: Tensor, group: int) -> Tensor:
    """x [..., n] fp32 in e4m3 with one power-of-two scale per group of the last axis."""
    scale = activation_scale(x, group)
    return (to_e4m3(x.unflatten(-1, (-1, group)) / scale) * scale).flatten(-2)


def fp8_weight_scale(w: Tensor) -> Tensor:
    """Scales [ceil(out/128), ceil(in/128)] of w [out, in]: amax/448 of a 128x128 block rounded
    up to a power of two."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return power_of_two_at_least(blocks.abs().amax((1, 3)).clamp(min=1e-12) / E4M3_MAX)


def spread_block_scale(scale: Tensor, shape: torch.Size) -> Tensor:
    """Block scales [ceil(out/128), ceil(in/128)] spread to [out, in]."""
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return spread[: shape[0], : shape[1]]


def rounded_fp8_weight(w: Tensor) -> Tensor:
    """w [out, in] in e4m3 with a power-of-two scale per 128x128 block."""
    spread = spread_block_scale(fp8_weight_scale(w), w.shape)
    return to_e4m3(w / spread) * spread


def fp4_weight_scale(w: Tensor) -> Tensor:
    """Scales [..., in/32, 1] of w [..., in]: amax/6 of 32 inputs rounded up to a power of two."""
    amax = w.unflatten(-1, (-1, FP4_GROUP)).abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return power_of_two_at_least(amax / E2M1_MAX)


def rounded_fp4_weight(w: Tensor) -> Tensor:
    """w [..., in] in e2m1 with a power-of-two scale per 1x32."""
    scale = fp4_weight_scale(w)
    return (to_e2m1(w.unflatten(-1, (-1, FP4_GROUP)) / scale) * scale).flatten(-2)


def straight_through(x: Tensor, rounded: Tensor, enabled: Tensor) -> Tensor:
    """rounded where enabled (a bool scalar), else x; the gradient is that of x.

    x + (rounded - x) is exact: a value and its rounding are within a factor of two, or the
    rounding is zero.
    """
    detached = x.detach()
    return x + (torch.where(enabled, rounded.to(x.dtype), detached) - detached)


def round_activation(x: Tensor, group: int, enabled: Tensor) -> Tensor:
    return straight_through(x, rounded_activation(x.detach().float(), group), enabled)


def hadamard_matrix(width: int, device: torch.device) -> Tensor:
    """The normalised Sylvester Hadamard matrix [width, width] in fp32; width a power of two."""
    i = torch.arange(width, device=device)
    both = i[:, None] & i[None, :]
    odd = torch.zeros_like(both)
    for bit in range(width.bit_length() - 1):
        odd = odd ^ ((both >> bit) & 1)
    matrix: Tensor = (1.0 - 2.0 * odd) * width**-0.5
    return matrix


def rounded_index(x: Tensor) -> Tensor:
    """x [..., n] fp32 in e2m1 with a power-of-two scale for each 32 values of the last axis."""
    grouped = x.unflatten(-1, (-1, FP4_GROUP))
    amax = grouped.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126)
    scale = power_of_two_at_least(amax / E2M1_MAX)
    return (to_e2m1(grouped / scale) * scale).flatten(-2)


def round_index(x: Tensor, enabled: Tensor) -> Tensor:
    """An index query or key [..., C], rotated by the Hadamard matrix, then rounded to FP4.

    The rotation alone changes no score: both factors turn alike.
    """
    rotated = torch.matmul(x, hadamard_matrix(x.shape[-1], x.device).to(x.dtype))
    return straight_through(rotated, rounded_index(rotated.detach().float()), enabled)


def round_fp8_weight(w: Tensor, enabled: Tensor) -> Tensor:
    return straight_through(w, rounded_fp8_weight(w.detach()), enabled)


def round_fp4_weight(w: Tensor, enabled: Tensor) -> Tensor:
    return straight_through(w, rounded_fp4_weight(w.detach()), enabled)
