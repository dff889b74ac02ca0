"""Reads the results of steps: the new tokens, and what the engine learns from them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from finwhale.config import DraftTokens
from finwhale.engine.loop.acceptance_watch import AcceptanceWatch
from finwhale.engine.loop.in_flight import InFlightStep, TextStream
from finwhale.engine.loop.metrics import Meter
from finwhale.engine.plan.draft_policy import DraftChooser, DraftPolicy
from finwhale.engine.plan.executor import RankDescription, RowLogprobs, StepResult
from finwhale.engine.plan.sampling import History
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import SequenceState
from finwhale.models.protocol import ModelConfig

NOT_FINITE = "the model's logits for this token are not finite (NaN or infinity)"
NO_TOKEN_FITS = "the request allows no token here, or the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability before penalties, temperature and filters; rank from 1."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One request's next token.

    Attributes:
        token_id: the token's id; -1 if there is an error.
        logprobs: log-probabilities by token id, first the sampled token, then the most likely
            ones; None if not requested.
        error: the reason why there is no token; None if there is one.
        of_grammar: the error comes from the request's grammar, so the cached state is valid.
    """

    token_id: int
    logprobs: dict[int, TokenLogprob] | None = None
    error: str | None = None
    of_grammar: bool = False


# A text stream, the index of its new token in the sequence's token_ids, and the token.
NewToken = tuple[TextStream, int, SampledToken]


class Results:
    """The results of one lane's steps.

    Args:
        chooser: chooses the drafts of all lanes (new_chooser).
    """

    def __init__(
        self, scheduler: Scheduler, meter: Meter, max_drafts: int, chooser: DraftChooser | None
    ) -> None:
        self._scheduler, self._meter, self._drafts = scheduler, meter, chooser is not None
        self._reader = TokenReader()
        self._acceptance = AcceptanceWatch(max_drafts)
        self._policy = chooser if isinstance(chooser, DraftPolicy) else None
        scheduler.drafting.chooser = chooser
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
                self._policy.estimates.record_verified(chunk, num_accepted)
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


def new_chooser(
    rank: RankDescription, model_config: ModelConfig, draft_tokens: DraftTokens
) -> DraftChooser | None:
    """What chooses an engine's drafts; None: its ranks do not draft."""
    if not rank.can_draft:
        return None
    if draft_tokens != "auto":
        return DraftChooser(draft_tokens)
    sizes = () if rank.device_drafts is None else rank.device_drafts.sizes
    block = model_config.draft_block_tokens > 0
    return DraftPolicy(model_config.max_draft_tokens, block=block, sizes=sizes)


class TokenReader:
    """Makes tokens from results. It reuses one object for each id without log-probabilities."""

    def __init__(self) -> None:
        self._plain = cache(SampledToken)

    def read(
        self, result: StepResult, sequences: Sequence[SequenceState], histories: Sequence[History]
    ) -> list[SampledToken]:
        """Return the sampled token of each row.

        Args:
            sequences: the sequence of each row.
            histories: the history of each row when its token was sampled. Empty if no row needs
                one.
        """
        ids, valid, plain = result.token_ids, result.valid, self._plain
        if result.logprobs is None and all(valid):
            return list(map(plain, ids))
        tokens: list[SampledToken] = []
        for row, sequence in enumerate(sequences):
            assert sequence.sampling is not None
            if not valid[row]:
                tokens.append(_no_token(histories[row] if histories else None))
            elif result.logprobs is not None and sequence.sampling.settings.logprobs is not None:
                logprobs = row_logprobs(result.logprobs, row, ids[row])
                tokens.append(SampledToken(ids[row], logprobs))
            else:
                tokens.append(plain(ids[row]))
        return tokens

    def read_runs(
        self,
        result: StepResult,
        sequences: Sequence[SequenceState],
        drafts: Sequence[Sequence[int]],
        histories: Sequence[History],
    ) -> list[list[SampledToken]]:
        """Make the tokens of a step that verified drafts, and add them to the histories.

        Args:
            sequences, drafts: the sequence and the drafts of each chunk. A chunk has a row for its
                next token and one after each draft.
            histories: the history of each row. Empty if no row needs one.

        Returns:
            For each chunk its accepted drafts, then the first token that is not a draft. An error
            ends the chunk's tokens.
        """
        of_rows = [s for s, ids in zip(sequences, drafts, strict=True) for _ in (None, *ids)]
        tokens = iter(self.read(result, of_rows, histories))
        runs = []
        for sequence, expected in zip(sequences, drafts, strict=True):
            assert sequence.sampling is not None
            run: list[SampledToken] = []
            runs.append(run)
            right = True
            for draft in (*expected, None):
                token = next(tokens)
                if right:
                    run.append(token)
                    if token.error is None:
                        sequence.sampling.history.accept(token.token_id)
                    right = token.error is None and token.token_id == draft
        return runs


def _no_token(history: History | None) -> SampledToken:
    """Make the token that reports why sampling gave none."""
    if history is None or not history.masked:
        return SampledToken(-1, error=NOT_FINITE)
    error = None if history.matcher is None else history.matcher.error
    return SampledToken(-1, error=error or NO_TOKEN_FITS, of_grammar=error is not None)


def row_logprobs(found: RowLogprobs, row: int, token_id: int) -> dict[int, TokenLogprob]:
    """The log-probabilities of one row, by token id: first the row's own token."""
    table = {token_id: TokenLogprob(found.token[row], found.rank[row])}
    for rank, (other, logprob) in enumerate(
        zip(found.top_ids[row], found.top[row], strict=True), start=1
    ):
        if other >= 0:
            table.setdefault(other, TokenLogprob(logprob, rank))
    return table
