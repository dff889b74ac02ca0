"""Sizes at which the launches of kernels change.

Triton compiles a kernel once for each launch signature: the constants of the launch, and for each
integer argument whether it is 1 or a multiple of 16. A table lists the `LaunchClasses` of its
kernels, and `ops/builds` compiles the kernels of every class at start.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

NUM_MULTIPROCESSORS = 132  # an H100's or H200's; the tables pass the number of the GPU in use


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that launch signatures depend on.

    Attributes:
        linears: (rows per token, groups, values per group) of the inputs of linear layers.
        complete_ratios: compression ratios of which attention reads every entry.
        num_ranks: number of ranks that divide the vocabulary among themselves.
        num_lanes: number of ranks whose tokens the experts compute together, as many of each.
        draft_experts: num_experts and experts_per_token of the draft head; None: the model's.
    """

    vocab_size: int
    num_heads: int
    head_dim: int
    window: int
    index_topk: int
    complete_ratios: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    linears: frozenset[tuple[int, int, int]]
    num_ranks: int = 1
    num_lanes: int = 1
    draft_experts: tuple[int, int] | None = None

    @property
    def of_draft_head(self) -> "ModelSizes":
        experts, each = self.draft_experts or (self.num_experts, self.experts_per_token)
        return replace(self, num_experts=experts, experts_per_token=each, draft_experts=None)


def _none(model: ModelSizes, *sizes: int) -> set[int]:
    return set()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchClasses:
    """The sizes at which the launch signatures of an operator's kernels change.

    Each function returns the last size of every class: the next size has other signatures.

    Attributes:
        tokens: (model, most) -> numbers of tokens up to `most`.
        rows: (model, most) -> numbers of rows of logits up to `most`.
        contexts: (model, num_tokens, longest) -> lengths of the longest sequence up to `longest`;
            None: the context changes no signature.
    """

    tokens: Callable[[ModelSizes, int], set[int]] = _none
    rows: Callable[[ModelSizes, int], set[int]] = _none
    contexts: Callable[[ModelSizes, int, int], set[int]] | None = None


def last_of_classes(class_of: Callable[[int], object], most: int) -> set[int]:
    """The numbers from 1 to most - 1 after which `class_of` changes."""
    classes = [class_of(n) for n in range(1, most + 1)]
    return {n for n in range(1, most) if classes[n - 1] != classes[n]}


def up_to(most: int, sizes: Iterable[int]) -> set[int]:
    """The sizes from 1 to `most`."""
    return {size for size in sizes if 0 < size <= most}
