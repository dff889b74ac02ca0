"""DeepSeek-V4.1's packed weights beside the float32 values that they stand for."""

import torch
from torch import Tensor

from finwhale.number_formats import e2m1_values


def e4m3(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Every code but NaN, and scales of blocks of 32x32 from 2^-12 to 2^-7."""
    codes = torch.randint(256, shape, generator=generator).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    blocks = (*shape[:-2], -(-shape[-2] // 32), shape[-1] // 32)
    scale = torch.exp2(-torch.randint(7, 13, blocks, generator=generator).float())
    return codes.view(torch.float8_e4m3fn), scale


def plain(weight: Tensor, scale: Tensor) -> Tensor:
    rows = scale.repeat_interleave(32, -2)[..., : weight.shape[-2], :]
    return weight.float() * rows.repeat_interleave(32, -1)


def fp4(generator: torch.Generator, *shape: int, largest: int = 125) -> tuple[Tensor, Tensor]:
    """Codes and exponents up to 20 below `largest`."""
    experts, rows, width = shape
    codes = torch.randint(256, (experts, rows, width // 2), generator=generator)
    below = torch.randint(21, (experts, rows, width // 32), generator=generator)
    below[:, 0, 0] = 0
    return codes.to(torch.uint8), (largest - below).to(torch.uint8)


def plain_fp4(codes: Tensor, exponents: Tensor) -> Tensor:
    values = e2m1_values(codes.device)[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    scale = torch.exp2(exponents.float() - 127)
    return (values.unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Hidden values near the middle between two E4M3 values may round to either side."""
    assert found.dtype == torch.bfloat16 and found.isfinite().all()
    error = (found.float() - wanted).abs()
    unit = wanted.abs().amax()
    assert error.max() <= 0.02 * unit
    assert (error > 2.0**-7 * wanted.abs() + 1e-3 * unit).float().mean() <= 0.02
