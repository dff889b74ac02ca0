"""What the experts' kernels rely on between their two products: float32 may lie in memory as
bfloat16, its last bit set if anything was cut off, and rounds to the same E4M3 and scale.
"""

import torch
from torch import Tensor

from finwhale.ops.rounding import MIN_AMAX, scaled_e4m3


def to_odd(x: Tensor) -> Tensor:
    """As `to_odd` of experts_hopper_parts.py."""
    bits = x.view(torch.int32)
    bits = (bits >> 16) | ((bits & 0xFFFF) != 0).int()
    return bits.to(torch.int16).view(torch.bfloat16).float()


def assert_same(x_NK: Tensor) -> None:
    """Each row has one scale."""
    for one, other in zip(
        scaled_e4m3(x_NK, x_NK.shape[1]), scaled_e4m3(to_odd(x_NK), x_NK.shape[1]), strict=True
    ):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_at_every_boundary() -> None:
    """Every E4M3 value and every middle between two, times a power of two, and what is beside it;
    alone, and in a row whose scale another value decides.
    """
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    for exponent in range(-40, 40):
        exact = (points * 2.0**exponent).float().view(torch.int32)
        for step in (-0xFFFF, -1, 0, 1, 0x7FFF, 0x8000, 0xFFFF):
            x = (exact + step).clamp(min=0).view(torch.float32)
            assert_same(x[:, None])
            for largest in (448.0 * 2.0**exponent, 450.0 * 2.0**exponent, MIN_AMAX):
                assert_same(torch.stack((-x, torch.full_like(x, largest)), 1))


def test_random_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 128, generator=generator)
    spread = torch.exp2(-20 * torch.rand(x.shape, generator=generator))
    assert_same(x * spread * 10 ** (8 * torch.rand(4096, 1, generator=generator) - 6))
