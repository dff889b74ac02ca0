"""One call of an operator, which tests and bench share: what `cases.py` of a family lists."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """Arguments for one operator, and how its implementations may differ.

    Attributes:
        operator: its field in Ops.
        args: makes the arguments on the CPU in float32, the same ones each time.
        by_token: positions of the arguments that have a row for each token, where a token's
            result depends on its own rows alone; empty where tokens depend on each other.
        written: positions of the arguments that the operator writes.
        tolerance: of float results: the largest difference, in units of the largest value. The
            default: implementations add the same terms in another order, so that results differ
            by a few units of 2^-24 of the largest term, times at most the root of their number,
            2^6 here.
        flips: the share of values that may differ more, by `flip` units: a value that falls on
            the other side of a rounding's boundary differs by a step, 2^-3 of itself.
    """

    operator: str
    name: str
    args: Callable[[], tuple[Any, ...]]
    by_token: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    tolerance: float = 8e-6
    flips: float = 0.0
    flip: float = 2.0**-3

    def __str__(self) -> str:
        return f"{self.operator} {self.name}"


class Draw:
    """Random tensors, the same in every run."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def outliers(self, *shape: int) -> Tensor:
        """Normal, one value in about a hundred 300 times as large, and the last row zero."""
        x = self.normal(*shape)
        rare = torch.rand(shape, generator=self.generator) < 0.01
        x = torch.where(rare, 300 * x, x)
        x[-1:] = 0
        return x

    def whole(self, high: int, *shape: int, low: int = 0) -> Tensor:
        """int64 in low..high-1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def distinct(self, high: int, count: int) -> Tensor:
        """[count] distinct int64 in 0..high-1, in no order."""
        return torch.randperm(high, generator=self.generator)[:count]

    def rotation(self, num_tokens: int, width: int) -> Tensor:
        """(cos, sin) [N,R/2,2] of random angles."""
        angle = torch.rand((num_tokens, width // 2), generator=self.generator) * 6.28
        return torch.stack((angle.cos(), angle.sin()), -1)
