"""The model's links to the other ranks.

A rank holds some of the heads, output groups, vocabulary rows, and a part of every expert's width.
So the outputs of its blocks (after wo_b, after combine) are partial sums, and its logits are some
columns. Everything else is the same on all ranks, in every bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.distributed.collectives import Collectives
from finwhale.distributed.rank import Rank


class RankLinks:
    """Combines the results of the ranks. All layers of a model share one.

    Every call runs on the current CUDA stream, never on a side stream: all ranks must make the same
    calls in the same order.

    Args:
        partial_dtype: dtype of the partial sums of blocks; None: that of the activations.
    """

    def __init__(self, collectives: Collectives, partial_dtype: torch.dtype | None = None) -> None:
        self.rank = collectives.rank
        self.partial_dtype = partial_dtype
        self._collectives = collectives

    def sum(self, partial_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of the ranks' partial sums, rounded to `dtype`. May overwrite them."""
        return self._collectives.all_reduce(partial_ND, overwrite=True).to(dtype)

    def join(self, part_MX: Tensor) -> Tensor:
        """The columns of all ranks: [M,X] -> [M,X * ranks]."""
        return self._collectives.all_gather(part_MX, 1)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Within it, results have the right shapes but do not depend on other ranks."""
        kept = self._collectives
        self._collectives = _Apart(self.rank)
        try:
            yield
        finally:
            self._collectives = kept


@dataclass(frozen=True, slots=True)
class _Apart:
    """Collectives that wait for nobody: the other ranks' tensors are taken to equal this one's."""

    rank: Rank

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.rank.size, dim)

    def check(self) -> None:
        pass
