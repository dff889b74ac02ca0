"""The step loop of an engine that drafts: a step gives each sequence one or more tokens.

While every sequence decodes, the loop launches the next step before the host knows this step's
tokens, as in an engine that does not draft: the device knows the next step's positions and ids
(rank/draft_decode.py). The loop waits for the tokens if a prompt needs prefill, if a sequence could
be admitted, or if sampling needs the previous tokens (penalties, grammars, min_tokens).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finwhale.config import DraftTokens
from finwhale.engine.loop.acceptance_watch import AcceptanceWatch
from finwhale.engine.loop.in_flight import InFlightStep, Rows, TextStream
from finwhale.engine.loop.metrics import Meter
from finwhale.engine.loop.sampled_tokens import TokenReader
from finwhale.engine.loop.step_loop import Launcher, NewToken
from finwhale.engine.plan.draft_policy import DraftPolicy, FixedDrafts
from finwhale.engine.plan.executor import StepResult
from finwhale.engine.plan.sampling import History
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_plan import DraftPlan
from finwhale.engine.plan.step_planner import SamplingInputs


@dataclass(frozen=True, slots=True)
class _Verified:
    """A sequence in a step that has been collected.

    Attributes:
        num_before: the number of its output tokens before the step.
    """

    stream: TextStream
    num_before: int
    num_drafts: int
    num_accepted: int


class DraftLoop:
    """Launches and collects the steps of a drafting engine (StepLoop)."""

    def __init__(
        self,
        launcher: Launcher,
        meter: Meter,
        draft_tokens: DraftTokens,
        max_draft_tokens: int,
        draft_block: bool = False,
    ) -> None:
        self._launcher, self._meter = launcher, meter
        self._reader = TokenReader()
        self._acceptance = AcceptanceWatch(max_draft_tokens)
        self._policy: DraftPolicy | None = None
        if draft_tokens == "auto":
            steps = launcher.executor.description.device_drafts
            sizes = () if steps is None else steps.sizes
            self._policy = DraftPolicy(max_draft_tokens, block=draft_block, sizes=sizes)
            launcher.scheduler.drafting.chooser = self._policy
        else:
            launcher.scheduler.drafting.chooser = FixedDrafts(draft_tokens)
        self._last_collected = 0.0
        self._verified: list[_Verified] = []

    def drop_rows(self) -> None:
        pass

    def sample_waiting(self, in_flight: Sequence[InFlightStep]) -> None:
        pass

    def launch(
        self, streams: Mapping[str, TextStream], in_flight: Sequence[InFlightStep]
    ) -> InFlightStep | None:
        scheduler = self._launcher.scheduler
        device_drafts = self._launcher.executor.description.device_drafts
        scheduler.drafting.uniform = device_drafts is not None
        if in_flight:
            before = in_flight[-1]
            if not before.on_device or before.followed or before.rows.history_rows:
                return None
            # Try this only once: after a failure, the device may have lost this step's state.
            before.followed = True
            chunks = scheduler.schedule_ahead(before.chunks)
        else:
            chunks = scheduler.schedule()
        if not chunks:
            return None
        on_device = self._fit_device(chunks)
        assert on_device or not in_flight
        complete = chunks if on_device else [c for c in chunks if c.completes]
        rows = Rows([streams[c.sequence.key] for c in complete])
        assert scheduler.drafting.chooser is not None
        step = InFlightStep(
            rows,
            [],
            planned=chunks,
            chunks=complete,
            kind=scheduler.drafting.chooser.kind,
            began=time.monotonic(),
            on_device=on_device,
        )
        draft = DraftPlan(
            drafts=tuple([c.drafts for c in chunks]),
            propose=tuple([c.propose for c in chunks]),
            next_ids=tuple([0 if c.unresolved or c.completes else c.next_id for c in chunks]),
            on_device=on_device,
            previous_rows=tuple([c.sequence.sampled_row for c in chunks]) if in_flight else None,
        )
        if rows.history_rows:
            # The host computes the masks while the forward runs.
            self._launcher.launch(chunks, None, draft)
            step.histories = _histories(complete)
            slots = [c.sequence.slot for c in complete for _ in range(c.num_logits)]
            inputs = SamplingInputs(_positions(complete), step.histories)
            step.result = self._launcher.sample(tuple(slots), inputs)
        else:
            step.result = self._launcher.launch(chunks, SamplingInputs(_positions(complete)), draft)
        if on_device:
            for row, sequence in enumerate(rows.sequences):
                sequence.sampled_row = row
        else:
            scheduler.record_computed([c for c in chunks if not c.completes])
            if not all(c.decodes for c in chunks):
                step.began = 0.0
        return step

    def _fit_device(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the rank's device steps run these chunks."""
        steps, count = self._launcher.executor.description.device_drafts, chunks[0].propose
        return (
            steps is not None
            and all(c.decodes and c.propose == count for c in chunks)
            and steps.width(len(chunks), sum(c.end - c.start for c in chunks), count) is not None
        )

    def collect(self, step: InFlightStep, later: Sequence[InFlightStep]) -> list[NewToken]:
        assert step.result is not None
        result, rows = step.result.wait(), step.rows
        step.scores, step.routed = result.scored, result.routed
        expected = [chunk.drafts for chunk in step.chunks]
        runs = self._reader.read_runs(result, rows.sequences, expected, step.histories)
        if step.began:
            self._record_time(step, result)
        now = self._last_collected = time.monotonic()
        unresolved = {c.sequence.key: c for flight in later for c in flight.chunks}
        next_drafts = iter(result.drafts or ())
        confidences = iter(result.confidences or [[]] * len(result.drafts or ()))
        self._meter.steps += 1
        tokens: list[NewToken] = []
        for stream, chunk, run in zip(rows.streams, step.chunks, runs, strict=True):
            drafts_after = next(next_drafts)[: chunk.propose] if chunk.propose else []
            given = next(confidences)[: chunk.propose] if chunk.propose else []
            if stream.ended:
                continue
            sequence, known = stream.sequence, chunk.known
            del run[sequence.max_len - known :]
            ids = [token.token_id for token in run if token.error is None]
            num_accepted = min(len(ids), len(run) - 1)
            sequence.token_ids[known:] = ids
            sequence.drafts, sequence.confidences = drafts_after, given
            if sequence.key in unresolved:
                unresolved[sequence.key].resolve(num_accepted, drafts_after)
            self._launcher.scheduler.record_verified(chunk, num_accepted)
            if ids:
                stream.clock.tick(now)
            num_drafts = len(chunk.drafts)
            before = len(stream.output.token_ids)
            self._verified.append(_Verified(stream, before, num_drafts, num_accepted))
            self._acceptance.record_verified(num_drafts, num_accepted, now)
            if self._policy is not None:
                self._policy.record_verified(chunk, num_accepted)
            tokens += [(stream, at, token) for at, token in enumerate(run, start=known)]
        return tokens

    def record_appended(self) -> None:
        """Record the tokens that became output. A stop may come before the last accepted draft."""
        for one in self._verified:
            count = len(one.stream.output.token_ids) - one.num_before
            self._meter.record_tokens(one.stream.clock, count)
            self._meter.record_drafts(one.num_drafts, min(one.num_accepted, count))
        self._verified.clear()

    def _record_time(self, step: InFlightStep, result: StepResult) -> None:
        """Record the time of a step in which all sequences decode."""
        assert result.verify_seconds is not None
        self._meter.time_of_verification.add(result.verify_seconds)
        if result.draft_seconds is not None:
            self._meter.time_of_draft.add(result.draft_seconds)
        if self._policy is not None:
            # If a step was launched ahead, its time begins when the previous tokens are collected.
            began = max(step.began, self._last_collected)
            num_drafts = sum(len(chunk.drafts) for chunk in step.chunks)
            seconds = time.monotonic() - began
            self._policy.record_time(len(step.chunks), num_drafts, step.kind, seconds)


def _positions(chunks: Sequence[Chunk]) -> list[int]:
    """Positions of the draws of all non-greedy rows. A chunk has 1 + number of drafts rows."""
    return [
        chunk.known - chunk.sequence.num_prompt + further
        for chunk in chunks
        if chunk.sequence.sampling is not None and not chunk.sequence.sampling.settings.greedy
        for further in range(1 + len(chunk.drafts))
    ]


def _histories(chunks: Sequence[Chunk]) -> list[History]:
    """The history of each row."""
    return [
        history
        for chunk in chunks
        if chunk.sequence.sampling is not None
        for history in chunk.sequence.sampling.history.after(chunk.drafts)
    ]
