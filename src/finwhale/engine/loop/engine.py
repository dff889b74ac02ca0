"""The engine schedules and launches steps, collects their tokens and detokenises them.

On a GPU the engine runs one step ahead: while the device computes a step, the engine plans and
launches the next step, which reads the first step's tokens on the device. Only then does the engine
wait for these tokens, append them and detokenise them.
"""

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch

from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.stop_strings import StopChecker
from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.engine.loop.in_flight import InFlightStep, Request, TextStream
from finwhale.engine.loop.metrics import Clock, EngineMetrics, Meter, read_metrics
from finwhale.engine.loop.request_checks import checked_prompt, new_filter, new_matcher
from finwhale.engine.loop.routed_experts import ExpertRecord
from finwhale.engine.loop.sampled_tokens import (
    NOT_FINITE,
    SampledToken,
    TokenLogprob,
    row_logprobs,
)
from finwhale.engine.loop.step_loop import StepLoop
from finwhale.engine.loop.watchdog import Watchdog
from finwhale.engine.plan.executor import Executor, MemoryUse
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.sampling import RequestSampling, TokenMatcher
from finwhale.engine.plan.scheduler import Scheduler, SchedulerCounts
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_plan import PENDING
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.plan.token_filter import TokenFilter
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.ranks.sleep import allocate_memory, check_can_save, free_for_good, free_memory
from finwhale.errors import EngineDeadError, FinwhaleError, RequestError
from finwhale.models.protocol import ModelConfig
from finwhale.request import (
    CompletionOutput,
    ExpertIds,
    FinishReason,
    Logprob,
    RequestOutput,
    RequestTimes,
    SamplingParams,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


Requests = Literal["recompute", "keep", "abort"]
"""How to treat running requests when weights or memory change.

"recompute": they wait, and the engine computes their tokens so far again. "keep": they continue
with the cache of the old weights. "abort": they end with their tokens so far and the finish reason
"abort".
"""

MemoryTag = Literal["weights", "cache"]
"""The memory that `sleep` can free."""

# How long `step` waits if it cannot run a step, so that callers in a loop do not spin.
CANNOT_STEP_WAIT_S = 0.05


class Engine:
    """One model and the requests that run on it. Several threads may call its methods.

    Args:
        executor: runs the engine's step plans (loop/opening.py opens it).

    Attributes:
        steps_ahead: number of further steps launched before the engine collects the oldest step's
            tokens: 1 on a GPU, 0 on a CPU, where the forward runs on the host. Tokens are the same.
        unused_draft_head: the kind of the checkpoint's draft head ("mtp", "dspark") if the engine
            does not draft; None: it drafts, or there is no head.
    """

    unused_draft_head: str | None = None

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.executor = executor
        rank = executor.description
        logger.info("memory on %s: %s", rank.device, rank.memory)
        self.scheduler = Scheduler(
            PageManager(rank.groups, rank.num_pages),
            sizes=rank.sizes,
            prefix_caching=config.enable_prefix_caching,
            prefix_salt=config.prefix_salt,
            max_model_len=rank.max_model_len,
            draft_block_tokens=model_config.draft_block_tokens,
        )
        self.start_seconds = dict(rank.start_seconds)
        self.steps_ahead = int(rank.asynchronous)
        self._requests: dict[str, Request] = {}
        self._text_streams: dict[str, TextStream] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._meter = Meter(self.model_config.max_draft_tokens)
        self._loop = self._new_loop()
        self._watchdog = Watchdog(config.watchdog_seconds)
        self._dead: str | None = None
        self._paused = self._held = False
        self._asleep: set[str] = set()
        self._lacks_weights = False
        self._can_step = threading.Event()
        self._can_step.set()
        # Requests that changed outside of a step; the next step returns them.
        self._touched: list[RequestOutput] = []
        self._lock = threading.RLock()
        self._process = os.getpid()

    def _new_loop(self) -> StepLoop:
        drafts, model = self.config.draft_tokens, self.model_config
        return StepLoop(self.executor, self.scheduler, self._meter, model, drafts)

    @property
    def max_model_len(self) -> int:
        return self.executor.description.max_model_len

    @property
    def sizes(self) -> StepSizes:
        """Of the largest steps."""
        return self.executor.description.sizes

    @property
    def memory(self) -> MemoryUse:
        """Bytes that the engine uses on the device."""
        return self.executor.description.memory

    @property
    def has_work(self) -> bool:
        return self._dead is None and (self.scheduler.has_work or bool(self._touched))

    @property
    def can_step(self) -> bool:
        """Whether the engine is not paused, and has all its memory and weights."""
        return not (self._paused or self._held or self.lacks_memory_or_weights)

    @property
    def needs_resume_or_wake(self) -> bool:
        """Whether `resume` or `wake` must be called before the engine can run steps."""
        return self._paused or bool(self._asleep)

    @property
    def lacks_memory_or_weights(self) -> bool:
        """Whether `sleep` has freed memory, or dropped weights that no update has replaced yet."""
        return bool(self._asleep) or self._lacks_weights

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        stop_after: int | None = None,
        priority: int = 0,
        matcher: TokenMatcher | None = None,
        prefix_owner: str = "",
        filter: TokenFilter | None = None,
    ) -> RequestOutput:
        """Begin a request; `step` fills the returned object.

        Args:
            matcher: the compiled `params.guide`; None: this method compiles it, while other threads
                may call `step`.
            filter: from `new_filter`; None: this method makes it, in the same way.
            stop_after: look for stop strings only after this token, which ends the reasoning.
            priority: requests with a lower value run first; equal values in order of arrival.
            prefix_owner: only requests of the same owner share cached prefixes.

        Raises:
            RequestError: the prompt is empty, too long or holds ids outside the vocabulary, or the
                grammar is refused.
            EngineDeadError: the engine failed in an earlier step.
        """
        if matcher is None:
            matcher = new_matcher(params, self.tokenizer)
        if filter is None:
            filter = new_filter(params, self.tokenizer, self.model_config.vocab_size)
        vocab_size, longest = self.model_config.vocab_size, self.max_model_len
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.model_config.eos_token_ids)
        with self._lock:
            self._check_accepts(params)
            assert request_id not in self._requests, f"request {request_id} is running already"
            prompt_token_ids = checked_prompt(
                prompt_token_ids,
                params,
                vocab=vocab_size,
                max_model_len=longest,
                has_tokenizer=self.tokenizer is not None,
            )
            num_prompt = len(prompt_token_ids)
            if params.max_tokens is not None:
                longest = min(longest, num_prompt + params.max_tokens)
            request = RequestOutput(request_id, prompt, prompt_token_ids, [])
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = [None] * num_prompt
            running, began = Request(request, params.n), time.monotonic()
            self._requests[request_id] = running  # first, so that `abort` finds a part of it, too
            for index in range(params.n):
                sequence = SequenceState(
                    key=f"{request_id}/{index}",
                    request_id=request_id,
                    index=index,
                    token_ids=list(prompt_token_ids),
                    num_prompt=num_prompt,
                    max_len=longest,
                    params=params,
                    priority=priority,
                    prefix_owner=prefix_owner,
                    sampling=RequestSampling(
                        params,
                        prompt_token_ids,
                        vocab_size,
                        index,
                        None if matcher is None else matcher.copy(),
                        None if filter is None else filter.copy(),
                        ends,
                    ),
                )
                if index == 0 and num_prompt > 1:  # the first token has no log-probability
                    sequence.prompt_logprobs = params.prompt_logprobs
                self._add(sequence, running, ends, stop_after, began)
            self._meter.requests += 1
            return request

    def _check_accepts(self, params: SamplingParams) -> None:
        """Raise an error if the engine accepts no requests now, or none with these parameters."""
        self._check_usable()
        if self._asleep:
            raise RequestError("the engine is asleep and accepts no requests: wake it first")
        if self._lacks_weights:
            raise RequestError(
                "the weights were dropped, so the engine accepts no requests: call update_weights "
                "with all of them first"
            )
        if params.return_routed_experts and self.executor.description.routed_experts is None:
            raise RequestError(
                "return_routed_experts needs an engine that was started with "
                "enable_return_routed_experts (--enable-return-routed-experts)"
            )

    def _add(
        self,
        sequence: SequenceState,
        request: Request,
        ends: frozenset[int],
        stop_after: int | None,
        began: float,
    ) -> None:
        """Add a continuation of a request, which arrived at time `began` (time.monotonic())."""
        params, form = sequence.params, self.executor.description.routed_experts
        detokenizer = stop = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)
        if params.stop:
            stop = StopChecker(tuple(params.stop), keep=params.include_stop_str_in_output)
        output = CompletionOutput(sequence.index, logprobs=None if params.logprobs is None else [])
        request.output.outputs.append(output)
        stream = self._text_streams[sequence.key] = TextStream(
            sequence,
            request,
            output,
            ends,
            detokenizer,
            stop,
            stop_after if params.stop else None,
            Clock(began),
        )
        if params.return_routed_experts and form is not None:
            # The first continuation also has the experts of the prompt.
            stream.routed = ExpertRecord(sequence.num_prompt if sequence.index else 0, form)
            sequence.num_routed = stream.routed.end
        self.scheduler.add(sequence)

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if os.getpid() != self._process:
            raise FinwhaleError(
                f"this engine belongs to process {self._process}, which forked: create the LLM in "
                "the process that uses it"
            )

    def check(self) -> None:
        """Raise EngineDeadError if the engine or one of its ranks has failed. Returns at once."""
        with self._lock:
            self._check_usable()
            try:
                self.executor.check()
            except EngineDeadError as error:
                raise self._die(error) from error

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that have new tokens, in order.

        If `can_step` is false, it runs no step, and returns after CANNOT_STEP_WAIT_S.

        An exception before a step is launched is raised unchanged, and the engine can continue.

        Raises:
            EngineDeadError: the device failed, or computed results were lost. Every request has
                ended with this error, and the engine accepts no more.
        """
        self._can_step.wait(CANNOT_STEP_WAIT_S)
        with self._lock, self._watchdog:
            self._check_usable()
            if not self.can_step:
                return self._take_touched()
            try:
                while len(self._in_flight) <= self.steps_ahead and self._launch():
                    pass
            except (torch.AcceleratorError, EngineDeadError) as error:
                raise self._die(error) from error
            touched = self._take_touched()
            if not self._in_flight:
                return touched
            try:
                return [*touched, *self._collect()]
            except Exception as error:
                raise self._die(error) from error

    def _take_touched(self) -> list[RequestOutput]:
        touched, self._touched = self._touched, []
        return touched

    def unchanging(self) -> AbstractContextManager[bool]:
        """While this context is open, calls on other threads change no result.

        Read the results of `step` within it: `pause`, `sleep` or an update of the weights may
        collect further tokens at any other time.
        """
        return self._lock

    # --- Between steps ----------------------------------------------------------------------------

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Run no more steps until `resume`. New requests are accepted, and wait.

        Args:
            mode: "keep" lets the running requests wait too; "abort" ends all requests.
        """
        if mode not in ("keep", "abort"):
            raise RequestError(f'mode must be "keep" or "abort", got {mode!r}')
        with self._lock:
            self._check_usable()
            self._drain(mode)
            self._paused = True
            self._update_can_step()

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._lock:
            self._paused = False
            self._update_can_step()

    def sleep(
        self,
        tags: Sequence[MemoryTag] = get_args(MemoryTag),
        *,
        drop_weights: bool = False,
        requests: Literal["recompute", "abort"] = "recompute",
    ) -> None:
        """Free memory until `wake` (LLM.sleep).

        Raises:
            RequestError: a tag is unknown or asleep, or the engine has no sleep mode.
            ResourceError: the host has too little memory to save a GPU's weights. Nothing changes.
        """
        chosen = _checked_tags(tags)
        if not self.config.enable_sleep_mode:
            raise RequestError("this engine cannot sleep: it needs the option enable_sleep_mode")
        if requests not in ("recompute", "abort"):
            raise RequestError(f'requests must be "recompute" or "abort", got {requests!r}')
        with self._lock:
            self._check_usable()
            if both := self._asleep & set(chosen):
                raise RequestError(f"{min(both)} is already asleep")
            saves = not (drop_weights or self._lacks_weights)
            if saves and "weights" in chosen:
                self.call_ranks(check_can_save)
            self._drain(requests)
            self.scheduler.reset_prefix_cache()
            self._change_ranks(partial(free_memory, tags=chosen, save_weights=saves))
            self._asleep |= set(chosen)
            self._lacks_weights |= drop_weights and "weights" in chosen
            self._update_can_step()

    def wake(self, tags: Sequence[MemoryTag] = get_args(MemoryTag)) -> None:
        """Allocate memory again. The engine continues once all memory and all weights are there.

        Raises:
            RequestError: a tag is unknown.
        """
        chosen = _checked_tags(tags)
        with self._lock:
            self._check_usable()
            chosen = tuple(tag for tag in chosen if tag in self._asleep)
            self._change_ranks(partial(allocate_memory, tags=chosen))
            self._asleep -= set(chosen)
            self._update_can_step()

    @contextmanager
    def no_steps(self) -> Iterator[None]:
        """Run no steps within the context, in which other calls have their turn."""
        with self._lock:
            self._check_usable()
            self._drain("keep")
            self._held = True
            self._update_can_step()
        try:
            yield
        finally:
            with self._lock:
                self._held = False
                self._update_can_step()

    def _update_can_step(self) -> None:
        if self.can_step:
            self._can_step.set()
        else:
            self._can_step.clear()

    def _change_ranks(self, work: Callable[[Any], None]) -> None:
        """Call `work` on every rank. An error ends the engine, because it leaves ranks unequal."""
        try:
            self.executor.call_ranks(work)
        except Exception as error:
            raise self._die(error) from error

    def call_ranks(self, work: Callable[[Any], T]) -> list[T]:
        """Call `work` on every rank (Executor.call_ranks)."""
        with self._lock:
            self._check_usable()
            try:
                return self.executor.call_ranks(work)
            except (torch.AcceleratorError, EngineDeadError) as error:
                raise self._die(error) from error

    def check_weights_can_change(
        self, *, partial: bool = False, requests: Requests = "recompute"
    ) -> None:
        """Raise RequestError if weights cannot be written now, or `requests` is unknown."""
        if requests not in get_args(Requests):
            raise RequestError(f"requests must be one of {get_args(Requests)}, got {requests!r}")
        if "weights" in self._asleep:
            raise RequestError(
                'the weights are asleep: call wake(["weights"]) before update_weights'
            )
        if partial and self._lacks_weights:
            raise RequestError("the weights were dropped, so an update must have all of them")

    def change_weights(
        self, work: Callable[[Any], None], requests: Requests, *, partial: bool
    ) -> None:
        """Call `work`, which replaces the weights or some of them (`partial`), on every rank.

        No step is in flight during the call, and the prefix cache is empty afterwards. An error of
        `work` ends the engine.
        """
        with self._lock:
            self._check_usable()
            self.check_weights_can_change(partial=partial, requests=requests)
            self._drain(requests)
            self._change_ranks(work)
            self.scheduler.reset_prefix_cache()
            self._lacks_weights = False
            self._update_can_step()

    def _drain(self, requests: Requests) -> None:
        """Collect the steps in flight; if asked, preempt running sequences or end all requests."""
        try:
            while self._in_flight:
                self._touched += self._collect()
        except Exception as error:
            raise self._die(error) from error
        if requests == "recompute":
            self.scheduler.preempt_all()
        elif requests == "abort":
            for stream in list(self._text_streams.values()):
                self._touched.append(stream.request.output)
                self._finish(stream, "abort", None)
            self._discard_if_idle()

    def _die(self, error: Exception) -> EngineDeadError:
        """End every request with an error, regardless of the engine's other state."""
        reason = str(error).strip().partition("\n")[0]
        if not isinstance(error, EngineDeadError):
            reason = f"{type(error).__name__}: {reason}"
        self._dead = f"the engine died ({reason}): start a new one"
        for stream in self._text_streams.values():
            stream.ended = True
            stream.output.finish_reason = "error"
            self._meter.endings["error"] += 1
        for request in self._requests.values():
            request.output.error = self._dead
            request.output.finished = True
        self._text_streams.clear()
        self._requests.clear()
        for step in self._in_flight:
            _never_free(step)
        self._in_flight.clear()
        return EngineDeadError(self._dead)

    def _launch(self) -> bool:
        """Plan the next step and launch it; returns whether a step was launched."""
        step = self._loop.launch(self._text_streams, self._in_flight)
        if step is not None:
            self._in_flight.append(step)
        return step is not None

    def _collect(self) -> list[RequestOutput]:
        """Wait for the tokens of the oldest in-flight step, and append them to the requests."""
        step, *later = self._in_flight
        tokens = self._loop.collect(step, later)
        self._in_flight.popleft()
        touched = list(step.rows.outputs)
        if step.scores:
            touched += self._record_scores(step)
        if step.routed is not None:
            self._record_routed(step.planned, step.routed)
        for stream, index, token in tokens:
            if not stream.ended:
                self._append(stream, index, token)
        self._loop.record_appended()
        self._discard_if_idle()
        self._loop.sample_waiting(self._in_flight)
        return touched

    def _record_scores(self, step: InFlightStep) -> list[RequestOutput]:
        """Store the log-probabilities of prompt tokens; returns the requests that failed."""
        failed = []
        for found in step.scores:
            chunk = step.planned[found.chunk]
            sequence = chunk.sequence
            stream = self._text_streams.get(sequence.key)
            if stream is None or stream.sequence is not sequence:
                continue  # the request has ended
            output = stream.request.output
            assert output.prompt_logprobs is not None
            if not found.valid:
                output.error = NOT_FINITE
                self._finish(stream, "error", None)
                self.scheduler.reset_prefix_cache()
                failed.append(output)
                continue
            last = chunk.start + len(found.logprobs.token)
            for row, index in enumerate(range(chunk.start + 1, last + 1)):
                table = row_logprobs(found.logprobs, row, sequence.token_ids[index])
                output.prompt_logprobs[index] = self._with_texts(table)
            if last + 1 == sequence.num_prompt:
                sequence.prompt_logprobs = None
        return failed

    def _record_routed(self, chunks: Sequence[Chunk], ids: ExpertIds) -> None:
        """Store the routed experts of a step's tokens."""
        begin = 0
        for chunk in chunks:
            end = begin + chunk.end - chunk.start
            stream = self._text_streams.get(chunk.sequence.key)
            if (
                stream is not None
                and stream.routed is not None
                and stream.sequence is chunk.sequence
            ):
                stream.routed.add(chunk, ids[begin:end])
                chunk.sequence.num_routed = stream.routed.end
            begin = end

    def _discard_if_idle(self) -> None:
        """If no sequence remains, discard the steps still in flight."""
        if not self._text_streams:
            self._in_flight.clear()
            self._loop.drop_rows()

    def abort(self, request_id: str) -> None:
        """End a request now and free its pages. Unknown or finished requests are ignored."""
        with self._lock:
            if self._requests.pop(request_id, None) is None:
                return
            for stream in list(self._text_streams.values()):
                if stream.sequence.request_id == request_id:
                    self._retire(stream, "abort")
            self._discard_if_idle()

    def _append(self, stream: TextStream, index: int, token: SampledToken) -> None:
        sequence, output, token_id = stream.sequence, stream.output, token.token_id
        if not output.token_ids and sequence.index == 0:
            clock, request = stream.clock, stream.request.output
            request.num_cached_tokens = sequence.num_cached or 0
            if stream.routed is not None:
                request.prompt_routed_experts = stream.routed.of(0, sequence.num_prompt)
            if clock.first:
                times = (clock.began, sequence.admitted, clock.first, clock.last)
                request.times = RequestTimes(*times)
        if token.error is not None:
            stream.request.output.error = token.error
            self._finish(stream, "error", None)
            if not token.of_grammar:
                # The error may come from cached state, so no later request may reuse that state.
                self.scheduler.reset_prefix_cache()
            return
        sequence.token_ids[index] = token_id
        output.token_ids.append(token_id)
        if token.logprobs is not None and output.logprobs is not None:
            output.logprobs.append(self._with_texts(token.logprobs))
        if token_id in stream.ends:
            if sequence.params.include_stop_str_in_output and stream.detokenizer is not None:
                stream.add_token(stream.detokenizer, token_id)
            is_asked_for = token_id in sequence.params.stop_token_ids
            self._finish(stream, "stop", token_id if is_asked_for else None)
            return
        if stream.detokenizer is not None and stream.add_token(stream.detokenizer, token_id):
            assert stream.stop is not None
            self._finish(stream, "stop", stream.stop.matched)
            return
        if index + 1 >= sequence.max_len:
            self._finish(stream, "length", None)

    def _with_texts(self, table: Mapping[int, TokenLogprob]) -> dict[int, Logprob]:
        text = (lambda _: "") if self.tokenizer is None else self.tokenizer.token_text
        return {i: Logprob(entry.logprob, entry.rank, text(i)) for i, entry in table.items()}

    def _finish(self, stream: TextStream, reason: FinishReason, stop: str | int | None) -> None:
        stream.close()
        stream.output.finish_reason = reason
        stream.output.stop_reason = stop
        if stream.routed is not None:
            first = stream.sequence.num_prompt
            last = first + len(stream.output.token_ids) - 1
            stream.output.routed_experts = stream.routed.of(first, last)
        stream.request.unfinished -= 1
        if not stream.request.unfinished:
            stream.request.output.finished = True
            del self._requests[stream.sequence.request_id]
        self._retire(stream, reason)

    def _retire(self, stream: TextStream, how: FinishReason) -> None:
        stream.ended = True
        self._meter.record_end(how, stream.clock, len(stream.output.token_ids))
        times = stream.request.output.times
        if times is not None:
            times.last_token = max(times.last_token, stream.clock.last)
        while stream.sequence.token_ids[-1] == PENDING:
            stream.sequence.token_ids.pop()
        self.scheduler.finish(stream.sequence)
        del self._text_streams[stream.sequence.key]

    def close(self) -> None:
        """End all requests and the ranks, and free the model's memory. The engine cannot be used
        afterwards. A forked process closes nothing of its parent.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._dead is None:
                with suppress(EngineDeadError):
                    self._drain("abort")
            healthy, self._dead = self._dead is None, self._dead or "the engine is closed"
            self.executor.close()
            if healthy:
                free_for_good(first_rank(self.executor))

    def reset_prefix_cache(self) -> None:
        """Evict all cached prefixes, so that no later request reuses them."""
        with self._lock:
            self.scheduler.reset_prefix_cache()

    def reset(self) -> None:
        """Reset the counters and the prefix cache. The engine must have no requests."""
        with self._lock:
            assert not self._requests
            self.scheduler.reset_prefix_cache()
            self.scheduler.counts = SchedulerCounts()
            self._meter = Meter(self.model_config.max_draft_tokens)
            self._loop = self._new_loop()

    def metrics(self) -> EngineMetrics:
        """Read the current state and the counters, without waiting for a step."""
        late, ranks = self.executor.late_compilations(), self.executor.rank_states()
        return read_metrics(self.scheduler, self._meter, self._watchdog.elapsed, late, ranks)

    def check_integrity(self) -> None:
        """Assert that no page, block or request is lost."""
        self.scheduler.check_integrity()
        assert self._text_streams or not self._in_flight
        assert len(self._text_streams) == len(self.scheduler.running) + self.scheduler.num_waiting


def _checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    known = get_args(MemoryTag)
    if isinstance(tags, str) or not tags or not set(tags) <= set(known):
        raise RequestError(f"tags must be some of {known}, got {tags!r}")
    return tuple(tag for tag in known if tag in tags)


def _never_free(step: InFlightStep) -> None:
    """Keep a step as long as the process lives: freeing one of a failed device would end it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(step))
