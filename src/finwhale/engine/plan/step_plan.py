"""A step plan: everything a rank needs to execute one step. Plain data, no torch.

The engine makes plans, and all ranks execute the same plans in the same order. A plan is immutable
and can be pickled. It consists of named tuples, because they are the fastest to make. It refers to
sequences by slot: a number below max_num_seqs that a sequence has from its admission until it ends
or is preempted. Sampling settings and pages are sent only when they change; the rank stores them by
slot.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# This id, in a plan or a sequence, stands for a token that the device has not sampled yet.
PENDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The sampling settings of one sequence (see SamplingParams).

    Attributes:
        logit_bias: pairs of token id and bias.
        seed, index: the request's seed and the index of the continuation determine the draws.
        greedy: whether the temperature is 0 when rounded to float32, in which ranks compute.
        num_prompt: number of prompt tokens. The position of a draw counts from the prompt's end.
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
    num_prompt: int


class SlotAdmission(NamedTuple):
    """A sequence starts in a slot. It replaces everything that the rank has stored for the slot."""

    slot: int
    settings: SamplingSettings


class PageUpdate(NamedTuple):
    """A change of one slot's page table in one cache group.

    Attributes:
        group: index into the model's cache groups.
        first: page number of the table's first entry; entry i is the page with number first + i.
        begin: index of the first changed entry. 0: the whole table is sent.
        pages: the entries from index `begin` to the table's end.
    """

    slot: int
    group: int
    first: int
    begin: int
    pages: tuple[int, ...]


class PenaltyRows(NamedTuple):
    """The tokens that penalties count, for the rows that have penalties.

    Attributes:
        rows: rows of the sampling plan that have penalties.
        lengths: number of tokens of each of these rows.
        token_ids: int64: the tokens of all these rows, one row after the other.
        counts: float32: each token's count in the output. 0: the token is only in the prompt.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    token_ids: NDArray[np.int64]
    counts: NDArray[np.float32]


class AllowedRows(NamedTuple):
    """Masks of grammars, and of tokens that would end the output too early. The engine computes
    them, because matchers cannot leave its process.

    Attributes:
        rows: rows of the sampling plan that have a mask.
        words: [rows, ceil(V/32)] int32; bit i % 32 of word i // 32 allows token i.
    """

    rows: tuple[int, ...]
    words: NDArray[np.int32]


class SamplingPlan(NamedTuple):
    """The sampling of a step. Each row gives one token.

    Attributes:
        slots: the slot of each row, which determines its settings.
        positions: for each row that is not greedy, the position of its random draw: the number of
            output tokens before it.
        rows: the row of the step's logits for each row; None: all rows of logits, in order.
        penalties, allowed: penalties and grammar masks; None: no row has any.
    """

    slots: tuple[int, ...]
    positions: tuple[int, ...] = ()
    rows: tuple[int, ...] | None = None
    penalties: PenaltyRows | None = None
    allowed: AllowedRows | None = None


class DraftPlan(NamedTuple):
    """The part of a plan that only a drafting engine needs. Each field has one entry per chunk.

    Attributes:
        drafts: the drafts to verify, which are the chunk's last tokens.
        propose: number of drafts to make after the step.
        next_ids: the token after the chunk, if the chunk ends before the sequence's last known
            token; otherwise 0.
        on_device: all chunks are decodes that get the same number of drafts, on every data-parallel
            rank. They run on the device without the host (steps/draft_decode.py).
        previous_rows: row of each chunk in the previous step, whose result the host does not know
            yet. The device shifts the chunk by the number of accepted drafts, and has its token and
            drafts. None: all tokens are in the plan.
    """

    drafts: tuple[tuple[int, ...], ...]
    propose: tuple[int, ...]
    next_ids: tuple[int, ...]
    on_device: bool = False
    previous_rows: tuple[int, ...] | None = None


class ScoredTokens(NamedTuple):
    """Prompt tokens of one chunk whose log-probabilities the request wants.

    Attributes:
        chunk: the index of the chunk.
        num_top: number of most likely tokens to return at each position.
        token_ids: the tokens after the chunk's first tokens: entry i is the token that follows the
            chunk's token i.
    """

    chunk: int
    num_top: int
    token_ids: tuple[int, ...]


class PageCopy(NamedTuple):
    """The copy of one page between the device and the staging buffer.

    Attributes:
        offset: of the page in the buffer, in bytes.
        load: copy from the buffer to the device.
    """

    group: str
    page: int
    offset: int
    load: bool


class PromptBounds(NamedTuple):
    """Bounds of a sequence's prompt, for a model that replays (models.step_inputs.Prompts)."""

    cached: int
    tail_end: int


class LargestLane(NamedTuple):
    """The sizes of a step of data-parallel ranks, by which all of them choose the same exchanges.

    Attributes:
        num_tokens, num_seqs: the most tokens and sequences that a rank has.
        decodes: StepPlan.decodes of all of them.
        drafts: pairs, ascending: a number of drafts, and the most sequences of a rank that get as
            many after the step.
        on_device: DraftPlan.on_device of all of them.
    """

    num_tokens: int
    num_seqs: int
    decodes: bool
    drafts: tuple[tuple[int, int], ...] = ()
    on_device: bool = False

    @classmethod
    def of(cls, plans: "Sequence[StepPlan]") -> "LargestLane":
        most, on_device = Counter[int](), False
        for plan in plans:
            if plan.draft is not None:
                most |= Counter(filter(None, plan.draft.propose))
                on_device = plan.draft.on_device
        return cls(
            max(plan.num_tokens for plan in plans),
            max(plan.num_seqs for plan in plans),
            all(plan.decodes for plan in plans),
            tuple(sorted(most.items())),
            on_device,
        )


class StepPlan(NamedTuple):
    """One step, which computes chunks of sequences.

    Attributes:
        slots: slot of each chunk's sequence.
        starts: position of each chunk's first token.
        lengths: number of tokens of each chunk, drafts included.
        token_ids: the tokens of all chunks, one chunk after the other. PENDING: the previous step
            samples this token.
        pending_rows: for each PENDING token, its row in the previous step's sampling.
        num_logits: number of each chunk's last tokens whose logits are computed.
        decodes: whether each chunk is a single token whose logits are computed.
        freed: slots whose sequences ended or were preempted. The rank frees them first.
        admitted: slots and settings of new sequences.
        pages: changes of the page tables of this step's slots.
        sampling: the sampling of the step. None: a separate sampling plan follows once the previous
            step's tokens are known, because penalties or grammars need them.
        draft: the drafts; None: the engine does not draft.
        scored: prompt tokens whose log-probabilities are wanted. Then the plan is not a decode.
        routed: return the routed experts of the step's tokens.
        prompts: the bounds of each chunk; empty: the model does not replay, or all chunks decode.
        largest: of the plans of data-parallel ranks; None: all ranks have this plan.
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
    scored: tuple[ScoredTokens, ...] = ()
    routed: bool = False
    prompts: tuple[PromptBounds, ...] = ()
    largest: LargestLane | None = None

    @property
    def ends(self) -> list[int]:
        """The position after each chunk's last token."""
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]

    @property
    def query_start(self) -> list[int]:
        """The index of each chunk's first token in `token_ids`, and the number of all tokens."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def logits_rows(self) -> list[int]:
        """The indices in `token_ids` of the tokens whose logits are computed."""
        return [
            row
            for end, count in zip(self.query_start[1:], self.num_logits, strict=True)
            for row in range(end - count, end)
        ]
