"""The unfinished requests: appends tokens to their outputs, and ends them."""

import time
from collections.abc import Iterable, Mapping, Sequence

from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.stop_strings import StopChecker
from finwhale.chat.tokenizer import Tokenizer
from finwhale.engine.loop.in_flight import InFlightStep, Request, TextStream
from finwhale.engine.loop.metrics import Clock, Meter
from finwhale.engine.loop.results import (
    NOT_FINITE,
    NewToken,
    SampledToken,
    TokenLogprob,
    row_logprobs,
)
from finwhale.engine.loop.routed_experts import ExpertRecord
from finwhale.engine.plan.executor import RoutedExpertsForm
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_plan import PENDING
from finwhale.request import (
    CompletionOutput,
    ExpertIds,
    FinishReason,
    Logprob,
    PromptProgress,
    RequestOutput,
    RequestTimes,
)


class Outputs:
    """The requests of one engine that have not ended.

    Args:
        routed_form: the form of routed experts; None: the engine returns none.

    Attributes:
        requests: by the request's id.
        streams: the text of each sequence, by the sequence's key.
        touched: requests that changed outside of a step; the next step returns them.
        work: of all requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        meter: Meter,
        tokenizer: Tokenizer | None,
        routed_form: RoutedExpertsForm | None,
    ) -> None:
        self._scheduler, self._meter = scheduler, meter
        self._tokenizer, self._routed_form = tokenizer, routed_form
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, TextStream] = {}
        self.touched: list[RequestOutput] = []
        self.work = 0

    def add(
        self,
        output: RequestOutput,
        sequences: Iterable[SequenceState],
        ends: frozenset[int],
        stop_after: int | None,
        work: int = 0,
    ) -> None:
        """Add a request with its continuations. TextStream has `ends` and `stop_after`."""
        assert output.request_id not in self.requests, "two requests have the same id"
        request, began = Request(output, work), time.monotonic()
        self.work += work
        self.requests[output.request_id] = request  # first, so that `abort` finds a part of it, too
        for sequence in sequences:
            request.unfinished += 1
            request.first = request.first or sequence
            params, form = sequence.params, self._routed_form
            detokenizer = stop = None
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, params.skip_special_tokens)
            if params.stop:
                stop = StopChecker(tuple(params.stop), keep=params.include_stop_str_in_output)
            if params.prompt_logprobs is not None and not sequence.index:
                output.prompt_logprobs = [None] * sequence.num_prompt
                if sequence.num_prompt > 1:  # the first token has no log-probability
                    sequence.prompt_logprobs = params.prompt_logprobs
            text = CompletionOutput(
                sequence.index, logprobs=None if params.logprobs is None else []
            )
            output.outputs.append(text)
            after, clock = stop_after if params.stop else None, Clock(began)
            stream = TextStream(sequence, request, text, ends, detokenizer, stop, after, clock)
            self.streams[sequence.key] = stream
            if params.return_routed_experts and form is not None:
                # The first continuation also has the experts of the prompt.
                stream.routed = ExpertRecord(sequence.num_prompt if sequence.index else 0, form)
                sequence.num_routed = stream.routed.end
            self._scheduler.add(sequence)
        self._meter.requests += 1

    def prompt_progress(self, request_id: str) -> PromptProgress | None:
        """How far a request's prompt is read; None: its prefill has not begun."""
        sequence = self.requests[request_id].first
        if sequence is None or sequence.num_cached is None:
            return None
        # A sequence may compute some cached tokens again.
        processed = min(max(sequence.num_computed, sequence.num_cached), sequence.num_prompt)
        seconds = time.monotonic() - sequence.admitted
        return PromptProgress(sequence.num_prompt, sequence.num_cached, processed, seconds)

    def take_touched(self) -> list[RequestOutput]:
        touched, self.touched = self.touched, []
        return touched

    def record(self, step: InFlightStep, tokens: Iterable[NewToken]) -> list[RequestOutput]:
        """Record the result of a step; returns the requests that changed."""
        touched = list(step.rows.outputs)
        if step.scores:
            touched += self._record_scores(step)
        if step.routed is not None:
            self._record_routed(step.planned, step.routed)
        for stream, index, token in tokens:
            if not stream.ended:
                self._append(stream, index, token)
        return touched

    def _record_scores(self, step: InFlightStep) -> list[RequestOutput]:
        """Store the log-probabilities of prompt tokens; returns the requests that failed."""
        failed = []
        for found in step.scores:
            chunk = step.planned[found.chunk]
            sequence, stream = chunk.sequence, self._stream_of(chunk)
            if stream is None:
                continue  # the request has ended
            output = stream.request.output
            assert output.prompt_logprobs is not None
            if not found.valid:
                self._fail(stream, NOT_FINITE)
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
        begin = 0
        for chunk in chunks:
            end = begin + chunk.end - chunk.start
            stream = self._stream_of(chunk)
            if stream is not None and stream.routed is not None:
                stream.routed.add(chunk, ids[begin:end])
                chunk.sequence.num_routed = stream.routed.end
            begin = end

    def _stream_of(self, chunk: Chunk) -> TextStream | None:
        """The stream of a chunk's sequence; None: the sequence has ended."""
        stream = self.streams.get(chunk.sequence.key)
        return stream if stream is not None and stream.sequence is chunk.sequence else None

    def _append(self, stream: TextStream, index: int, token: SampledToken) -> None:
        sequence, output, token_id = stream.sequence, stream.output, token.token_id
        if not output.token_ids and sequence.index == 0:
            self._record_first(stream)
        if token.error is not None:
            self._fail(stream, token.error, keeps_cache=token.of_grammar)
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
        elif stream.detokenizer is not None and stream.add_token(stream.detokenizer, token_id):
            assert stream.stop is not None
            self._finish(stream, "stop", stream.stop.matched)
        elif index + 1 >= sequence.max_len:
            self._finish(stream, "length")

    def _record_first(self, stream: TextStream) -> None:
        """Record what a request knows with the first token of its first continuation."""
        clock, sequence, output = stream.clock, stream.sequence, stream.request.output
        output.num_cached_tokens = sequence.num_cached or 0
        if stream.routed is not None:
            output.prompt_routed_experts = stream.routed.of(0, sequence.num_prompt)
        if clock.first:
            output.times = RequestTimes(clock.began, sequence.admitted, clock.first, clock.last)

    def _with_texts(self, table: Mapping[int, TokenLogprob]) -> dict[int, Logprob]:
        text = (lambda _: "") if self._tokenizer is None else self._tokenizer.token_text
        return {i: Logprob(entry.logprob, entry.rank, text(i)) for i, entry in table.items()}

    def abort(self, request_id: str) -> bool:
        """End a request now and free its pages; returns whether it was unfinished."""
        if request_id not in self.requests:
            return False
        self._remove(request_id)
        for stream in list(self.streams.values()):
            if stream.sequence.request_id == request_id:
                self._retire(stream, "abort")
        return True

    def finish_all(self) -> None:
        """End all requests with their tokens so far and the finish reason "abort"."""
        for stream in list(self.streams.values()):
            self.touched.append(stream.request.output)
            self._finish(stream, "abort")

    def fail_all(self, message: str) -> None:
        """End all requests with an error, regardless of the engine's other state."""
        for stream in self.streams.values():
            stream.ended = True
            stream.output.finish_reason = "error"
            self._meter.endings["error"] += 1
        for request in self.requests.values():
            request.output.error = message
            request.output.finished = True
        self.streams.clear()
        self.requests.clear()

    def _fail(self, stream: TextStream, error: str, *, keeps_cache: bool = False) -> None:
        stream.request.output.error = error
        self._finish(stream, "error")
        if not keeps_cache:
            # The error may come from cached state, so no later request may reuse that state.
            self._scheduler.reset_prefix_cache()

    def _finish(
        self, stream: TextStream, reason: FinishReason, stop: str | int | None = None
    ) -> None:
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
            self._remove(stream.sequence.request_id)
        self._retire(stream, reason)

    def _remove(self, request_id: str) -> None:
        self.work -= self.requests.pop(request_id).work

    def _retire(self, stream: TextStream, how: FinishReason) -> None:
        stream.ended = True
        self._meter.record_end(how, stream.clock, len(stream.output.token_ids))
        times = stream.request.output.times
        if times is not None:
            times.last_token = max(times.last_token, stream.clock.last)
        while stream.sequence.token_ids[-1] == PENDING:
            stream.sequence.token_ids.pop()
        self._scheduler.finish(stream.sequence)
        del self.streams[stream.sequence.key]
