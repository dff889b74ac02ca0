"""Every tensor that one forward reads, and where a captured graph may break.

Legend: N tokens of the step, all sequences one after the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, Protocol

from torch import Tensor

from finwhale.models.deepseek_v4.cache_spec import GroupName
from finwhale.ops.paging import PageTable, Tokens

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One forward over a batch of sequences of different lengths.

    Attributes:
        token_ids: [N] int64.
        tokens: where they stand.
        tables: the page table of each group of the cache.
    """

    token_ids: Tensor
    tokens: Tokens
    tables: Mapping[GroupName, PageTable]


class Segments(Protocol):
    """Where a captured graph may break. Passed in, never looked up."""

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `fn` outside the captured graph. `fn` writes into its arguments.

        Of the arguments, the step's StepInputs may be another one at each replay, with the same
        tensors and other host bounds.
        """
        ...


class Inline:
    """No capture in progress: just call."""

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        fn(*args, **kwargs)
