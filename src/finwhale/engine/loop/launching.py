"""Plans and launches steps.

A step gives each sequence one token, whose place the host knows in advance, so prompts may join a
step that is launched before the previous one has ended. If sampling needs the previous tokens
(penalties, grammars, min_tokens), the forward still runs ahead, and only the sampling waits.

In an engine that drafts, a step gives each sequence one or more tokens. While every sequence
of every lane decodes, the device continues by itself (steps/draft_decode.py). The next step waits
for the tokens if a prompt needs prefill, if a sequence could be admitted, or if sampling needs the
previous tokens.
"""

import time
from collections.abc import Mapping, Sequence

from finwhale.engine.loop.in_flight import InFlightStep, Rows, TextStream
from finwhale.engine.plan.executor import PendingResult, StepRunner
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_plan import PENDING, DraftPlan
from finwhale.engine.plan.step_planner import SamplingInputs, StepPlanner


class Launcher:
    """Launches the steps of one lane.

    Attributes:
        drafts: steps verify drafts and make new ones.
    """

    def __init__(self, executor: StepRunner, scheduler: Scheduler, vocab_size: int) -> None:
        self._executor, self._scheduler = executor, scheduler
        rank = executor.description
        self._planner = StepPlanner(vocab_size, can_route=rank.routed_experts is not None)
        self.drafts = rank.can_draft
        self.drop_rows()

    def drop_rows(self) -> None:
        """Drop references to rows of earlier steps, because no sequence remains."""
        # The rows of the last step, and the rows whose sampled tokens are still on the device.
        self._rows = self._on_device = Rows([])

    def launch(
        self,
        chunks: Sequence[Chunk],
        streams: Mapping[str, TextStream],
        *,
        on_device: bool,
        follows: bool,
    ) -> InFlightStep:
        """Plan and launch a step.

        Args:
            on_device: the device steps run it (DraftPlan).
            follows: a step whose result the host does not know yet comes before it.
        """
        complete = [
            c for c in chunks if on_device or c.end - len(c.drafts) == len(c.sequence.token_ids)
        ]
        sequences = [c.sequence for c in complete]
        if sequences != self._rows.sequences or self._rows.outdated:
            self._rows = Rows([streams[s.key] for s in sequences])
        rows = self._rows
        token_indices = [c.end - len(c.drafts) for c in complete]
        step = InFlightStep(rows, token_indices, planned=chunks, chunks=complete)
        draft = None
        if self.drafts:
            draft = self._plan_drafts(step, on_device, follows=follows)
        if rows.history_rows:
            # The host computes the masks while the forward runs.
            self.execute(chunks, None, draft)
            if not any(sequences[row].token_ids[-1] == PENDING for row in rows.history_rows):
                self._sample(step)
        else:
            step.result = self.execute(chunks, SamplingInputs(self._positions(step)), draft)
            self._set_on_device(rows)
        if not self.drafts:
            # On a GPU this step is still running. Other sequences may get the pages freed here,
            # because their kernels are launched later on the same CUDA stream.
            self._scheduler.record_computed(chunks)
            for sequence in sequences:
                sequence.token_ids.append(PENDING)
        elif not on_device:
            self._scheduler.record_computed([c for c in chunks if not c.completes])
        return step

    def schedule(self, in_flight: Sequence[InFlightStep]) -> Sequence[Chunk]:
        """The chunks of the step after those in flight (oldest first); empty: no step can be
        launched now.
        """
        scheduler = self._scheduler
        if self.drafts:
            scheduler.drafting.uniform = self._executor.description.device_drafts is not None
            if in_flight:
                before = in_flight[-1]
                if not before.on_device or before.followed or before.rows.history_rows:
                    return ()
                # Try this only once: after a failure, the device may have lost this step's state.
                before.followed = True
                return scheduler.schedule_ahead(before.chunks)
        return scheduler.schedule()

    def fit_device(self, lanes: Sequence[Sequence[Chunk]]) -> bool:
        """Whether the ranks' device steps run the chunks of all lanes."""
        steps = self._executor.description.device_drafts
        if steps is None or not lanes:
            return False
        count = lanes[0][0].propose
        tokens = max(sum(c.end - c.start for c in chunks) for chunks in lanes)
        return (
            all(c.decodes and c.propose == count for chunks in lanes for c in chunks)
            and steps.width(max(map(len, lanes)), tokens, count) is not None
        )

    def _plan_drafts(self, step: InFlightStep, on_device: bool, *, follows: bool) -> DraftPlan:
        """Make the plan of a step's drafts, and note in the step what its measurement needs."""
        chunks, chooser = step.planned, self._scheduler.drafting.chooser
        assert chooser is not None and (on_device or not follows)
        step.kind, step.on_device = chooser.kind, on_device
        if on_device or all(c.decodes for c in chunks):
            step.began = time.monotonic()
        return DraftPlan(
            drafts=tuple([c.drafts for c in chunks]),
            propose=tuple([c.propose for c in chunks]),
            next_ids=tuple([0 if c.unresolved or c.completes else c.next_id for c in chunks]),
            on_device=on_device,
            previous_rows=tuple([c.sequence.sampled_row for c in chunks]) if follows else None,
        )

    def execute(
        self, chunks: Sequence[Chunk], inputs: SamplingInputs | None, draft: DraftPlan | None = None
    ) -> PendingResult | None:
        """Plan and launch a step. Without `inputs` it returns None, and `_sample` must follow."""
        freed = self._scheduler.take_freed()
        try:
            plan = self._planner.plan(chunks, freed=freed, inputs=inputs, draft=draft)
            return self._executor.execute(plan)
        except BaseException:
            # The executor may have applied only a part of the plan.
            self._scheduler.return_freed(freed)
            self._planner.resend_all()
            raise

    def _sample(self, step: InFlightStep) -> None:
        """Launch the sampling of a step's tokens, except for sequences that have ended since."""
        left = step.drop_ended()
        slots, step.histories = [], []
        for chunk in step.chunks:
            assert chunk.sequence.sampling is not None
            histories = chunk.sequence.sampling.history.after(chunk.drafts)
            step.histories += histories
            slots += [chunk.sequence.slot] * len(histories)
        inputs = SamplingInputs(self._positions(step), step.histories)
        plan = self._planner.plan_sampling(tuple(slots), inputs, left)
        step.result = self._executor.sample(plan)
        self._set_on_device(step.rows)

    def sample_waiting(self, in_flight: Sequence[InFlightStep]) -> None:
        """Launch the sampling that had to wait for the tokens of the last step."""
        if in_flight and in_flight[0].result is None:
            self._sample(in_flight[0])

    def _positions(self, step: InFlightStep) -> list[int]:
        """Positions of the draws of all rows of logits that are not greedy."""
        rows, first = step.rows, step.token_indices
        found = [first[row] - rows.sequences[row].num_prompt for row in rows.random_rows]
        if self.drafts:
            pairs = zip(found, rows.random_rows, strict=True)
            found = [p + k for p, row in pairs for k in range(1 + len(step.chunks[row].drafts))]
        return found

    def _set_on_device(self, rows: Rows) -> None:
        """Note in each sequence which row of the device's sampled tokens is its own."""
        if rows.sequences and rows is not self._on_device:
            self._on_device = rows
            for row, sequence in enumerate(rows.sequences):
                sequence.sampled_row = row
