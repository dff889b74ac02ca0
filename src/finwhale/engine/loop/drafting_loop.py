"""The loop over steps of an engine that drafts: verify, choose, draft; hand out runs of tokens.

While every sequence decodes, the next step is launched before this one's tokens are read, as in an
engine that does not draft: where it begins and what it reads is on the device (verification.py).
It waits for them where a prompt is to be read or somebody could be admitted, where a choice needs
the tokens on the host (penalties, grammars), and where "auto" changes the number of drafts.
"""

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items

from finwhale.config import DraftTokens
from finwhale.engine.loop.in_flight import Flight, Rows, Stream
from finwhale.engine.loop.metrics import Meter
from finwhale.engine.plan.draft_policy import DraftPolicy
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.rank.host_transfer import Instant
from finwhale.engine.rank.runner import ModelRunner
from finwhale.engine.rank.sampler import SampledToken, Sampler

Run = tuple[Stream, int, list[SampledToken]]


class DraftLoop:
    """Launches and collects the steps of a drafting engine."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sampler: Sampler,
        meter: Meter,
        draft_tokens: DraftTokens,
    ) -> None:
        assert runner.drafter is not None
        self._runner, self._scheduler, self._sampler = runner, scheduler, sampler
        self._meter = meter
        self._policy: DraftPolicy | None = None
        if draft_tokens == "auto":
            self._policy = DraftPolicy(runner.model_config.max_draft_tokens)
        else:
            scheduler.draft_tokens = draft_tokens
        self._last_collected = 0.0

    def launch(self, streams: Mapping[str, Stream], before: Flight | None) -> Flight | None:
        """Plan a step and put it on the device; None: there is nothing to do, or not yet.

        Args:
            before: a step in flight.
        """
        captured = self._runner.verifications
        self._scheduler.alike = captured is not None
        if self._policy is not None:
            draft_tokens = self._policy.choose(len(self._scheduler.running))
            self._scheduler.draft_tokens = draft_tokens
        if before is not None:
            if captured is None or not before.alike or before.followed or before.rows.historic:
                return None
            # Once alone: if this breaks off, the device may have forgotten where to go on.
            before.followed = True
            chunks = self._scheduler.again(before.chunks)
        else:
            chunks = self._scheduler.schedule()
        if not chunks:
            return None
        if captured is not None and captured.fits(chunks):
            return self._launch_alike(streams, chunks)
        assert before is None
        return self._launch_any(streams, chunks)

    def _launch_alike(self, streams: Mapping[str, Stream], chunks: list[Chunk]) -> Flight:
        steps = self._runner.verifications
        assert steps is not None
        rows = Rows([streams[c.sequence.key] for c in chunks])
        instants = [Instant(self._runner.device)]
        logits = steps.verify(chunks)
        further = steps.further() if chunks[0].floats else None
        sampling = self._sampler.start_runs(rows.keys, [c.drafts for c in chunks], logits, further)
        assert sampling.ids_S is not None
        instants.append(Instant(self._runner.device))
        drafts = steps.draft(sampling.ids_S)
        instants.append(Instant(self._runner.device))
        proposed = self._sampler.bring([drafts]) if drafts.shape[1] else None
        for row, sequence in enumerate(rows.sequences):
            sequence.sampled_row = row
        return Flight(rows, [], None, sampling, chunks, proposed, instants, alike=True)

    def _launch_any(self, streams: Mapping[str, Stream], chunks: list[Chunk]) -> Flight:
        drafter, device = self._runner.drafter, self._runner.device
        assert drafter is not None
        if self._runner.verifications is not None:
            self._runner.verifications.forget()
        instants = [Instant(device)]
        forward = self._runner.read(chunks)
        complete = [c for c in chunks if c.completes]
        rows = Rows([streams[c.sequence.key] for c in complete])
        sampling = self._sampler.start_runs(rows.keys, [c.drafts for c in complete], forward.logits)
        instants.append(Instant(device))
        drafts = drafter.propose(forward, chunks, sampling.ids_S)
        instants.append(Instant(device))
        proposed = None if drafts is None else self._sampler.bring([drafts.T])
        self._scheduler.computed([c for c in chunks if not c.completes])
        if not all(c.decodes for c in chunks):
            instants = []
        return Flight(rows, [], None, sampling, complete, proposed, instants)

    def collect(self, flight: Flight, after: Items[Flight]) -> Iterator[Run]:
        """Wait for a step's tokens: each sequence's run, and where in its token_ids it begins.

        Args:
            after: the steps in flight behind it.
        """
        assert flight.sampling is not None
        expected = [chunk.drafts for chunk in flight.chunks]
        runs = self._sampler.commit_runs(flight.sampling, expected)
        proposed: list[list[int]] = []
        if flight.proposed is not None:
            (drafts,) = flight.proposed.wait()
            proposed = drafts.tolist()
        if flight.instants:
            self._time(flight)
        now = self._last_collected = time.monotonic()
        floating = {c.sequence.key: c for f in after for c in f.chunks}
        next_drafts = iter(proposed)
        self._meter.steps += 1
        for stream, chunk, run in zip(flight.rows.streams, flight.chunks, runs, strict=True):
            drafts_after = next(next_drafts)[: chunk.propose] if chunk.propose else []
            if stream.ended:
                continue
            sequence, place = stream.sequence, chunk.known
            del run[sequence.max_len - place :]
            ids = [token.token_id for token in run if token.error is None]
            num_accepted = min(len(ids), len(run) - 1)
            sequence.token_ids[place:] = ids
            sequence.drafts = drafts_after
            if sequence.key in floating:
                floating[sequence.key].land(num_accepted, drafts_after)
            self._scheduler.verified(chunk, num_accepted)
            self._meter.run(stream.clock, len(ids), now)
            num_drafts = len(chunk.drafts) - chunk.num_any
            self._meter.drafted(num_drafts, min(num_accepted, num_drafts))
            if self._policy is not None:
                self._policy.verified(num_drafts, min(num_accepted, num_drafts))
            yield stream, place, run

    def _time(self, flight: Flight) -> None:
        """Note how long a step took in which all decode; what it gave has arrived."""
        begin, chosen, drafted = flight.instants
        self._meter.time_of_verification.add(begin.seconds_to(chosen))
        if flight.proposed is not None:
            self._meter.time_of_draft.add(chosen.seconds_to(drafted))
        if self._policy is not None:
            drafts = [len(chunk.drafts) for chunk in flight.chunks]
            # One that was launched ahead took as long as there was between two steps' tokens.
            began = max(begin.time, self._last_collected)
            wanted = drafts[0] if flight.alike else self._scheduler.draft_tokens
            self._policy.took(drafts, wanted, time.monotonic() - began)
