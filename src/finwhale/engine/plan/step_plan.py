"""A step plan: everything a rank needs to execute one step. Plain data, and no torch.

The engine makes plans and ranks execute them, all ranks the same plans in the same order. A plan is
immutable and can be pickled. It consists of named tuples, which take the least time to make. It
refers to sequences by slot: a number below max_num_seqs that a sequence has from its admission
until it ends or is preempted. What does not change from step to step (sampling settings, pages) is
sent once; the rank keeps it by slot.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# A token id in a plan, or in a sequence, that the device is still choosing.
PENDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the tokens of one sequence are chosen (see SamplingParams).

    Attributes:
        seed, index: the draws follow from the request's seed and the number of the continuation.
        greedy: the temperature is 0 in float32, in which ranks compute.
        logit_bias: pairs of token id and bias.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    seed: int
    index: int
    greedy: bool


class SlotAdmission(NamedTuple):
    """A sequence starts in a slot; whatever the slot had before is gone."""

    slot: int
    settings: SamplingSettings


class PageUpdate(NamedTuple):
    """The pages of one slot in one cache group, from `begin` on.

    Attributes:
        group: index into the model's cache groups.
        first: number of the first page of the table: page i holds rows of page number first + i.
        begin: pages before this index stay as they are. 0: the whole table is sent.
        pages: the pages from index `begin` to the table's end.
    """

    slot: int
    group: int
    first: int
    begin: int
    pages: tuple[int, ...]


class PenaltyRows(NamedTuple):
    """Tokens that penalties count, for the rows that have penalties.

    Attributes:
        rows: rows of the sampling plan.
        lengths: how many of the tokens belong to each of these rows.
        token_ids: int64.
        counts: float32, how often the output holds each token. 0: only the prompt does.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    token_ids: NDArray[np.int64]
    counts: NDArray[np.float32]


class AllowedRows(NamedTuple):
    """Grammar masks. The engine computes them: matchers cannot leave its process.

    Attributes:
        rows: rows of the sampling plan that have a mask.
        words: [rows, ceil(V/32)] int32; bit i % 32 of word i // 32 allows token i.
    """

    rows: tuple[int, ...]
    words: NDArray[np.int32]


class SamplingPlan(NamedTuple):
    """The choice of a step's tokens, one row a token.

    Attributes:
        slots: the slot of each row; its settings hold.
        positions: for each row that is not greedy, the position of its draw: how many tokens of
            output come before it.
        rows: which rows of the step's logits; None: all, in order.
        penalties, allowed: None: no row has any.
    """

    slots: tuple[int, ...]
    positions: tuple[int, ...] = ()
    rows: tuple[int, ...] | None = None
    penalties: PenaltyRows | None = None
    allowed: AllowedRows | None = None


class DraftPlan(NamedTuple):
    """What an engine that drafts adds to a step. One entry a chunk.

    Attributes:
        drafts: tokens to verify: the last ones of the chunk.
        propose: how many drafts to make after the step.
        next_ids: for a chunk that ends before the sequence's last known token, the token behind it;
            else 0.
        on_device: all chunks decode with the same numbers of drafts, and the rank's device steps
            (draft_decode.py) run them.
        links: the step before is not known yet: each chunk goes on from this row of it, by as many
            tokens further as that has right drafts, and its token and drafts are on the device.
            None: the plan has the tokens.
    """

    drafts: tuple[tuple[int, ...], ...]
    propose: tuple[int, ...]
    next_ids: tuple[int, ...]
    on_device: bool = False
    links: tuple[int, ...] | None = None


class StepPlan(NamedTuple):
    """One step: chunks of sequences, one entry a chunk in `slots`, `starts`, `lengths`.

    Attributes:
        starts: position of each chunk's first token.
        lengths: tokens of each chunk, drafts included.
        token_ids: of all chunks, one after the other; PENDING: the step before samples it.
        pending_rows: for each PENDING token, its row among the tokens of the step before.
        num_logits: for how many of its last tokens each chunk wants logits.
        decodes: each chunk is one token whose logits are wanted.
        freed: slots whose sequences ended or were preempted. Freed before the others are filled.
        admitted: settings of new sequences.
        pages: what changed in the page tables of this step's slots.
        sampling: the choice of tokens. None: it follows alone, once the tokens of the step before
            are known (penalties and grammars need them).
        draft: None: the engine does not draft.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_logits: tuple[int, ...]
    decodes: bool
    pending_rows: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    admitted: tuple[SlotAdmission, ...] = ()
    pages: tuple[PageUpdate, ...] = ()
    sampling: SamplingPlan | None = None
    draft: DraftPlan | None = None

    @property
    def ends(self) -> list[int]:
        """Position behind each chunk's last token."""
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]

    @property
    def query_start(self) -> list[int]:
        """Where each chunk's tokens begin among the step's, and their number at the end."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def logits_rows(self) -> list[int]:
        """The tokens of the step whose logits are wanted."""
        return [
            row
            for end, count in zip(self.query_start[1:], self.num_logits, strict=True)
            for row in range(end - count, end)
        ]
