"""Chooses sizes of steps that together have every launch signature of a table's kernels."""

import importlib

from finwhale.ops import Ops
from finwhale.ops.launch.sizes import ModelSizes


def _alignment(size: int) -> tuple[bool, ...]:
    """Whether a size is 1, and whether the arguments that follow from it are multiples of 16.

    Triton specialises kernels on both. The arguments are the size itself, and the size rounded up
    to a multiple of 4 or of 8.
    """
    return size == 1, *(-(-size // unit) * unit % 16 == 0 for unit in (1, 4, 8))


class LaunchSizes:
    """Sizes of every class of launches. The operators' modules publish where the classes end."""

    def __init__(self, ops: Ops, model: ModelSizes) -> None:
        names = dict.fromkeys(getattr(ops, name).__module__ for name, _ in ops.implementations())
        self._modules = [importlib.import_module(name) for name in names]
        self._model = model

    def tokens(self, first: int, last: int) -> list[int]:
        """Numbers of tokens of a step, from first to last."""
        return _in_every_class(first, last, self._published("launch_tokens", last))

    def rows(self, last: int) -> list[int]:
        """Numbers of rows of logits, from 1 to last."""
        tokens, rows = (self._published(name, last) for name in ("launch_tokens", "launch_rows"))
        return _in_every_class(1, last, tokens | rows)

    def contexts(self, num_tokens: int, longest: int) -> list[int]:
        """Lengths, up to `longest`, of the longest sequence in a step of `num_tokens` tokens."""
        found = self._published("launch_contexts", num_tokens, longest)
        return sorted(length for length in {1, *(n + 1 for n in found)} if length <= longest)

    def context_class(self, num_tokens: int) -> tuple[int, ...]:
        """A key that is equal for numbers of tokens with the same signatures at every context."""
        found = []
        for module in self._modules:
            if hasattr(module, "launch_contexts"):
                publish = getattr(module, "launch_tokens", None)
                sizes = () if publish is None else publish(self._model, num_tokens)
                found.append(sum(size < num_tokens for size in sizes))
        return tuple(found)

    def _published(self, name: str, *args: int) -> set[int]:
        """The last sizes of classes, from every module that has the function `name`."""
        functions = (getattr(module, name, None) for module in self._modules)
        return {size for publish in functions if publish for size in publish(self._model, *args)}


def _in_every_class(first: int, last: int, last_of_classes: set[int]) -> list[int]:
    """Sizes with every launch signature: the first size of each alignment within each class."""
    found: list[int] = []
    seen: set[tuple[bool, ...]] = set()
    for size in range(first, last + 1):
        if size - 1 in last_of_classes:
            seen.clear()
        alignment = _alignment(size)
        if alignment not in seen:
            seen.add(alignment)
            found.append(size)
    return found
