"""The definition of each collective over a list of the ranks' tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """Sum in float32 as a tree of pairs, ((x0 + x1) + (x2 + x3)) + ..., and round once.

    Args:
        parts: one tensor for each of 1, 2, 4 or 8 ranks, of one shape and dtype.
    """
    if len(parts).bit_count() != 1:
        raise ValueError(f"the tree of pairs needs 1, 2, 4 or 8 ranks, got {len(parts)}")
    sums = [part.float() for part in parts]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0].to(parts[0].dtype)


def all_gather(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate along `dim` in the order of the ranks."""
    return torch.cat(list(parts), dim)


def padded(x: Tensor, num_rows: int) -> Tensor:
    """x padded with rows of zeros to `num_rows` rows."""
    missing = num_rows - len(x)
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
