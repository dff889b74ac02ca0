"""Requests in, tokens out: the loop over schedule, forward, sample, detokenise.

On a GPU the loop runs one step ahead: while the device computes a step whose tokens the host does
not know yet, the next one is planned and launched with their ids taken from the device; only then
are they waited for, appended, detokenised.
"""

import logging
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.grammar import Matcher
from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import MAX_DRAFT_TOKENS, EngineConfig
from finwhale.engine.draft_policy import DraftPolicy
from finwhale.engine.memory import MemoryUse
from finwhale.engine.metrics import Clock, Ending, EngineMetrics, Meter, PageUse
from finwhale.engine.pages import PageManager
from finwhale.engine.runner import ModelRunner
from finwhale.engine.sampler import SampledToken, Sampler, Sampling
from finwhale.engine.scheduler import PENDING, Chunk, Scheduler
from finwhale.engine.scheduler import Sequence as RunningSequence
from finwhale.engine.stop import StopChecker
from finwhale.engine.transfer import Arrival, Instant, Receiver
from finwhale.engine.watchdog import Watchdog
from finwhale.errors import EngineDeadError, FinwhaleError, RequestError
from finwhale.models.deepseek_v4.build import WeightStream
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    SamplingParams,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """The text side of one running sequence.

    Attributes:
        ends: token ids that end it.
        stop_after: stop strings are looked for once this has been generated; None: from the start.
        needs_history: the host must know all of its tokens before the next is chosen.
    """

    sequence: RunningSequence
    request: "_Request"
    output: CompletionOutput
    ends: frozenset[int]
    detokenizer: Detokenizer | None
    stop: StopChecker | None
    stop_after: int | None
    clock: Clock
    needs_history: bool
    ended: bool = False


@dataclass(slots=True)
class _Request:
    output: RequestOutput
    unfinished: int


class _Rows:
    """Who gets a token in a step, row by row; often the same for many steps.

    Attributes:
        sequences, streams, keys: one a row.
        historic: the streams that need their history.
    """

    __slots__ = ("historic", "keys", "sequences", "streams")

    def __init__(self, streams: list[_Stream]) -> None:
        self.streams = streams
        self.sequences = [stream.sequence for stream in streams]
        self.keys = [sequence.key for sequence in self.sequences]
        self.historic = [stream for stream in streams if stream.needs_history]


@dataclass(slots=True)
class _Flight:
    """A step that was launched and whose tokens are not known yet.

    Attributes:
        rows: who gets a token.
        places: where in each one's token_ids it will stand.
        logits: [M,V] until tokens are chosen from them.
        sampling: the tokens.
        chunks: of the streams, where the engine drafts.
        proposed: their next drafts, [K,B] for those chunks that have any.
        instants: before the forward, after the choice, after the drafts.
    """

    rows: _Rows
    places: list[int]
    logits: Tensor | None
    sampling: Sampling | None = None
    chunks: Sequence[Chunk] = ()
    proposed: Arrival | None = None
    instants: Sequence[Instant] = ()

    @property
    def undecided(self) -> bool:
        return self.logits is not None

    def drop_ended(self) -> list[int] | None:
        """Leave out the streams that have ended; the rows of the others, None: all are left."""
        streams = self.rows.streams
        left = [row for row, stream in enumerate(streams) if not stream.ended]
        if len(left) == len(streams):
            return None
        self.rows = _Rows([streams[row] for row in left])
        self.places = [self.places[row] for row in left]
        return left


class Engine:
    """One model and the requests that run on it; may be called from several threads.

    Attributes:
        steps_ahead: steps launched before the oldest one's tokens are read: 1 on a GPU; 0 on a
            CPU, where the forward runs on the host, and where the engine drafts: a step's tokens
            say where the next one begins. The tokens are the same.

    Raises:
        ResourceError: device or memory do not allow it.
        CheckpointError: the weights are not those of the configuration.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        weights: WeightStream,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.runner = self._new_runner(weights)
        logger.info("%s holds %s", self.runner.device, self.runner.memory)
        plan = self.runner.plan
        self.scheduler = Scheduler(
            PageManager(self.runner.groups, plan.num_pages),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
        )
        self.sampler = Sampler(self.runner.ops.sample)
        self._requests: dict[str, _Request] = {}
        self._streams: dict[str, _Stream] = {}
        self._flying: deque[_Flight] = deque()
        self._rows = self._fed = _Rows([])
        drafts = self.runner.drafter is not None
        self.steps_ahead = 0 if self.runner.device.type == "cpu" or drafts else 1
        self._receiver = Receiver(self.runner.device) if drafts else None
        self._policy: DraftPolicy | None = None
        if config.draft_tokens == "auto":
            self._policy = DraftPolicy(MAX_DRAFT_TOKENS)
        else:
            self.scheduler.draft_tokens = config.draft_tokens
        self._meter = Meter()
        self._watchdog = Watchdog(config.watchdog_seconds)
        self._dead: str | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()

    def _new_runner(self, weights: WeightStream) -> ModelRunner:
        return ModelRunner(self.config, self.model_config, weights)

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def memory(self) -> MemoryUse:
        """What is held on the device."""
        return self.runner.memory

    @property
    def has_work(self) -> bool:
        return self._dead is None and self.scheduler.has_work

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        stop_after: int | None = None,
        priority: int = 0,
    ) -> RequestOutput:
        """Begin a request; the object returned is filled as `step` runs.

        Args:
            stop_after: look for stop strings only after this token: the end of the reasoning.
            priority: lower goes first; those of one priority in the order of their arrival.

        Raises:
            RequestError: the prompt is empty, too long or holds ids outside the vocabulary.
            EngineDeadError: it broke in an earlier step.
        """
        with self._lock:
            return self._add(request_id, prompt_token_ids, params, prompt, stop_after, priority)

    def _add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        stop_after: int | None,
        priority: int,
    ) -> RequestOutput:
        self._check_usable()
        assert request_id not in self._requests, f"request {request_id} is running already"
        prompt_token_ids = self._checked(prompt_token_ids, params)
        matcher = self._new_matcher(params)
        longest = self.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt_token_ids) + params.max_tokens)
        request = RequestOutput(request_id, prompt, prompt_token_ids, [])
        began = time.monotonic()
        running = _Request(request, params.n)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.model_config.eos_token_ids)
        for index in range(params.n):
            sequence = RunningSequence(
                key=f"{request_id}/{index}",
                request_id=request_id,
                index=index,
                token_ids=list(prompt_token_ids),
                num_prompt=len(prompt_token_ids),
                max_len=longest,
                params=params,
                priority=priority,
            )
            output = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
            request.outputs.append(output)
            self.sampler.add(
                sequence.key,
                params,
                prompt_token_ids,
                self.model_config.vocab_size,
                index,
                None if matcher is None else matcher.copy(),
            )
            self._streams[sequence.key] = _Stream(
                sequence,
                running,
                output,
                ends,
                self._new_detokenizer(),
                StopChecker(tuple(params.stop)) if params.stop else None,
                stop_after if params.stop else None,
                Clock(began),
                self.sampler.needs_history(sequence.key),
            )
            self.scheduler.add(sequence)
        self._requests[request_id] = running
        self._meter.requests += 1
        return request

    def _new_detokenizer(self) -> Detokenizer | None:
        return None if self.tokenizer is None else Detokenizer(self.tokenizer)

    def _new_matcher(self, params: SamplingParams) -> Matcher | None:
        """Raises RequestError."""
        if params.guide is None:
            return None
        if self.tokenizer is None:
            raise RequestError("a guide needs a tokenizer, and this checkpoint has none")
        return Matcher(self.tokenizer, params.guide)

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if os.getpid() != self._process:
            raise FinwhaleError(
                f"this engine was made in process {self._process}, which forked: make the LLM in "
                "the process that uses it"
            )

    def _checked(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as plain integers. Raises RequestError."""
        vocab = self.model_config.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token")
        ids = []
        for position, token in enumerate(prompt):
            number = -1 if isinstance(token, bool) or not hasattr(token, "__index__") else token
            ids.append(operator.index(number))
            if not 0 <= ids[-1] < vocab:
                raise RequestError(
                    f"prompt token {position} is {token!r}: token ids are integers in "
                    f"0..{vocab - 1}"
                )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but prompt and output together have room "
                f"for {self.max_model_len}: shorten it, or raise max_model_len or the cache's "
                "memory"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none")
        wrong = next((i for i in params.stop_token_ids if i >= vocab), None)
        if wrong is not None:
            raise RequestError(f"stop token id {wrong} is not in 0..{vocab - 1}")
        wrong = next((i for i in params.logit_bias or () if i >= vocab), None)
        if wrong is not None:
            raise RequestError(f"logit_bias: token id {wrong} is not in 0..{vocab - 1}")
        return ids

    def step(self) -> list[RequestOutput]:
        """Run one forward; returns the requests that have new tokens, in order.

        What breaks before a step is on the device is raised as it is, and the engine can go on.

        Raises:
            EngineDeadError: the device failed, or what had been computed was lost: every request
                has ended with this error, and the engine takes no more.
        """
        with self._lock, self._watchdog:
            self._check_usable()
            try:
                while len(self._flying) <= self.steps_ahead and self._launch():
                    pass
            except torch.AcceleratorError as error:
                raise self._die(error) from error
            if not self._flying:
                return []
            try:
                return self._collect()
            except Exception as error:
                raise self._die(error) from error

    def _die(self, error: Exception) -> EngineDeadError:
        """End every request with an error, whatever the state of the rest."""
        reason = str(error).strip().partition("\n")[0]
        self._dead = f"the engine died ({type(error).__name__}: {reason}): start a new one"
        for stream in self._streams.values():
            stream.ended = True
            stream.output.finish_reason = "error"
            self._meter.endings["error"] += 1
        for request in self._requests.values():
            request.output.error = self._dead
            request.output.finished = True
        self._streams.clear()
        self._requests.clear()
        self._flying.clear()
        return EngineDeadError(self._dead)

    def _launch(self) -> bool:
        """Plan the next step and put it on the device; whether there was anything to do."""
        if self._policy is not None:
            self.scheduler.draft_tokens = self._policy.choose(len(self.scheduler.running))
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        if self.runner.drafter is not None:
            self._flying.append(self._launch_verification(chunks))
            return True
        complete = [c.sequence for c in chunks if c.end == len(c.sequence.token_ids)]
        if complete != self._rows.sequences:
            self._rows = _Rows([self._streams[s.key] for s in complete])
        rows = self._rows
        flight = _Flight(rows, [len(s.token_ids) for s in complete], self.runner.logits(chunks))
        if not any(stream.sequence.token_ids[-1] == PENDING for stream in rows.historic):
            self._choose(flight)
        # On a GPU all of this is still running. Pages may go to others even so: what these write
        # is launched later.
        self.scheduler.computed(chunks)
        for sequence in complete:
            sequence.token_ids.append(PENDING)
        self._flying.append(flight)
        return True

    def _choose(self, flight: _Flight) -> None:
        """Launch the choice of a step's tokens, for those that have not ended since."""
        assert flight.logits is not None
        logits, flight.logits = flight.logits, None
        left = flight.drop_ended()
        if left is not None:
            logits = self.runner.rows(logits, left)
        rows = flight.rows
        flight.sampling = self.sampler.start(rows.keys, logits)
        if self.steps_ahead and flight.sampling.ids_S is not None:
            self.runner.feed(flight.sampling.ids_S)
            if rows is not self._fed:
                self._fed = rows
                for row, sequence in enumerate(rows.sequences):
                    sequence.sampled_row = row

    def _launch_verification(self, chunks: Sequence[Chunk]) -> _Flight:
        """Put a step on the device that verifies drafts and makes the next ones."""
        drafter, receiver = self.runner.drafter, self._receiver
        assert drafter is not None and receiver is not None
        instants = [Instant(self.runner.device)]
        forward = self.runner.read(chunks)
        complete = [c for c in chunks if c.completes]
        keys = [c.sequence.key for c in complete]
        sampling = self.sampler.start_runs(keys, [c.drafts for c in complete], forward.logits)
        instants.append(Instant(self.runner.device))
        drafts = drafter.propose(forward, chunks, sampling.ids_S)
        instants.append(Instant(self.runner.device))
        self.scheduler.computed([c for c in chunks if not c.completes])
        return _Flight(
            _Rows([self._streams[key] for key in keys]),
            [len(c.sequence.token_ids) for c in complete],
            None,
            sampling,
            complete,
            None if drafts is None else receiver.begin([drafts]),
            instants if all(c.known == c.start + 1 for c in chunks) else (),
        )

    def _collect_runs(self) -> list[RequestOutput]:
        """Wait for the tokens of a step that verified drafts, and hand them out."""
        flight = self._flying[0]
        assert flight.sampling is not None
        expected = [chunk.drafts for chunk in flight.chunks]
        runs = self.sampler.commit_runs(flight.sampling, expected)
        proposed: list[list[int]] = []
        if flight.proposed is not None:
            (drafts,) = flight.proposed.wait()
            proposed = drafts.T.tolist()
        if flight.instants:
            self._time(flight)
        self._flying.popleft()
        next_drafts = iter(proposed)
        now = time.monotonic()
        self._meter.steps += 1
        for stream, place, chunk, run in zip(
            flight.rows.streams, flight.places, flight.chunks, runs, strict=True
        ):
            drafts_after = next(next_drafts)[: chunk.propose] if chunk.propose else []
            if stream.ended:
                continue
            ids = [token.token_id for token in run if token.error is None]
            num_accepted = min(len(ids), len(run) - 1)
            stream.sequence.token_ids[place:] = ids
            stream.sequence.drafts = drafts_after
            self.scheduler.verified(chunk, num_accepted)
            self._meter.run(stream.clock, len(ids), now)
            self._meter.drafted(len(chunk.drafts), num_accepted)
            if self._policy is not None:
                self._policy.verified(len(chunk.drafts), num_accepted)
            for at, token in enumerate(run, start=place):
                self._append(stream, at, token)
                if stream.ended:
                    break
        touched = {s.sequence.request_id: s.request.output for s in flight.rows.streams}
        return list(touched.values())

    def _time(self, flight: _Flight) -> None:
        """Note how long a step took in which all decode; what it gave has arrived."""
        begin, chosen, drafted = flight.instants
        self._meter.time_of_verification.add(begin.seconds_to(chosen))
        if flight.proposed is not None:
            self._meter.time_of_draft.add(chosen.seconds_to(drafted))
        if self._policy is not None:
            drafts = [len(chunk.drafts) for chunk in flight.chunks]
            self._policy.took(drafts, self.scheduler.draft_tokens, time.monotonic() - begin.time)

    def _collect(self) -> list[RequestOutput]:
        """Wait for the tokens of the oldest step in flight, and hand them out."""
        flight = self._flying[0]
        assert flight.sampling is not None
        if self.runner.drafter is not None:
            return self._collect_runs()
        sampled = self.sampler.commit(flight.sampling)
        self._flying.popleft()
        # One that ended while this step was in flight was run once too often.
        left = flight.drop_ended()
        if left is not None:
            sampled = [sampled[row] for row in left]
        streams = flight.rows.streams
        pairs = zip(streams, sampled, strict=True)
        self._meter.step([s.clock for s, token in pairs if token.error is None], time.monotonic())
        for stream, place, token in zip(streams, flight.places, sampled, strict=True):
            self._append(stream, place, token)
        touched = {s.sequence.request_id: s.request.output for s in streams}
        self._forget_if_idle()
        if self._flying and self._flying[0].undecided:
            self._choose(self._flying[0])
        return list(touched.values())

    def _forget_if_idle(self) -> None:
        """What is in flight for nobody is not waited for."""
        if not self._streams:
            self._flying.clear()
            self._rows = self._fed = _Rows([])

    def abort(self, request_id: str) -> None:
        """End a request now; its pages go back. Unknown or finished requests are ignored."""
        with self._lock:
            if self._requests.pop(request_id, None) is None:
                return
            for stream in list(self._streams.values()):
                if stream.sequence.request_id == request_id:
                    self._retire(stream, "abort")
            self._forget_if_idle()

    def _append(self, stream: _Stream, place: int, token: SampledToken) -> None:
        sequence, output, token_id = stream.sequence, stream.output, token.token_id
        if not output.token_ids and sequence.index == 0:
            stream.request.output.num_cached_tokens = sequence.num_cached or 0
        if token.error is not None:
            stream.request.output.error = token.error
            self._finish(stream, "error", None)
            # Whatever went wrong may lie in its cached state: nobody shall go on from there.
            self.scheduler.reset_prefix_cache()
            return
        sequence.token_ids[place] = token_id
        output.token_ids.append(token_id)
        if token.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(
                {
                    i: Logprob(entry.logprob, entry.rank, self._token_text(i))
                    for i, entry in token.logprobs.items()
                }
            )
        if token_id in stream.ends:
            is_asked_for = token_id in sequence.params.stop_token_ids
            self._finish(stream, "stop", token_id if is_asked_for else None)
            return
        if stream.detokenizer is not None:
            text = stream.detokenizer.next(token_id)
            if stream.stop_after is not None:
                if token_id == stream.stop_after:
                    stream.stop_after = None
            elif stream.stop is not None:
                text = stream.stop.feed(text)
            # The only reference to a text: the interpreter appends in place, however long it is.
            whole, output.text = output.text, ""
            whole += text
            output.text = whole
            if stream.stop is not None and stream.stop.matched is not None:
                self._finish(stream, "stop", stream.stop.matched)
                return
        if place + 1 >= sequence.max_len:
            self._finish(stream, "length", None)

    def _token_text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def _finish(self, stream: _Stream, reason: FinishReason, stop: str | int | None) -> None:
        if stream.detokenizer is not None:
            if stream.stop is None:
                stream.output.text += stream.detokenizer.finish()
            elif stream.stop.matched is None:
                stream.output.text += stream.stop.flush() + stream.detokenizer.finish()
        stream.output.finish_reason = reason
        stream.output.stop_reason = stop
        stream.request.unfinished -= 1
        if not stream.request.unfinished:
            stream.request.output.finished = True
            del self._requests[stream.sequence.request_id]
        self._retire(stream, reason)

    def _retire(self, stream: _Stream, how: Ending) -> None:
        stream.ended = True
        self._meter.ended(how, stream.clock, len(stream.output.token_ids))
        while stream.sequence.token_ids[-1] == PENDING:
            stream.sequence.token_ids.pop()
        self.scheduler.finish(stream.sequence)
        self.sampler.remove(stream.sequence.key)
        del self._streams[stream.sequence.key]

    def reset_prefix_cache(self) -> None:
        """Forget what was read: no later request goes on from it."""
        with self._lock:
            self.scheduler.reset_prefix_cache()

    def metrics(self) -> EngineMetrics:
        """The present state and the counters; waits for no step."""
        scheduler, meter = self.scheduler, self._meter
        prefix = scheduler.prefix
        return EngineMetrics(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + sum(map(len, list(scheduler.followers.values()))),
            step_seconds=self._watchdog.elapsed,
            pages={
                name: PageUse(pool.num_pages - 1 - pool.num_free, pool.num_pages - 1)
                for name, pool in scheduler.pages.pools.items()
            },
            idle_blocks=0 if prefix is None else prefix.num_idle,
            requests=meter.requests,
            steps=meter.steps,
            prompt_tokens=scheduler.counts.prompt_tokens,
            cached_tokens=scheduler.counts.cached_tokens,
            output_tokens=meter.output_tokens,
            preemptions=scheduler.counts.preemptions,
            endings=dict(meter.endings),
            drafts_proposed=tuple(meter.drafts_proposed),
            drafts_accepted=tuple(meter.drafts_accepted),
            verifications=meter.verifications,
            draft_tokens=scheduler.draft_tokens,
            time_of_verification=meter.time_of_verification.read(),
            time_of_draft=meter.time_of_draft.read(),
            time_to_first_token=meter.time_to_first_token.read(),
            time_between_tokens=meter.time_between_tokens.read(),
            time_per_output_token=meter.time_per_output_token.read(),
        )

    def check_integrity(self) -> None:
        """Assert that nothing is lost: pages, blocks and who holds them, requests."""
        self.scheduler.check_integrity()
        assert self._streams or not self._flying
        assert len(self._streams) == len(self.scheduler.running) + self.scheduler.num_waiting
