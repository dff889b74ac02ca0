"""The server's side of the pipe to the engine, on one asyncio loop."""

import asyncio
import itertools
import logging
import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.errors import EngineDeadError, QueueFullError, RequestError
from finwhale.server.errors import StoppingError
from finwhale.server.link import wire
from finwhale.server.link.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

MAX_TURNS = 1 << 48  # more sequences than a server can ever start
MAX_TURNS_KEPT = 4096
CLOSE_S = 5.0


class Generation:
    """One or more prompts on the engine. Iterate over it for the deltas; `cancel` ends it.

    Continuations are numbered over all prompts: those of prompt p begin at p * n.
    """

    def __init__(self, client: "EngineClient", request_ids: list[str], n: int) -> None:
        self._client = client
        self._request_ids = request_ids
        self._events: asyncio.Queue[wire.Accepted | wire.Delta | Exception] = asyncio.Queue()
        self._put = self._events.put_nowait
        self._early: deque[wire.Delta] = deque()
        self._first = {request_id: i * n for i, request_id in enumerate(request_ids)}
        self._unfinished = dict.fromkeys(request_ids, n)

    async def accepted(self) -> None:
        """Waits until the engine has accepted every prompt.

        Raises:
            RequestError: the engine refuses a prompt.
            EngineDeadError: the engine has died.
            TimeoutError: `expire` was called.
        """
        waiting = len(self._request_ids)
        while waiting:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, wire.Delta):  # of a prompt that was accepted earlier
                self._early.append(event)
            else:
                waiting -= 1

    async def __aiter__(self) -> AsyncIterator[wire.Delta]:
        while any(self._unfinished.values()):
            event = self._early.popleft() if self._early else await self._events.get()
            if isinstance(event, Exception):
                raise event
            assert isinstance(event, wire.Delta)
            self._unfinished[event.request_id] -= event.finish_reason is not None
            event.index += self._first[event.request_id]
            yield event

    def cancel(self) -> None:
        """Ends all prompts that still run. The engine frees their pages before the next step."""
        for request_id in self._request_ids:
            self._client._forget(request_id, abort=True)

    def expire(self) -> None:
        """Makes the iteration raise TimeoutError."""
        self._put(TimeoutError())


@dataclass(slots=True)
class _Live:
    """A request on the engine, the number of its continuations that still run, and its turn."""

    generation: Generation
    num_sequences: int
    turn: int


def _run_engine(*args: object) -> None:
    """The engine's process. Only there, the worker and torch are imported."""
    import_module("finwhale.server.link.worker").main(*args)


class EngineClient:
    """Talks to one engine, which runs in its own process or in a thread.

    Attributes:
        ready: the engine's message that its model is loaded; None before.
        failure: why the engine has died; None while it lives.
        metrics: the engine's latest metrics; None before the first ones.
        num_sequences: number of sequences on the engine, waiting or running.
        heartbeat: the signs of life of the engine's process; None: the engine is a thread.
        on_step: receives what each step has added.
        on_compiled: receives the seconds in which a grammar was compiled.
    """

    def __init__(
        self,
        connection: Connection,
        process: BaseProcess | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """`connection`: the server's end of the pipe; `process` is at the other end."""
        self.heartbeat = heartbeat
        self.ready: wire.Ready | None = None
        self.failure: str | None = None
        self.metrics: EngineMetrics | None = None
        self.on_step: Callable[[Sequence[wire.Delta]], None] = lambda deltas: None
        self.on_compiled: Callable[[float], None] = lambda seconds: None
        self.on_failure: Callable[[], None] | None = None
        self._connection = connection
        self._process = process
        self._threads = [
            threading.Thread(target=target, name=f"engine{target.__name__}", daemon=True)
            for target in (self._read, self._write)
        ]
        self._commands: queue.SimpleQueue[wire.Command] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._live: dict[str, _Live] = {}
        self._turns: dict[tuple[str, int], int] = {}
        self._last_turn = 0  # the last one of which a sequence has started
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = asyncio.Event()
        self._closing = False
        self.num_sequences = 0

    @classmethod
    def spawn(cls, load: Callable[..., object]) -> "EngineClient":
        """Starts a process that calls `load(open_engine, progress)`; see
        `server/loading.py`. `load` must be picklable."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        heartbeat = Heartbeat(context)
        process = context.Process(
            target=_run_engine, args=(theirs, load, heartbeat), name="finwhale-engine", daemon=True
        )
        process.start()
        theirs.close()
        return cls(ours, process, heartbeat)

    @property
    def alive(self) -> bool:
        return self.ready is not None and self.failure is None and not self._closing

    @property
    def engine_pid(self) -> int | None:
        """The id of the engine's process; None: the engine is a thread of this one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> wire.Ready:
        """Waits until the model is loaded. Raises EngineDeadError: it could not be loaded."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()
        await self._settled.wait()
        if self.ready is None:
            raise EngineDeadError(self.failure or "the engine did not start")
        return self.ready

    def submit(self, prompts: Sequence[Sequence[int]], request: wire.Add) -> Generation:
        """Sends prompts to the engine; `Generation.accepted` says whether it accepts them.

        Args:
            request: what the prompts have in common; its id and its prompt do not count. Its user's
                sequences and grammars take turns with those of other users.

        Raises:
            EngineDeadError: the engine is not ready or has died.
        """
        self._check_alive()
        request_ids = [f"r{next(self._ids)}" for _ in prompts]
        n = request.params.n
        generation = Generation(self, request_ids, n)
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            turn = self._turn(request.user, request.priority, n)
            self._live[request_id] = _Live(generation, n, turn)
            self.num_sequences += n
            order = request.priority * MAX_TURNS + turn
            self._commands.put(
                replace(request, request_id=request_id, prompt_token_ids=prompt, priority=order)
            )
        return generation

    def _turn(self, user: str, priority: int, num_sequences: int) -> int:
        """The place of a request among those of one priority: its users take turns, a sequence
        each (start-time fair queueing; Goyal, Vin and Cheng, 1996)."""
        if len(self._turns) > MAX_TURNS_KEPT:  # without the turns that are over
            self._turns = {k: turn for k, turn in self._turns.items() if turn > self._last_turn}
        # A newcomer comes before the other continuations of a request that has started.
        turn = max(self._last_turn - 1, self._turns.get((user, priority), 0))
        self._turns[user, priority] = turn + num_sequences
        return turn

    async def call(self, work: Callable[[Any], Any]) -> Any:
        """Calls a method of RolloutControl in the engine's process.

        Raises:
            FinwhaleError: what the method raises.
            RuntimeError: the method failed unexpectedly.
            EngineDeadError: the engine is not ready or has died.
        """
        self._check_alive()
        call_id = f"c{next(self._ids)}"
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._commands.put(wire.Call(call_id, work))
        try:
            return await self._calls[call_id]
        except asyncio.CancelledError:
            self._commands.put(wire.Cancel(call_id))
            raise
        finally:
            self._calls.pop(call_id, None)

    def _check_alive(self) -> None:
        if self._closing:
            raise StoppingError("the server is stopping")
        if not self.alive:
            raise EngineDeadError(self.failure or "the engine is not ready")

    def cut_off(self) -> int:
        """Ends all requests with a StoppingError. Returns the number of their sequences."""
        count = self.num_sequences
        if self.failure is None:
            for request_id in self._live:
                self._commands.put(wire.Abort(request_id))
        self._fail_all(StoppingError("the server is stopping, and has cut off this request"))
        return count

    async def close(self) -> None:
        """Ends the engine's process; kills it after CLOSE_S. Requests that still run fail."""
        self._closing = True
        self.cut_off()
        self._commands.put(wire.Stop())
        process = self._process
        if process is not None:
            if self.ready is None and self.failure is None:
                self.kill()  # it does not read Stop while it loads the model
            await asyncio.to_thread(process.join, CLOSE_S)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join)
        # The engine closes its end of the pipe when it has stopped; that ends these threads.
        for thread in self._threads:
            if thread.is_alive():
                await asyncio.to_thread(thread.join, CLOSE_S)
        self._connection.close()

    def kill(self) -> None:
        """Kills the engine's process, so that `close` does not wait for it."""
        if self._process is not None:
            self._process.kill()

    def _write(self) -> None:
        """The writer's thread: a full pipe must not block the loop."""
        while True:
            command = self._commands.get()
            try:
                self._connection.send(command)
            except OSError:  # the reader reports it
                return
            if isinstance(command, wire.Stop):
                return

    def _forget(self, request_id: str, *, abort: bool) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self.num_sequences -= live.num_sequences
        if abort and self.failure is None:
            self._commands.put(wire.Abort(request_id))

    def _read(self) -> None:
        """The reader's thread: each report wakes the loop once."""
        assert self._loop is not None
        report: wire.Report
        while True:
            try:
                report = self._connection.recv()
            except (EOFError, OSError):
                report = wire.EngineFailed(self._cause_of_death())
            try:
                self._loop.call_soon_threadsafe(self._take, report)
            except RuntimeError:  # the loop is closed
                return
            if isinstance(report, wire.EngineFailed):
                return

    def _cause_of_death(self) -> str:
        if self._process is None:
            return "the engine has ended"
        self._process.join(1)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"the engine's process was killed by signal {-code}"
        return f"the engine's process has ended with exit code {code}"

    def _take(self, report: wire.Report) -> None:
        if isinstance(report, wire.Step):
            if report.metrics is not None:
                self.metrics = report.metrics
            for delta in report.deltas:
                self._deliver(delta)
            self.on_step(report.deltas)
        elif isinstance(report, wire.Accepted):
            if report.compile_seconds is not None:
                self.on_compiled(report.compile_seconds)
            if report.request_id in self._live:
                self._live[report.request_id].generation._put(report)
        elif isinstance(report, wire.Refused):
            if report.request_id in self._live:
                kind = QueueFullError if report.full else RequestError
                self._live[report.request_id].generation._put(kind(report.message))
                self._forget(report.request_id, abort=False)
        elif isinstance(report, wire.Answered):
            call = self._calls.get(report.call_id)
            if call is None or call.done():  # nobody waits for it any more
                return
            if report.error is None:
                call.set_result(report.value)
            else:
                call.set_exception(report.error)
        elif isinstance(report, wire.Ready):
            self.ready = report
            self._settled.set()
        else:
            self._die(report.message)

    def _deliver(self, delta: wire.Delta) -> None:
        live = self._live.get(delta.request_id)
        if live is None:
            return
        self._last_turn = max(self._last_turn, live.turn)
        live.generation._put(delta)
        if delta.finish_reason is not None:
            self.num_sequences -= 1
            live.num_sequences -= 1
            if not live.num_sequences:
                self._forget(delta.request_id, abort=False)

    def _die(self, message: str) -> None:
        if self._closing or self.failure is not None:
            return
        self.failure = message
        logger.error("engine died", extra={"reason": message})
        self._fail_all(EngineDeadError(message))
        self._settled.set()
        if self.on_failure is not None:
            self.on_failure()

    def _fail_all(self, error: Exception) -> None:
        for generation in {id(live): live.generation for live in self._live.values()}.values():
            generation._put(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._live.clear()
        self.num_sequences = 0
