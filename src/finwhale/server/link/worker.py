"""The engine's process: takes commands from a pipe, runs steps, and reports their results."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from finwhale.chat.grammar import Matcher
from finwhale.collection import freeze_heap
from finwhale.distributed.workers import end_process
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.engine.ranks.ranks import Ranks
from finwhale.engine.start.start_times import whole_start
from finwhale.errors import EngineDeadError, FinwhaleError, QueueFullError, RequestError
from finwhale.loaded_model import open_engine
from finwhale.request import CompletionOutput, Logprob, RequestOutput
from finwhale.server.link import wire
from finwhale.server.link.grammar_compiler import GrammarCompiler
from finwhale.server.link.heartbeat import Heartbeat
from finwhale.server.link.rollout_control import RolloutControl

logger = logging.getLogger(__name__)

METRICS_INTERVAL_S = 0.25
CHECK_INTERVAL_S = 0.5  # interval at which an idle engine checks its ranks


def main(connection: Connection, load: Callable[..., Engine], heartbeat: Heartbeat) -> None:
    """Loads the model and serves until `Stop`, or until the server closes the pipe."""
    # The server decides when this process ends. A terminal's Ctrl-C reaches both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    began = time.monotonic()
    heartbeat.start()
    try:
        engine = load(open_engine, heartbeat.load)
    except FinwhaleError as error:
        connection.send(wire.EngineFailed(str(error)))
        return
    phases = whole_start(engine.start_seconds, began)
    freeze_heap()
    EngineLoop(engine, connection, phases, heartbeat).run()


class EngineLoop:
    """Runs one engine for one pipe."""

    def __init__(
        self,
        engine: Engine,
        connection: Connection,
        phases: Mapping[str, float] | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        # Each step runs in this context, which records the begin and the end of the step.
        self._in_step = nullcontext if heartbeat is None else heartbeat.step
        self._engine = engine
        self._phases = phases or {}
        self._connection = connection
        self._sending = threading.Lock()  # the thread of the rollout calls sends, too
        self._rollouts = RolloutControl(engine, self._send_unless_closed)
        if isinstance(engine.executor, Ranks):
            engine.executor.workers.on_stuck = self._end_stuck
        tokenizer = engine.tokenizer
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer)
        self._sent: dict[str, list[_Sent]] = {}
        # Requests whose clients follow the prefill, with the last number that each was sent.
        self._reading: dict[str, int] = {}
        self._flushing: list[RequestOutput] = []  # ended requests that the prefix store saves
        self._metrics_due = 0.0
        self._last_metrics: EngineMetrics | None = None

    def run(self) -> None:
        """Serves until `Stop`, or until the other end is closed; then aborts all requests.

        An exception of the engine is reported as `EngineFailed` and raised again.
        """
        config, rank = self._engine.model_config, self._engine.executor.description
        stored = self._engine.lanes[0].scheduler.admission.stored
        try:
            self._send(
                wire.Ready(
                    max_model_len=self._engine.max_model_len,
                    max_num_seqs=self._engine.max_num_seqs,
                    max_num_batched_tokens=self._engine.sizes.num_tokens,
                    vocab_size=config.vocab_size,
                    bos_token_id=config.bos_token_id,
                    ranks=f"{rank.num_ranks} rank{'s' * (rank.num_ranks > 1)}, {rank.device}",
                    unused_draft_head=self._engine.unused_draft_head,
                    tool_grammar=self._engine.config.tool_grammar == "auto",
                    prefix_store=None if stored is None else stored.name,
                    phases=self._phases,
                )
            )
            while self._take_commands():
                self._step()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logger.info("the server has closed the pipe")
        except Exception as error:
            known = isinstance(error, EngineDeadError)
            message = str(error) if known else f"{type(error).__name__}: {error}"
            self._send_unless_closed(wire.EngineFailed(message))
            raise
        finally:
            self._rollouts.close()
            for request_id in list(self._sent):
                self._engine.abort(request_id)
            if self._grammars is not None:
                self._grammars.close()
            self._connection.close()

    def _end_stuck(self, cause: str) -> None:
        """End this process, whose device waits for a rank that is gone."""
        self._send_unless_closed(wire.EngineFailed(cause))
        end_process(cause)

    def _take_commands(self) -> bool:
        """Carries out the commands that have arrived. Waits a little if there is no other work."""
        timeout = 0.0 if self._engine.has_work else CHECK_INTERVAL_S
        if timeout and self._metrics_due and self._last_metrics != self._engine.metrics():
            timeout = METRICS_INTERVAL_S  # the last change has not been sent yet
        if self._grammars is not None and self._grammars.busy:
            if timeout:
                wait([self._connection, self._grammars.done], timeout)
                timeout = 0.0
            for compiled in self._grammars.take():
                self._add(*compiled)
        while self._connection.poll(timeout):
            command: wire.Command = self._connection.recv()
            if isinstance(command, wire.Stop):
                return False
            self._carry_out(command)
            timeout = 0.0
        return True

    def _carry_out(self, command: wire.Add | wire.Abort | wire.Call | wire.Cancel) -> None:
        if isinstance(command, wire.Call):
            self._rollouts.submit(command)
        elif isinstance(command, wire.Cancel):
            self._rollouts.cancel(command.call_id)
        elif isinstance(command, wire.Abort):
            if self._grammars is not None:
                self._grammars.drop(command.request_id)
            self._engine.abort(command.request_id)
            self._sent.pop(command.request_id, None)
            self._reading.pop(command.request_id, None)
        elif self._grammars is not None and command.params.guide is not None:
            self._grammars.submit(command)
        else:
            self._add(command)

    def _add(
        self,
        command: wire.Add,
        matcher: Matcher | BaseException | None = None,
        compile_seconds: float | None = None,
    ) -> None:
        """Starts a request, unless the engine refuses it or its grammar could not be compiled."""
        try:
            if isinstance(matcher, BaseException):
                raise matcher
            request = self._engine.add_request(
                command.request_id,
                command.prompt_token_ids,
                command.params,
                stop_after=command.stop_after,
                priority=command.priority,
                matcher=matcher,
                prefix_owner=command.prefix_owner,
                filter=command.filter,
                saves_first=command.saves_first,
            )
        except (RequestError, QueueFullError) as error:
            full = isinstance(error, QueueFullError)
            self._send(wire.Refused(command.request_id, str(error), full))
            return
        self._sent[command.request_id] = [_Sent(output) for output in request.outputs]
        if command.progress:
            self._reading[command.request_id] = 0
        self._send(wire.Accepted(command.request_id, compile_seconds))

    def _step(self) -> None:
        self._engine.check()
        touched: list[RequestOutput] = []
        if self._engine.has_work:
            with self._in_step():
                touched = self._engine.step()
        with self._engine.lock:
            ready = self._flushed(touched)
            deltas = self._progress()
            deltas += [delta for request in ready for delta in self._deltas(request)]
        metrics = self._due_metrics()
        if deltas or metrics is not None:
            self._send(wire.Step(deltas, metrics))

    def _flushed(self, touched: list[RequestOutput]) -> list[RequestOutput]:
        """Return the requests whose answers can be sent now: the changed ones, and those that the
        prefix store has delayed until now.
        """
        ready: list[RequestOutput] = []
        touched, self._flushing = self._flushing + touched, []
        for one in touched:
            waits = one.finished and self._engine.is_flushing(one.request_id)
            (self._flushing if waits else ready).append(one)
        return ready

    def _progress(self) -> list[wire.Delta]:
        """How far the prompts are read whose requests want to know it."""
        deltas = []
        for request_id, told in list(self._reading.items()):
            found = self._engine.prompt_progress(request_id)
            if found is not None and found.processed > told:
                self._reading[request_id] = found.processed
                deltas.append(wire.Delta(request_id, 0, [], "", progress=found))
        return deltas

    def _deltas(self, request: RequestOutput) -> list[wire.Delta]:
        sent = self._sent.get(request.request_id)
        if sent is None:
            return []
        if request.outputs[0].token_ids or request.finished:
            self._reading.pop(request.request_id, None)
        if request.finished:
            del self._sent[request.request_id]
        deltas = [one.delta(request) for one in sent]
        return [delta for delta in deltas if delta is not None]

    def _due_metrics(self) -> EngineMetrics | None:
        now = time.monotonic()
        if now < self._metrics_due:
            return None
        self._metrics_due = now + METRICS_INTERVAL_S
        metrics = self._engine.metrics()
        if metrics == self._last_metrics:
            return None
        self._last_metrics = metrics
        return metrics

    def _send(self, report: wire.Report) -> None:
        with self._sending:
            self._connection.send(report)

    def _send_unless_closed(self, report: wire.Report) -> None:
        with contextlib.suppress(OSError):
            self._send(report)


@dataclass(slots=True)
class _Sent:
    """How much of one continuation has been sent: numbers of tokens and characters."""

    output: CompletionOutput
    tokens: int = 0
    text: int = 0
    done: bool = False

    def delta(self, request: RequestOutput) -> wire.Delta | None:
        """The output since the last call; None if there is none."""
        output = self.output
        if self.done or (len(output.token_ids) == self.tokens and output.finish_reason is None):
            return None
        milestone = None
        if not self.tokens or output.finish_reason is not None:
            of_prompt = not self.tokens and not output.index
            milestone = wire.Milestone(
                request.num_cached_tokens,
                request.times,
                _columns(request.prompt_logprobs) if of_prompt else None,
                request.prompt_routed_experts if of_prompt else None,
                output.routed_experts,
            )
        ids, text = output.token_ids[self.tokens :], output.text[self.text :]
        logprobs = _columns(output.logprobs and output.logprobs[self.tokens :])
        reasons = output.finish_reason, output.stop_reason, request.error
        delta = wire.Delta(
            request.request_id, output.index, ids, text, logprobs, *reasons, milestone
        )
        self.tokens, self.text = len(output.token_ids), len(output.text)
        self.done = output.finish_reason is not None
        return delta


def _columns(tables: Sequence[Mapping[int, Logprob] | None] | None) -> wire.LogprobColumns | None:
    return None if tables is None else wire.LogprobColumns.of(tables)
