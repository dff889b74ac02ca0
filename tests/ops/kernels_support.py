"""What the kernels' tests share: inputs, and the two ways to compare.

float32: a kernel adds the same terms as the reference in another order, so that results differ by
a few units of 2^-24 of the largest term a sum has, times at most the root of their number, 2^6
here: 8e-6 of the largest value is allowed. bfloat16: both round one float32 value that differs by
as little, so that they differ by at most one rounding, 2^-7 of a value.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are for the GPU in this process; TRITON_INTERPRET=1 pytest tests/ops runs these",
        allow_module_level=True,
    )

import torch
from torch import Tensor

from . import triton_interpreter as triton_interpreter

DTYPES = (torch.float32, torch.bfloat16)


class Inputs:
    """Normal tensors, the same in every run."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator) * scale
        return x if dtype is None else x.to(dtype)

    def outliers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal, one value in about a hundred 300 times as large."""
        x = self.normal(*shape)
        rare = torch.rand(shape, generator=self.generator) < 0.01
        x = torch.where(rare, 300 * x, x)
        return x if dtype is None else x.to(dtype)

    def rotation(self, num_tokens: int, width: int) -> Tensor:
        """(cos, sin) [N,R/2,2] of random angles."""
        angle = torch.rand((num_tokens, width // 2), generator=self.generator) * 6.28
        return torch.stack((angle.cos(), angle.sin()), -1)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if found.numel() == 0:
        return
    found32, wanted32 = found.float(), wanted.float()
    assert found32.isfinite().all()
    allowed = 8e-6 * wanted32.abs().amax()
    if found.dtype == torch.bfloat16:
        allowed = allowed + 2.0**-7 * wanted32.abs()
    excess = ((found32 - wanted32).abs() - allowed).amax()
    assert excess <= 0, f"off by {excess.item():.3g} more than allowed"


def assert_all_close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
