"""The index of a process among the processes that share a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `size` ranks, counted from 0.

    Attributes:
        whole_attention: the rank holds the weights of all heads as well as those of its own, and
            uses them in steps that the ranks divide by tokens.
    """

    index: int
    size: int
    whole_attention: bool = False

    def rows_per_rank(self, num_rows: int) -> int:
        """Number of rows of a rank when the ranks divide `num_rows`. The last may have fewer."""
        return -(-num_rows // self.size)

    def rows(self, num_rows: int) -> slice:
        """This rank's part of `num_rows` rows."""
        count = self.rows_per_rank(num_rows)
        start = min(self.index * count, num_rows)
        return slice(start, min(start + count, num_rows))


ALONE = Rank(0, 1)
