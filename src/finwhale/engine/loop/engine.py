"""Requests in, tokens out: the loop over schedule, forward, sample, detokenise.

On a GPU the loop runs one step ahead: while the device computes a step whose tokens the host does
not know yet, the next one is planned and launched with their ids taken from the device; only then
are they waited for, appended, detokenised.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.grammar import Matcher
from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.engine.loop.drafting_loop import DraftLoop
from finwhale.engine.loop.in_flight import Flight, Request, Rows, Stream
from finwhale.engine.loop.metrics import Clock, Ending, EngineMetrics, Meter, read_metrics
from finwhale.engine.loop.request_checks import checked_prompt, new_matcher
from finwhale.engine.loop.stop_strings import StopChecker
from finwhale.engine.loop.warmup import rehearse
from finwhale.engine.loop.watchdog import Watchdog
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.scheduler import Scheduler, SchedulerCounts
from finwhale.engine.plan.sequences import PENDING
from finwhale.engine.plan.sequences import Sequence as RunningSequence
from finwhale.engine.rank.memory import MemoryUse
from finwhale.engine.rank.runner import ModelRunner
from finwhale.engine.rank.sampler import SampledToken, Sampler
from finwhale.errors import EngineDeadError, FinwhaleError
from finwhale.models.protocol import ModelConfig, WeightStream
from finwhale.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    SamplingParams,
)

logger = logging.getLogger(__name__)


# What was in flight when an engine died.
_ABANDONED: list[Flight] = []


class Engine:
    """One model and the requests that run on it; may be called from several threads.

    Attributes:
        steps_ahead: steps launched before the oldest one's tokens are read: 1 on a GPU; 0 on a
            CPU, where the forward runs on the host. The tokens are the same.

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
            max_model_len=self.runner.max_model_len,
        )
        self.sampler = Sampler(self.runner.ops.sample)
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, Stream] = {}
        self._flying: deque[Flight] = deque()
        self._rows = self._fed = Rows([])
        self.steps_ahead = 0 if self.runner.device.type == "cpu" else 1
        self._meter = Meter(self.model_config.max_draft_tokens)
        self._drafting = self._new_draft_loop()
        self._watchdog = Watchdog(config.watchdog_seconds)
        self._dead: str | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()
        if self.runner.device.type != "cpu" and self.runner.ops.capabilities.builds_kernels:
            rehearse(self)
            self.runner.phases.end("rehearsal")
        self.runner.builds.ready()

    def _new_runner(self, weights: WeightStream) -> ModelRunner:
        return ModelRunner(self.config, self.model_config, weights)

    def _new_draft_loop(self) -> DraftLoop | None:
        if self.runner.drafter is None:
            return None
        return DraftLoop(
            self.runner, self.scheduler, self.sampler, self._meter, self.config.draft_tokens
        )

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
        matcher: Matcher | None = None,
    ) -> RequestOutput:
        """Begin a request; the object returned is filled as `step` runs.

        Args:
            matcher: `params.guide` compiled; None: it is compiled here, while other threads may
                step.
            stop_after: look for stop strings only after this token: the end of the reasoning.
            priority: lower goes first; those of one priority in the order of their arrival.

        Raises:
            RequestError: the prompt is empty, too long or holds ids outside the vocabulary, or the
                grammar is refused.
            EngineDeadError: it broke in an earlier step.
        """
        if matcher is None:
            matcher = new_matcher(params, self.tokenizer)
        with self._lock:
            return self._add(
                request_id, prompt_token_ids, params, prompt, stop_after, priority, matcher
            )

    def _add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        stop_after: int | None,
        priority: int,
        matcher: Matcher | None,
    ) -> RequestOutput:
        self._check_usable()
        assert request_id not in self._requests, f"request {request_id} is running already"
        prompt_token_ids = checked_prompt(
            prompt_token_ids,
            params,
            vocab=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            has_tokenizer=self.tokenizer is not None,
        )
        longest = self.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt_token_ids) + params.max_tokens)
        request = RequestOutput(request_id, prompt, prompt_token_ids, [])
        began = time.monotonic()
        running = Request(request, params.n)
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
            self._streams[sequence.key] = Stream(
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

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if os.getpid() != self._process:
            raise FinwhaleError(
                f"this engine was made in process {self._process}, which forked: make the LLM in "
                "the process that uses it"
            )

    def step(self) -> list[RequestOutput]:
        """Run one forward; returns the requests that have new tokens, in order.

        What breaks before a step is on the device is raised as it is, and the engine can go on.

        Raises:
            EngineDeadError: the device failed, or what had been computed was lost: every request
                has ended with this error, and the engine takes no more.
        """
        with self._lock, self._watchdog:
            self._check_usable()
            self.runner.use_device()
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
        # To free what is in flight on a device that failed would end the process.
        _ABANDONED.extend(self._flying)
        self._flying.clear()
        return EngineDeadError(self._dead)

    def _launch(self) -> bool:
        """Plan the next step and put it on the device; whether there was anything to do."""
        if self._drafting is not None:
            before = self._flying[-1] if self._flying else None
            launched = self._drafting.launch(self._streams, before)
            if launched is not None:
                self._flying.append(launched)
            return launched is not None
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        complete = [c.sequence for c in chunks if c.end == len(c.sequence.token_ids)]
        if complete != self._rows.sequences:
            self._rows = Rows([self._streams[s.key] for s in complete])
        rows = self._rows
        flight = Flight(rows, [len(s.token_ids) for s in complete], self.runner.logits(chunks))
        if not any(stream.sequence.token_ids[-1] == PENDING for stream in rows.historic):
            self._choose(flight)
        # On a GPU all of this is still running. Pages may go to others even so: what these write
        # is launched later.
        self.scheduler.computed(chunks)
        for sequence in complete:
            sequence.token_ids.append(PENDING)
        self._flying.append(flight)
        return True

    def _choose(self, flight: Flight) -> None:
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

    def _collect_runs(self, loop: DraftLoop) -> list[RequestOutput]:
        """The same in an engine that drafts: a step gives each sequence a run of tokens."""
        flight = self._flying[0]
        runs = list(loop.collect(flight, list(self._flying)[1:]))
        self._flying.popleft()
        for stream, place, run in runs:
            for at, token in enumerate(run, start=place):
                self._append(stream, at, token)
                if stream.ended:
                    break
        self._forget_if_idle()
        return list(flight.rows.outputs)

    def _collect(self) -> list[RequestOutput]:
        """Wait for the tokens of the oldest step in flight, and hand them out."""
        flight = self._flying[0]
        assert flight.sampling is not None
        if self._drafting is not None:
            return self._collect_runs(self._drafting)
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
        self._forget_if_idle()
        if self._flying and self._flying[0].undecided:
            self._choose(self._flying[0])
        return list(flight.rows.outputs)

    def _forget_if_idle(self) -> None:
        """What is in flight for nobody is not waited for."""
        if not self._streams:
            self._flying.clear()
            self._rows = self._fed = Rows([])

    def abort(self, request_id: str) -> None:
        """End a request now; its pages go back. Unknown or finished requests are ignored."""
        with self._lock:
            if self._requests.pop(request_id, None) is None:
                return
            for stream in list(self._streams.values()):
                if stream.sequence.request_id == request_id:
                    self._retire(stream, "abort")
            self._forget_if_idle()

    def _append(self, stream: Stream, place: int, token: SampledToken) -> None:
        sequence, output, token_id = stream.sequence, stream.output, token.token_id
        if not output.token_ids and sequence.index == 0:
            stream.request.output.num_cached_tokens = sequence.num_cached or 0
        if token.error is not None:
            stream.request.output.error = token.error
            self._finish(stream, "error", None)
            if not token.of_grammar:
                # The error may come from cached state, so no later request may reuse that state.
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
        if stream.detokenizer is not None and stream.read(stream.detokenizer, token_id):
            assert stream.stop is not None
            self._finish(stream, "stop", stream.stop.matched)
            return
        if place + 1 >= sequence.max_len:
            self._finish(stream, "length", None)

    def _token_text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def _finish(self, stream: Stream, reason: FinishReason, stop: str | int | None) -> None:
        stream.close()
        stream.output.finish_reason = reason
        stream.output.stop_reason = stop
        stream.request.unfinished -= 1
        if not stream.request.unfinished:
            stream.request.output.finished = True
            del self._requests[stream.sequence.request_id]
        self._retire(stream, reason)

    def _retire(self, stream: Stream, how: Ending) -> None:
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

    def forget(self) -> None:
        """Begin to count anew, with nothing read before. Only while there is no request."""
        with self._lock:
            assert not self._requests
            self.scheduler.reset_prefix_cache()
            self.scheduler.counts = SchedulerCounts()
            self._meter = Meter(self.model_config.max_draft_tokens)
            self._drafting = self._new_draft_loop()

    def metrics(self) -> EngineMetrics:
        """The present state and the counters; waits for no step."""
        return read_metrics(
            self.scheduler, self._meter, self._watchdog.elapsed, self.runner.builds.late()
        )

    def check_integrity(self) -> None:
        """Assert that nothing is lost: pages, blocks and who holds them, requests."""
        self.scheduler.check_integrity()
        assert self._streams or not self._flying
        assert len(self._streams) == len(self.scheduler.running) + self.scheduler.num_waiting
