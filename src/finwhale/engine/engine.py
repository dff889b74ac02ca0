"""Requests in, tokens out: the loop over schedule, forward, sample, detokenise.

On a GPU the loop runs one step ahead: while the device computes a step whose tokens the host does
not know yet, the next one is planned and launched with their ids taken from the device; only then
are they waited for, appended, detokenised.
"""

import logging
import operator
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.grammar import Matcher
from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.engine.memory import MemoryUse
from finwhale.engine.pages import PageManager
from finwhale.engine.runner import ModelRunner
from finwhale.engine.sampler import SampledToken, Sampler, Sampling
from finwhale.engine.scheduler import PENDING, Scheduler
from finwhale.engine.scheduler import Sequence as RunningSequence
from finwhale.engine.stop import StopChecker
from finwhale.errors import FinwhaleError, RequestError
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

    Stop strings are looked for once `stop_after` has been generated; None: from the beginning.
    """

    sequence: RunningSequence
    output: CompletionOutput
    detokenizer: Detokenizer | None
    stop: StopChecker
    stop_after: int | None
    ended: bool = False


@dataclass(slots=True)
class _Request:
    output: RequestOutput
    unfinished: int


@dataclass(slots=True)
class _Flight:
    """A step that was launched and whose tokens are not known yet.

    Attributes:
        streams: those that get a token, in the order of the rows.
        places: where in each one's token_ids it will stand.
        logits: [M,V] until tokens are chosen from them.
        sampling: the tokens.
    """

    streams: list[_Stream]
    places: list[int]
    logits: Tensor | None
    sampling: Sampling | None = None

    @property
    def undecided(self) -> bool:
        return self.logits is not None


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
        self.runner = ModelRunner(config, model_config, weights)
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
        self.steps_ahead = 0 if self.runner.device.type == "cpu" else 1
        self._lock = threading.RLock()
        self._process = os.getpid()

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def memory(self) -> MemoryUse:
        """What is held on the device."""
        return self.runner.memory

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

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
        self._check_process()
        assert request_id not in self._requests, f"request {request_id} is running already"
        prompt_token_ids = self._checked(prompt_token_ids, params)
        matcher = self._new_matcher(params)
        longest = self.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt_token_ids) + params.max_tokens)
        request = RequestOutput(request_id, prompt, prompt_token_ids, [])
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
                output,
                self._new_detokenizer(),
                StopChecker(tuple(params.stop)),
                stop_after if params.stop else None,
            )
            self.scheduler.add(sequence)
        self._requests[request_id] = _Request(request, params.n)
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

    def _check_process(self) -> None:
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
        """Run one forward; returns the requests that have new tokens, in order."""
        with self._lock:
            self._check_process()
            while len(self._flying) <= self.steps_ahead and self._launch():
                pass
            return self._collect() if self._flying else []

    def _launch(self) -> bool:
        """Plan the next step and put it on the device; whether there was anything to do."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        complete = [chunk.sequence for chunk in chunks if chunk.completes]
        flight = _Flight(
            [self._streams[s.key] for s in complete],
            [len(s.token_ids) for s in complete],
            self.runner.logits(chunks),
        )
        if not any(
            s.token_ids[-1] == PENDING and self.sampler.needs_history(s.key) for s in complete
        ):
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
        going = [row for row, stream in enumerate(flight.streams) if not stream.ended]
        if len(going) < len(flight.streams):
            logits = self.runner.rows(logits, going)
            flight.streams = [flight.streams[row] for row in going]
            flight.places = [flight.places[row] for row in going]
        sequences = [stream.sequence for stream in flight.streams]
        flight.sampling = self.sampler.start([s.key for s in sequences], logits)
        if self.steps_ahead and flight.sampling.ids_S is not None:
            self.runner.feed(flight.sampling.ids_S)
            for row, sequence in enumerate(sequences):
                sequence.sampled_row = row

    def _collect(self) -> list[RequestOutput]:
        """Wait for the tokens of the oldest step in flight, and hand them out."""
        flight = self._flying[0]
        assert flight.sampling is not None
        sampled = self.sampler.commit(flight.sampling)
        self._flying.popleft()
        touched: dict[str, RequestOutput] = {}
        for stream, place, token in zip(flight.streams, flight.places, sampled, strict=True):
            # One that ended while this step was in flight was run once too often.
            if stream.ended:
                continue
            self._append(stream, place, token)
            request_id = stream.sequence.request_id
            request = self._requests.get(request_id)
            if request is not None:
                touched[request_id] = request.output
                if request.unfinished == 0:
                    request.output.finished = True
                    del self._requests[request_id]
        self._forget_if_idle()
        if self._flying and self._flying[0].undecided:
            self._choose(self._flying[0])
        return list(touched.values())

    def _forget_if_idle(self) -> None:
        """What is in flight for nobody is not waited for."""
        if not self._streams:
            self._flying.clear()

    def abort(self, request_id: str) -> None:
        """End a request now; its pages go back. Unknown or finished requests are ignored."""
        with self._lock:
            if self._requests.pop(request_id, None) is None:
                return
            for stream in list(self._streams.values()):
                if stream.sequence.request_id == request_id:
                    self._retire(stream)
            self._forget_if_idle()

    def _append(self, stream: _Stream, place: int, token: SampledToken) -> None:
        sequence, output, params = stream.sequence, stream.output, stream.sequence.params
        if sequence.index == 0:
            request = self._requests[sequence.request_id]
            request.output.num_cached_tokens = sequence.num_cached or 0
        if token.error is not None:
            self._requests[sequence.request_id].output.error = token.error
            self._finish(stream, "error", None)
            # Whatever went wrong may lie in its cached state: nobody shall go on from there.
            self.scheduler.reset_prefix_cache()
            return
        sequence.token_ids[place] = token.token_id
        output.token_ids.append(token.token_id)
        if output.logprobs is not None and token.logprobs is not None:
            output.logprobs.append(
                {
                    i: Logprob(entry.logprob, entry.rank, self._token_text(i))
                    for i, entry in token.logprobs.items()
                }
            )
        if token.token_id in params.stop_token_ids:
            self._finish(stream, "stop", token.token_id)
            return
        if token.token_id in self.model_config.eos_token_ids and not params.ignore_eos:
            self._finish(stream, "stop", None)
            return
        if stream.detokenizer is not None:
            text = stream.detokenizer.feed((token.token_id,))
            output.text += text if stream.stop_after is not None else stream.stop.feed(text)
            if token.token_id == stream.stop_after:
                stream.stop_after = None
            if stream.stop.matched is not None:
                self._finish(stream, "stop", stream.stop.matched)
                return
        if place + 1 >= sequence.max_len:
            self._finish(stream, "length", None)

    def _token_text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def _finish(self, stream: _Stream, reason: FinishReason, stop: str | int | None) -> None:
        if stream.detokenizer is not None and stream.stop.matched is None:
            stream.output.text += stream.stop.flush() + stream.detokenizer.finish()
        stream.output.finish_reason = reason
        stream.output.stop_reason = stop
        self._requests[stream.sequence.request_id].unfinished -= 1
        self._retire(stream)

    def _retire(self, stream: _Stream) -> None:
        stream.ended = True
        while stream.sequence.token_ids[-1] == PENDING:
            stream.sequence.token_ids.pop()
        self.scheduler.finish(stream.sequence)
        self.sampler.remove(stream.sequence.key)
        del self._streams[stream.sequence.key]

    def reset_prefix_cache(self) -> None:
        """Forget what was read: no later request goes on from it."""
        with self._lock:
            self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that nothing is lost: pages, blocks and who holds them, requests."""
        self.scheduler.check_integrity()
        assert self._streams or not self._flying
        assert len(self._streams) == len(self.scheduler.running) + self.scheduler.num_waiting
