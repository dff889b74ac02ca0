"""Every tensor that one forward reads, and where a captured graph may break.

Legend: N tokens of the step, all sequences one after the other; W window; K padded C128 entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol

from torch import Tensor

from finwhale.ops.compressor import CompressStep
from finwhale.ops.indexer import IndexStep

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One forward over a batch of sequences of different lengths.

    Attributes:
        token_ids, positions: [N] int64.
        window_write_slots: [N] int64: each token's slot in the window's pool.
        window_slots: [N,W] int64: slots of positions p-W+1 .. p; -1 before the beginning.
        c4, index: the C4 layers' step; None for a model without such layers.
        c128: the C128 layers' step, and c128_slots [N,K] int64 the entries that each token sees,
            -1 past the end; K is 0 where none does.
    """

    token_ids: Tensor
    positions: Tensor
    window_write_slots: Tensor
    window_slots: Tensor
    c4: CompressStep | None
    index: IndexStep | None
    c128: CompressStep | None
    c128_slots: Tensor | None


class Segments(Protocol):
    """Where a captured graph may break. Passed in, never looked up."""

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `fn` outside the captured graph. `fn` writes into its arguments."""
        ...


class Inline:
    """No capture in progress: just call."""

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        fn(*args, **kwargs)
