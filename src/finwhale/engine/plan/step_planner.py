"""Makes step plans from the scheduler's chunks, and tracks what ranks have received. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from finwhale.engine.plan.pages import BlockTables, SentTables
from finwhale.engine.plan.sampling import History, allowed_rows, penalty_rows
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_plan import (
    PENDING,
    DraftPlan,
    PageUpdate,
    PromptBounds,
    SamplingPlan,
    ScoredTokens,
    SlotAdmission,
    StepPlan,
)


class SamplingInputs(NamedTuple):
    """The engine's inputs to a sampling plan.

    Attributes:
        positions: positions of the random draws of all non-greedy rows (SamplingPlan.positions).
        histories: the history of each row. Empty: no row needs one.
    """

    positions: Sequence[int] = ()
    histories: Sequence[History] = ()


class StepPlanner:
    """Makes plans from chunks. A plan names slots and refers to no live object.

    Args:
        vocab_size: number of tokens of the model, and of a grammar's mask.
        can_route: sequences may want their routed experts.
    """

    def __init__(self, vocab_size: int, *, can_route: bool = False) -> None:
        self._vocab_size, self._can_route = vocab_size, can_route
        # The block tables of the sequence in each slot. A new admission brings new tables.
        self._tables: dict[int, BlockTables] = {}
        self._sent = SentTables()
        # The version of the block tables that were sent, by slot.
        self._versions: list[object] = []

    def resend_all(self) -> None:
        """Send all settings and page tables again, because a plan may not have arrived."""
        self._tables.clear()
        self._sent.forget()
        self._versions.clear()

    def plan(
        self,
        chunks: Sequence[Chunk],
        *,
        freed: Sequence[int] = (),
        inputs: SamplingInputs | None = None,
        draft: DraftPlan | None = None,
    ) -> StepPlan:
        """Make the plan of a step. inputs: None if `plan_sampling` plans its sampling later."""
        sequences = [c.sequence for c in chunks]
        slots = tuple([s.slot for s in sequences])
        admitted, pages = self._updates(sequences, slots)
        starts, ends = [c.start for c in chunks], [c.end for c in chunks]
        # Whether each chunk is a single token whose logits are computed.
        decodes = sum(ends) - sum(starts) == len(chunks) and ends == [
            len(s.token_ids) for s in sequences
        ]
        on_device = draft is not None and draft.on_device
        if decodes:
            ids = [s.token_ids[-1] for s in sequences]
            lengths = num_logits = (1,) * len(chunks)
        else:
            ids = [t for c in chunks for t in c.ids]
            lengths = tuple([end - start for start, end in zip(starts, ends, strict=True)])
            num_logits = lengths if on_device else tuple([c.num_logits for c in chunks])
        pending: tuple[int, ...] = ()
        if PENDING in ids:
            if decodes and ids.count(PENDING) == len(ids):
                pending = tuple([s.sampled_row for s in sequences])
            else:
                pending = tuple([c.sequence.sampled_row for c in chunks if c.pending])
        sampling = None
        if inputs is not None:
            rows = slots
            if not decodes:
                each = zip(slots, num_logits, strict=True)
                rows = tuple([slot for slot, count in each for _ in range(count)])
            sampling = self.plan_sampling(rows, inputs)
        return StepPlan(
            slots=slots,
            starts=tuple(starts),
            lengths=lengths,
            token_ids=tuple(ids),
            num_logits=num_logits,
            decodes=decodes,
            pending_rows=pending,
            freed=tuple(freed),
            admitted=tuple(admitted),
            pages=tuple(pages),
            sampling=sampling,
            draft=draft,
            scored=() if decodes or on_device else tuple(_scored(chunks)),
            routed=self._can_route and any(s.num_routed is not None for s in sequences),
            prompts=() if decodes or on_device else _bounds(chunks),
        )

    def plan_sampling(
        self, slots: tuple[int, ...], inputs: SamplingInputs, rows: Sequence[int] | None = None
    ) -> SamplingPlan:
        """Make the plan of a step's sampling. SamplingPlan has `slots` and `rows`."""
        histories = inputs.histories
        return SamplingPlan(
            slots=slots,
            positions=tuple(inputs.positions),
            rows=None if rows is None else tuple(rows),
            penalties=penalty_rows(histories) if histories else None,
            allowed=allowed_rows(histories, self._vocab_size) if histories else None,
        )

    def _updates(
        self, sequences: Sequence[SequenceState], slots: Sequence[int]
    ) -> tuple[list[SlotAdmission], list[PageUpdate]]:
        """The settings and pages of sequences that the ranks have not received yet."""
        admitted: list[SlotAdmission] = []
        pages: list[PageUpdate] = []
        versions = self._versions
        versions += [None] * (1 + max(slots) - len(versions))
        for sequence in sequences:
            if sequence.tables.version is versions[sequence.slot]:
                continue
            slot, tables = sequence.slot, sequence.tables
            assert slot >= 0, "a sequence of a step must have a slot"
            versions[slot] = tables.version
            if self._tables.get(slot) is not tables:
                self._tables[slot] = tables
                if sequence.sampling is not None:
                    admitted.append(SlotAdmission(slot, sequence.sampling.settings))
            for group, table, begin in self._sent.changes(slot, tables):
                changed = tuple(table.pages[begin:])
                pages.append(PageUpdate(slot, group, table.first, begin, changed))
        return admitted, pages


def _bounds(chunks: Sequence[Chunk]) -> tuple[PromptBounds, ...]:
    """The bounds of the chunks' prompts, unless no chunk needs them."""
    if all(chunk.decodes for chunk in chunks):
        return ()
    return tuple([c.sequence.bounds for c in chunks if c.sequence.bounds is not None])


def _scored(chunks: Sequence[Chunk]) -> list[ScoredTokens]:
    found = []
    for index, chunk in enumerate(chunks):
        num_top = chunk.sequence.prompt_logprobs
        if num_top is not None and (ids := chunk.scored_ids):
            found.append(ScoredTokens(index, num_top, tuple(ids)))
    return found
