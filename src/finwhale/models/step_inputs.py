"""Inputs that the engine passes to a model and to its draft head in each step.

Legend: N tokens of a step, all sequences one after the other; B sequences; X tokens of the
vocabulary whose logits this rank computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol

from torch import Tensor

from finwhale.ops.paging import PageTable, Tokens

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The bounds of each sequence's prompt, in a model whose cache has groups that are rebuilt.

    A model computes all its layers on the last tokens of a prompt only. These tokens, and those
    that it computes again after a cached prefix, have windows that begin at the first of them.

    Attributes:
        cached: [B] int64: number of tokens whose entries are cached. The model computes some of
            them again, and does not write their entries.
        tail_end: [B] int64: the end of the prompt, or `cached` if the logits of all tokens after
            it are wanted.
        chunks: on the host: the number of each sequence's tokens in the step, and the number of
            tokens by which the step ends after `tail_end` (negative: before it).
    """

    cached: Tensor
    tail_end: Tensor
    chunks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of one forward over a batch of sequences of different lengths.

    Attributes:
        token_ids: [N] int64.
        tokens: the positions and sequences of the tokens.
        tables: the page table of each group of the cache.
        extra_kv_slots: [N,K] int32: slots of rows of the window group that each token sees in
            addition to its own window, in layers without compressed entries; unused slots are -1
            and come last. None: a token sees only its window.
        local_tokens: in a model whose ranks divide the tokens of this step, those of this rank; the
            model sets it. None: the ranks do not divide them.
        lane_rows: among data-parallel ranks, the most tokens that a rank has in this step.
        prompts: None: all layers compute all tokens, and windows begin at position 0.
    """

    token_ids: Tensor
    tokens: Tokens
    tables: Mapping[str, PageTable]
    extra_kv_slots: Tensor | None = None
    local_tokens: Tokens | None = None
    lane_rows: int = 0
    prompts: Prompts | None = None

    def bounded(self, max_len: int, max_query: int) -> "StepInputs":
        """The same inputs with other bounds of the tokens."""
        own = self.local_tokens
        return replace(
            self,
            tokens=self.tokens.bounded(max_len, max_query),
            local_tokens=None if own is None else own.bounded(max_len, max_query),
        )


class Segments(Protocol):
    """Divides a forward into captured graphs and functions that run eagerly between them.

    Attributes:
        breaks: whether `eager` ends a captured graph. If so, join all side streams before it.
    """

    breaks: bool

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `fn` outside the captured graph. `fn` writes into its arguments.

        At a replay, a StepInputs among the arguments may have other bounds (`StepInputs.bounded`).
        """


class Inline:
    """Segments without a capture: `eager` calls the function."""

    breaks = False

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        fn(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStart:
    """The inputs from which a draft head makes the drafts of B sequences.

    Attributes:
        hidden: [B,..]: the row that the head returned for each sequence's last verified token.
        newest_ids: [B] int64: the token after it, which the model has not computed yet.
        tokens: the last verified token of each sequence, in order. Position -1 is padding.
        tables: the page tables of the B sequences, with pages for the drafts.
        lane_rows: among data-parallel ranks, the most sequences that a rank has here.
    """

    hidden: Tensor
    newest_ids: Tensor
    tokens: Tokens
    tables: Mapping[str, PageTable]
    lane_rows: int = 0


ChooseDraft = Callable[[Tensor, int], Tensor]
"""A function that takes logits and k, and returns the token that each sequence gets as draft k.

    logits: [B,X] float32: this rank's part of the logits for draft k, counted from 0.
    Result: [B] int64 token ids, the same on all ranks, and valid even if logits are not finite.

With several ranks, the call is a collective.
"""
