"""Reads the results of steps: the new tokens, and what the engine learns from them."""

import time
from collections.abc import Sequence

from finwhale.config import DraftTokens
from finwhale.engine.loop.acceptance_watch import AcceptanceWatch
from finwhale.engine.loop.in_flight import InFlightStep, NewToken, TextStream
from finwhale.engine.loop.metrics import Meter
from finwhale.engine.loop.sampled_tokens import TokenReader
from finwhale.engine.plan.draft_policy import DraftPolicy, FixedDrafts
from finwhale.engine.plan.executor import RankDescription, StepResult
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.models.protocol import ModelConfig


class Results:
    """The results of one engine's steps.

    Args:
        draft_tokens: number of drafts of each step, if the rank can draft.
    """

    def __init__(
        self,
        rank: RankDescription,
        scheduler: Scheduler,
        meter: Meter,
        model_config: ModelConfig,
        draft_tokens: DraftTokens,
    ) -> None:
        self._scheduler, self._meter, self._drafts = scheduler, meter, rank.can_draft
        self._reader = TokenReader()
        most = model_config.max_draft_tokens
        self._acceptance = AcceptanceWatch(most)
        self._policy: DraftPolicy | None = None
        if rank.can_draft and draft_tokens == "auto":
            sizes = () if rank.device_drafts is None else rank.device_drafts.sizes
            block = model_config.draft_block_tokens > 0
            self._policy = DraftPolicy(most, block=block, sizes=sizes)
            scheduler.drafting.chooser = self._policy
        elif rank.can_draft and draft_tokens != "auto":
            scheduler.drafting.chooser = FixedDrafts(draft_tokens)
        self._last_read = 0.0
        # For each sequence that `read` has read: its text, the number of output tokens that it had
        # before, and how many drafts were verified and accepted.
        self._verified: list[tuple[TextStream, int, int, int]] = []

    def read(self, step: InFlightStep, later: Sequence[InFlightStep]) -> list[NewToken]:
        """Wait for a step's tokens. A sequence may end before it has used all of its tokens.

        Args:
            later: the in-flight steps after this one.
        """
        assert step.result is not None
        result = step.result.wait()
        step.scores, step.routed = result.scored, result.routed
        if self._drafts:
            return self._read_runs(step, result, later)
        histories = step.histories
        tokens = self._reader.read(result, step.rows.sequences, histories)
        for history, token in zip(histories, tokens, strict=False):
            if token.error is None:
                history.accept(token.token_id)
        # If a sequence ended while this step was in flight, discard the step's token for it.
        left = step.drop_ended()
        if left is not None:
            tokens = [tokens[row] for row in left]
        streams = step.rows.streams
        pairs = zip(streams, tokens, strict=True)
        self._meter.record_step(
            [s.clock for s, token in pairs if token.error is None], time.monotonic()
        )
        return list(zip(streams, step.token_indices, tokens, strict=True))

    def _read_runs(
        self, step: InFlightStep, result: StepResult, later: Sequence[InFlightStep]
    ) -> list[NewToken]:
        """The tokens of a step that may verify drafts."""
        rows, expected = step.rows, [chunk.drafts for chunk in step.chunks]
        runs = self._reader.read_runs(result, rows.sequences, expected, step.histories)
        if step.began:
            self._record_time(step, result)
        now = self._last_read = time.monotonic()
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
            self._scheduler.record_verified(chunk, num_accepted)
            if ids:
                stream.clock.tick(now)
            num_drafts = len(chunk.drafts)
            before = len(stream.output.token_ids)
            self._verified.append((stream, before, num_drafts, num_accepted))
            self._acceptance.record_verified(num_drafts, num_accepted, now)
            if self._policy is not None:
                self._policy.record_verified(chunk, num_accepted)
            tokens += [(stream, at, token) for at, token in enumerate(run, start=known)]
        return tokens

    def record_appended(self) -> None:
        """Record which tokens of the last `read` became output. A stop may come before the last
        accepted draft.
        """
        for stream, before, num_drafts, num_accepted in self._verified:
            count = len(stream.output.token_ids) - before
            self._meter.record_tokens(stream.clock, count)
            self._meter.record_drafts(num_drafts, min(num_accepted, count))
        self._verified.clear()

    def _record_time(self, step: InFlightStep, result: StepResult) -> None:
        """Record the time of a step in which all sequences decode."""
        assert result.verify_seconds is not None
        self._meter.time_of_verification.add(result.verify_seconds)
        if result.draft_seconds is not None:
            self._meter.time_of_draft.add(result.draft_seconds)
        if self._policy is not None:
            # If a step was launched ahead, its time begins when the previous tokens are read.
            began = max(step.began, self._last_read)
            num_drafts = sum(len(chunk.drafts) for chunk in step.chunks)
            seconds = time.monotonic() - began
            self._policy.record_time(len(step.chunks), num_drafts, step.kind, seconds)
