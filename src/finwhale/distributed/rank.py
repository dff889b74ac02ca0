"""The place of one process among the processes that share a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `size` ranks, counted from 0."""

    index: int
    size: int


ALONE = Rank(0, 1)
