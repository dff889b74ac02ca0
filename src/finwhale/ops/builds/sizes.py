"""Chooses sizes of steps that together have every launch signature of a table's kernels."""

from finwhale.ops import Ops
from finwhale.ops.launch.sizes import ModelSizes


def _alignment(size: int) -> tuple[bool, ...]:
    """Whether a size is 1, and whether the arguments that follow from it are multiples of 16.

    Triton specialises kernels on both. The arguments are the size itself, and the size rounded up
    to a multiple of 4 or of 8.
    """
    return size == 1, *(-(-size // unit) * unit % 16 == 0 for unit in (1, 4, 8))


class LaunchSizes:
    """Sizes of every class of launches of a table (`Ops.launch_classes`)."""

    def __init__(self, ops: Ops, model: ModelSizes) -> None:
        self._classes = ops.launch_classes
        self._model = model

    def tokens(self, first: int, last: int) -> list[int]:
        """Numbers of tokens of a step, from first to last."""
        return _in_every_class(first, last, self._tokens(last), self._model.num_lanes)

    def rows(self, last: int) -> list[int]:
        """Numbers of rows of logits, from 1 to last."""
        rows = {size for c in self._classes for size in c.rows(self._model, last)}
        return _in_every_class(1, last, self._tokens(last) | rows)

    def contexts(self, num_tokens: int, longest: int) -> list[int]:
        """Lengths, up to `longest`, of the longest sequence in a step of `num_tokens` tokens."""
        publish = [c.contexts for c in self._classes if c.contexts is not None]
        found = {n + 1 for of in publish for n in of(self._model, num_tokens, longest)}
        return sorted(length for length in {1, *found} if length <= longest)

    def context_class(self, num_tokens: int) -> tuple[int, ...]:
        """A key that is equal for numbers of tokens with the same signatures at every context."""
        found = (c.tokens(self._model, num_tokens) for c in self._classes if c.contexts is not None)
        return tuple(sum(size < num_tokens for size in sizes) for sizes in found)

    def _tokens(self, most: int) -> set[int]:
        factors = {1, self._model.num_lanes}
        return {
            size // factor
            for factor in factors
            for model in {self._model, self._model.of_draft_head}
            for c in self._classes
            for size in c.tokens(model, most * factor)
        }


def _in_every_class(first: int, last: int, last_of_classes: set[int], factor: int = 1) -> list[int]:
    """The first size of each alignment in each class. Together, these sizes need every kernel.

    Args:
        factor: some operators run with sizes that are `factor` times as large.
    """
    found: list[int] = []
    seen: set[object] = set()
    for size in range(first, last + 1):
        if size - 1 in last_of_classes:
            seen.clear()
        alignment = _alignment(size), _alignment(size * factor)
        if alignment not in seen:
            seen.add(alignment)
            found.append(size)
    return found
