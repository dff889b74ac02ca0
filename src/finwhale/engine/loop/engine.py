"""The engine: takes requests, and runs the steps that compute their tokens."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.engine.loop.lanes import Lane, choose_lane
from finwhale.engine.loop.launching import Launcher
from finwhale.engine.loop.metrics import EngineMetrics, Meter, read_metrics
from finwhale.engine.loop.outputs import Outputs
from finwhale.engine.loop.request_checks import checked_prompt, end_tokens, new_filter, new_matcher
from finwhale.engine.loop.results import Results, new_chooser
from finwhale.engine.loop.step_loop import StepLoop
from finwhale.engine.loop.watchdog import Watchdog
from finwhale.engine.plan.draft_policy import DraftChooser
from finwhale.engine.plan.executor import Executor, MemoryUse, StepRunner
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.sampling import RequestSampling, TokenMatcher
from finwhale.engine.plan.scheduler import Scheduler, SchedulerCounts
from finwhale.engine.plan.sequences import SequenceState
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.plan.token_filter import TokenFilter
from finwhale.engine.ranks.lane_ranks import lane_executors, send_plans
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.ranks.sleep import free_for_good
from finwhale.errors import EngineDeadError, FinwhaleError, RequestError
from finwhale.models.protocol import ModelConfig
from finwhale.request import PromptProgress, RequestOutput, Requests, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")


Stop = Literal["paused", "held", "weights", "cache", "no weights"]
"""Why an engine runs no steps (loop/control.py): it is paused; a transfer of weights holds it; its
memory of "weights" or "cache" is asleep; its weights were dropped, and no update has replaced them.
"""

# How long `step` waits if it cannot run a step, so that callers in a loop do not spin.
CANNOT_STEP_WAIT_S = 0.05
# The same if only prefixes are on their way to or from a store.
MOVING_WAIT_S = 0.0005


class Engine:
    """One model and the requests that run on it. Several threads may call its methods.

    Args:
        executor: runs the engine's step plans (loop/opening.py opens it).

    Attributes:
        steps_ahead: number of further steps launched before the engine collects the oldest step's
            tokens: 1 on a GPU, 0 on a CPU, where the forward runs on the host. Tokens are the same.
        unused_draft_head: the kind of the checkpoint's draft head ("mtp", "dspark") if the engine
            does not draft; None: it drafts, or there is no head.
        lock: while a thread holds it, calls on other threads change no result. Read the results of
            `step` with it: `pause`, `sleep` or an update of the weights may collect further tokens
            at any other time.
        stops: why the engine runs no steps at present; empty: it runs them.
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
        self.start_seconds = dict(rank.start_seconds)
        self.steps_ahead = int(rank.asynchronous)
        self.lock = threading.RLock()
        self.stops: set[Stop] = set()
        self._can_step = threading.Event()
        self._can_step.set()
        self._watchdog = Watchdog(config.watchdog_seconds)
        self._dead: str | None = None
        self._collected = 0.0
        self._process = os.getpid()
        # One salt for all lanes, so that a prompt has the same keys in each.
        self._salt = config.prefix_salt or secrets.token_hex()
        self.begin(*(self._new_scheduler() for _ in lane_executors(executor)))

    def _new_scheduler(self) -> Scheduler:
        config, rank, target = self.config, self.executor.description, self.config.target_interval
        return Scheduler(
            PageManager(rank.groups, rank.num_pages),
            sizes=rank.sizes,
            prefix_caching=config.enable_prefix_caching,
            prefix_salt=self._salt,
            max_model_len=rank.max_model_len,
            draft_block_tokens=self.model_config.draft_block_tokens,
            target_seconds=None if target is None else target / 1000,
        )

    def begin(self, *schedulers: Scheduler) -> None:
        """Begin with a scheduler for each lane, without requests, and with all counters at 0."""
        self._meter = Meter(self.model_config.max_draft_tokens)
        executors, config = lane_executors(self.executor), self.config
        chooser = new_chooser(self.executor.description, self.model_config, config.draft_tokens)
        pairs = zip(executors, schedulers, strict=True)
        self.lanes = [self._new_lane(*pair, chooser) for pair in pairs]
        self._loop = StepLoop(self.lanes, partial(send_plans, self.executor))

    def _new_lane(
        self, executor: StepRunner, scheduler: Scheduler, chooser: DraftChooser | None
    ) -> Lane:
        model, rank = self.model_config, self.executor.description
        return Lane(
            scheduler,
            Launcher(executor, scheduler, model.vocab_size),
            Results(scheduler, self._meter, model.max_draft_tokens, chooser),
            Outputs(scheduler, self._meter, self.tokenizer, rank.routed_experts),
        )

    @property
    def scheduler(self) -> Scheduler:
        """Of the only lane. Raises FinwhaleError if there are several."""
        return self._only_lane.scheduler

    @property
    def outputs(self) -> Outputs:
        """Of the only lane. Raises FinwhaleError if there are several."""
        return self._only_lane.outputs

    @property
    def _only_lane(self) -> Lane:
        if len(self.lanes) > 1:
            raise FinwhaleError("this does not work with data_parallel_size: leave it out")
        return self.lanes[0]

    @property
    def max_model_len(self) -> int:
        return self.executor.description.max_model_len

    @property
    def sizes(self) -> StepSizes:
        """Of the largest steps of a lane."""
        return self.executor.description.sizes

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences that run at once, in all lanes."""
        return self.sizes.num_seqs * len(self.lanes)

    @property
    def memory(self) -> MemoryUse:
        """Bytes that the engine uses on the device."""
        return self.executor.description.memory

    @property
    def has_work(self) -> bool:
        return self._dead is None and any(lane.has_work for lane in self.lanes)

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
        saves_first: bool = False,
    ) -> RequestOutput:
        """Begin a request; `step` fills the returned object.

        Args:
            matcher, filter: from `new_matcher` and `new_filter`; None: this method makes them,
                while other threads may call `step`.
            stop_after: look for stop strings only after this token, which ends the reasoning.
            priority: requests with a lower value run first; equal values in order of arrival.
            prefix_owner: only requests of the same owner share cached prefixes.
            saves_first: when it ends, `is_flushing` says whether the store still saves its prompt.

        Raises:
            RequestError: the prompt is empty, too long or holds ids outside the vocabulary, or the
                grammar is refused.
            EngineDeadError: the engine failed in an earlier step.
        """
        if matcher is None:
            matcher = new_matcher(params, self.tokenizer)
        vocab_size = self.model_config.vocab_size
        if filter is None:
            filter = new_filter(params, self.tokenizer, vocab_size)
        ends = end_tokens(params, self.model_config.eos_token_ids)
        with self.lock:
            self._check_accepts()
            rank = self.executor.description
            prompt_token_ids = checked_prompt(
                prompt_token_ids, params, rank, vocab_size, has_tokenizer=self.tokenizer is not None
            )
            num_prompt, longest = len(prompt_token_ids), rank.max_model_len
            if params.max_tokens is not None:
                longest = min(longest, num_prompt + params.max_tokens)
            output = RequestOutput(request_id, prompt, prompt_token_ids, [])
            sequences = (
                SequenceState(
                    key=f"{request_id}/{index}",
                    request_id=request_id,
                    index=index,
                    token_ids=list(prompt_token_ids),
                    num_prompt=num_prompt,
                    max_len=longest,
                    params=params,
                    priority=priority,
                    prefix_owner=prefix_owner,
                    saves_first=saves_first or self.config.role == "prefill",
                    sampling=RequestSampling(
                        params, prompt_token_ids, vocab_size, index, matcher, filter, ends
                    ),
                )
                for index in range(params.n)
            )
            self._meter.ordinary_requests += self.config.role == "prefill" and not saves_first
            lane, work = choose_lane(self.lanes, prompt_token_ids, prefix_owner, params.n)
            lane.outputs.add(output, sequences, ends, stop_after, work)
            return output

    def is_flushing(self, request_id: str) -> bool:
        """Whether an ended request waits until the prefix store has its blocks."""
        stores = [lane.scheduler.admission.stored for lane in self.lanes]
        return any(stored is not None and stored.is_flushing(request_id) for stored in stores)

    def prompt_progress(self, request_id: str) -> PromptProgress | None:
        """How far a request's prompt is read; None: its prefill has not begun, or it has ended."""
        for lane in self.lanes:
            if request_id in lane.outputs.requests:
                return lane.outputs.prompt_progress(request_id)
        return None

    def _check_accepts(self) -> None:
        self.check_usable()
        if self.stops & {"weights", "cache"}:
            raise RequestError("the engine is asleep and accepts no requests: wake it first")
        if "no weights" in self.stops:
            raise RequestError(
                "the weights were dropped, so the engine accepts no requests: call update_weights "
                "with all of them first"
            )

    def check_usable(self) -> None:
        """Raise an error if the engine has ended, or belongs to another process."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if os.getpid() != self._process:
            raise FinwhaleError(
                f"this engine belongs to process {self._process}, which forked: create the LLM in "
                "the process that uses it"
            )

    def check(self) -> None:
        """Raise EngineDeadError if the engine or one of its ranks has failed. Returns at once."""
        with self.lock:
            self.check_usable()
            try:
                self.executor.check()
            except EngineDeadError as error:
                raise self.die(error) from error

    def step(self) -> list[RequestOutput]:
        """Run one step (StepLoop); returns the requests that have new tokens, in order.

        If `stops` is not empty, it runs no step, and returns after CANNOT_STEP_WAIT_S.

        An exception before a step is launched is raised unchanged, and the engine can continue.

        Raises:
            EngineDeadError: the device failed, or computed results were lost. Every request has
                ended with this error, and the engine accepts no more.
        """
        self._can_step.wait(CANNOT_STEP_WAIT_S)
        with self.lock, self._watchdog:
            # On a GPU, the step in flight began when the one before it ended.
            began = self._collected if self._loop.in_flight else time.monotonic()
            self.check_usable()
            if self.stops:
                return self._take_touched()
            try:
                self._loop.launch(self.steps_ahead)
            except (torch.AcceleratorError, EngineDeadError) as error:
                raise self.die(error) from error
            touched = self._take_touched()
            if self._loop.in_flight:
                parts = self._loop.in_flight[0]
                touched += self._collect()
                self._collected = time.monotonic()
                for lane, part in parts:
                    lane.scheduler.record_step(part.planned, self._collected - began)
                return touched
            moves = any(lane.scheduler.admission.moves_prefixes for lane in self.lanes)
        if moves and not touched:
            time.sleep(MOVING_WAIT_S)
        return touched

    def _take_touched(self) -> list[RequestOutput]:
        touched: list[RequestOutput] = []
        for lane in self.lanes:
            touched += lane.outputs.take_touched()
        return touched

    def _collect(self) -> list[RequestOutput]:
        try:
            return self._loop.collect()
        except Exception as error:
            raise self.die(error) from error

    def abort(self, request_id: str) -> None:
        """End a request now and free its pages. Unknown or finished requests are ignored."""
        with self.lock:
            for lane in self.lanes:
                if lane.outputs.abort(request_id):
                    lane.discard_if_idle()
            self._loop.forget_discarded()

    def stop(self, *stops: Stop) -> None:
        """Run no steps before a call of `allow` has ended each of these stops."""
        self.stops |= set(stops)
        self._can_step.clear()

    def allow(self, *stops: Stop) -> None:
        """End stops. The engine continues if none is left."""
        self.stops -= set(stops)
        if not self.stops:
            self._can_step.set()

    def drain(self, requests: Requests) -> None:
        """Collect the steps in flight; if asked, preempt running sequences or end all requests."""
        self.check_usable()
        first = self.lanes[0].outputs
        while self._loop.in_flight:
            first.touched += self._collect()
        for lane in self.lanes:
            while lane.scheduler.admission.moves_prefixes:
                lane.scheduler.admission.advance_loads()
                time.sleep(MOVING_WAIT_S)
            if requests == "recompute":
                lane.scheduler.preempt_all()
            elif requests == "abort":
                lane.outputs.finish_all()
                lane.discard_if_idle()

    def call_ranks(self, work: Callable[[Any], T]) -> list[T]:
        """Call `work` on every rank (Executor.call_ranks)."""
        with self.lock:
            self.check_usable()
            try:
                return self.executor.call_ranks(work)
            except (torch.AcceleratorError, EngineDeadError) as error:
                raise self.die(error) from error

    def reset_prefix_cache(self) -> None:
        """Evict all cached prefixes, so that no later request reuses them."""
        with self.lock:
            for lane in self.lanes:
                lane.scheduler.reset_prefix_cache()

    def reset(self) -> None:
        """Reset the counters and the prefix cache. The engine must have no requests."""
        with self.lock:
            assert not any(lane.outputs.requests for lane in self.lanes)
            self.reset_prefix_cache()
            for lane in self.lanes:
                lane.scheduler.counts = SchedulerCounts()
            self.begin(*(lane.scheduler for lane in self.lanes))

    def die(self, error: Exception) -> EngineDeadError:
        """End every request with an error, regardless of the engine's other state."""
        reason = str(error).strip().partition("\n")[0]
        if not isinstance(error, EngineDeadError):
            reason = f"{type(error).__name__}: {reason}"
        self._dead = f"the engine died ({reason}): start a new one"
        for lane in self.lanes:
            lane.outputs.fail_all(self._dead)
            lane.abandon()
        return EngineDeadError(self._dead)

    def close(self) -> None:
        """End all requests and the ranks, and free the model's memory. The engine cannot be used
        afterwards. A forked process closes nothing of its parent.
        """
        if os.getpid() != self._process:
            return
        with self.lock:
            if self._dead is None:
                with suppress(EngineDeadError):
                    self.drain("abort")
            for lane in reversed(self.lanes):
                lane.close()
            healthy, self._dead = self._dead is None, self._dead or "the engine is closed"
            self.executor.close()
            if healthy:
                free_for_good(first_rank(self.executor))

    def metrics(self) -> EngineMetrics:
        """Read the current state and the counters, without waiting for a step."""
        ranks = self.executor.rank_states()
        schedulers = [lane.scheduler for lane in self.lanes]
        return read_metrics(schedulers, self._meter, self._watchdog.elapsed, ranks)
