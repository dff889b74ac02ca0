"""Generation from coroutines: the AsyncLLM class, and the thread that steps its engine."""

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from finwhale.engine.loop.engine import Engine
from finwhale.errors import FinwhaleError, RequestError
from finwhale.llm import LLM
from finwhale.loaded_model import LoadedModel, PreparedPrompt, add_job
from finwhale.prompts import Messages, Prompt, plain_prompt
from finwhale.request import CompletionOutput, RequestOutput, SamplingParams

P = ParamSpec("P")
T = TypeVar("T")

# Time limit for the thread's current step when the thread ends: a device may never finish.
STOP_S = 30.0


def _in_thread(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The coroutine that runs a method of LLM in a thread."""

    @wraps(method)
    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    return run


class AsyncLLM(LoadedModel):
    """A model and an engine in this process, for coroutines. A separate thread steps the engine.

    The arguments and results are those of `LLM`. Loading blocks the caller. Any number of
    coroutines may call the methods at once, also from several event loops. Cancelling a coroutine
    aborts its requests: the engine frees their pages before its next step. If the engine fails,
    every coroutine that waits for it raises EngineDeadError. A change of weights or memory blocks
    a thread, which also consumes an iterable of new weights.

    Use it with `async with`, or call `aclose` at the end. Garbage collection ends the thread and
    frees the memory, too.
    """

    def _on_open(self) -> None:
        self._stepper = _Stepper(self._engine)
        self._stop = weakref.finalize(self, self._stepper.stop)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt, as `LLM.generate` does."""
        return await self._run(self._prepared(prompts, sampling_params))

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[RequestOutput]:
        """Answers each conversation, as `LLM.chat` does."""
        return await self._run(self._prepared_chats(messages, sampling_params, thinking, tools))

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Continues one prompt. Yields its result, always the same object, after new tokens.

        The object changes only when the caller asks for the next value. The engine does not wait
        for a slow caller, who then gets several tokens at once. Closing the iterator aborts the
        request.

        Raises:
            RequestError: the prompt cannot be served.
        """
        plain = plain_prompt(prompt)
        job = await asyncio.to_thread(self._job, plain, sampling_params or SamplingParams())
        request = _Request(self._new_id(), job, streams=True)
        result: RequestOutput | None = None
        try:
            self._stepper.begin(request)
            while result is None or not result.finished:
                for part in await request.take():
                    result = part if result is None else _extended(result, part)
                assert result is not None
                yield result
        finally:
            self._stepper.abort(request)

    update_weights = _in_thread(LLM.update_weights)
    init_weights_update_group = _in_thread(LLM.init_weights_update_group)
    destroy_weights_update_group = _in_thread(LLM.destroy_weights_update_group)
    pause = _in_thread(LLM.pause)
    resume = _in_thread(LLM.resume)
    sleep = _in_thread(LLM.sleep)
    wake = _in_thread(LLM.wake)

    async def aclose(self) -> None:
        """Ends the thread and frees the memory, whatever still refers to this object.

        Running requests and later ones raise FinwhaleError; closing again does nothing.
        """
        await asyncio.to_thread(self._stop)
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self, jobs: Iterator[PreparedPrompt | RequestOutput]) -> list[RequestOutput]:
        """Runs the requests to their ends. An exception or a cancellation aborts all of them."""
        # Tokenising and compiling grammars take time, which other coroutines can use.
        begun = [
            job if isinstance(job, RequestOutput) else _Request(self._new_id(), job, streams=False)
            for job in await asyncio.to_thread(list, jobs)
        ]
        requests = [one for one in begun if isinstance(one, _Request)]
        try:
            for request in requests:
                self._stepper.begin(request)
            return [
                one if isinstance(one, RequestOutput) else await self._end(one) for one in begun
            ]
        finally:
            for request in requests:
                self._stepper.abort(request)

    async def _end(self, request: "_Request") -> RequestOutput:
        try:
            (result,) = await request.take()
        except RequestError as error:
            return self._refused(error, request.job)
        if request.job.answer_to is not None:
            await asyncio.to_thread(self._parse_answer, request.job, result)
        return result


class _Request:
    """The coroutine's side of a request. Every method runs on the coroutine's event loop.

    Attributes:
        streams: each update has the new tokens since the last one; otherwise the only update is the
            finished result.
        done: whether the last update has arrived.
    """

    def __init__(self, request_id: str, job: PreparedPrompt, *, streams: bool) -> None:
        self.request_id = request_id
        self.job = job
        self.streams = streams
        self.loop = asyncio.get_running_loop()
        self.done = False
        self._updates: list[RequestOutput | Exception] = []
        self._changed = asyncio.Event()

    def put(self, update: RequestOutput | Exception) -> None:
        self.done = isinstance(update, Exception) or update.finished
        self._updates.append(update)
        self._changed.set()

    async def take(self) -> list[RequestOutput]:
        """Waits for updates, and removes them. Raises the request's error."""
        await self._changed.wait()
        self._changed.clear()
        updates, self._updates = self._updates, []
        taken = []
        for update in updates:
            if isinstance(update, Exception):
                raise update
            taken.append(update)
        return taken


class _Running:
    """The stepping thread's side of a request."""

    def __init__(self, request: _Request, result: RequestOutput) -> None:
        self.request = request
        self._result = result
        self._sent = [(0, 0)] * len(result.outputs)  # tokens and characters of each continuation

    def update(self) -> RequestOutput | None:
        """Make the update for the coroutine after a step; None: nothing is new.

        The engine changes the result of a running request, so an update shares nothing with it that
        changes.
        """
        result = self._result
        if not self.request.streams:
            return result if result.finished else None
        now = [(len(output.token_ids), len(output.text)) for output in result.outputs]
        if now == self._sent and not result.finished:
            return None
        before, self._sent = self._sent, now
        parts = [_tail(*each) for each in zip(result.outputs, before, strict=True)]
        times, logprobs = result.times, result.prompt_logprobs
        return replace(
            result,
            outputs=parts,
            times=None if times is None else replace(times),
            prompt_logprobs=None if logprobs is None else list(logprobs),
        )


def _tail(output: CompletionOutput, sent: tuple[int, int]) -> CompletionOutput:
    tokens, characters = sent
    logprobs = None if output.logprobs is None else output.logprobs[tokens:]
    text, token_ids = output.text[characters:], output.token_ids[tokens:]
    return replace(output, text=text, token_ids=token_ids, logprobs=logprobs)


def _extended(result: RequestOutput, part: RequestOutput) -> RequestOutput:
    """Adds an update to the coroutine's result; returns the result."""
    for output, more in zip(result.outputs, part.outputs, strict=True):
        output.text += more.text
        output.token_ids += more.token_ids
        if output.logprobs is not None:
            output.logprobs += more.logprobs or []
        output.finish_reason, output.stop_reason = more.finish_reason, more.stop_reason
        output.routed_experts = more.routed_experts
    result.finished, result.error = part.finished, part.error
    result.num_cached_tokens = part.num_cached_tokens
    result.prompt_logprobs, result.times = part.prompt_logprobs, part.times
    result.prompt_routed_experts = part.prompt_routed_experts
    return result


class _Stepper:
    """Steps an engine in a thread while it has requests.

    A step holds the engine's lock, so only this thread calls the engine. Other threads put commands
    into a queue, which this thread empties before each step.
    """

    def __init__(self, engine: Engine) -> None:
        self._commands: queue.SimpleQueue[tuple[_Request, bool] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        # Do not store the engine: a finaliser refers to this object and must not keep it alive.
        self._thread = threading.Thread(
            target=self._run, args=(engine,), name="finwhale-steps", daemon=True
        )
        self._thread.start()

    def begin(self, request: _Request) -> None:
        """Adds a request. Raises FinwhaleError if the thread does not run."""
        with self._lock:
            if self._stopped:
                raise FinwhaleError("this AsyncLLM is closed: make a new one")
            if not self._thread.is_alive():
                raise FinwhaleError(
                    "this AsyncLLM belongs to a process that forked: make it in the process that "
                    "uses it"
                )
            self._commands.put((request, True))

    def abort(self, request: _Request) -> None:
        """Ends a request. Requests that have ended, or never began, are ignored."""
        if not request.done:
            self._commands.put((request, False))

    def stop(self) -> None:
        """Ends the thread after its current step."""
        with self._lock:
            self._stopped = True
            self._commands.put(None)
        # The garbage collector may call this on any thread.
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _run(self, engine: Engine) -> None:
        running: dict[str, _Running] = {}
        while self._take_commands(engine, running):
            if not running:
                continue
            try:
                touched = engine.step()
            except Exception as error:
                _fail(engine, running, error)
                continue
            updates: list[_Update] = []
            with engine.lock:
                for result in touched:
                    one = running.get(result.request_id)
                    if one is None:
                        continue
                    update = one.update()
                    if result.finished:
                        del running[result.request_id]
                    if update is not None:
                        updates.append((one.request, update))
            for request in _send(updates):
                running.pop(request.request_id, None)
                engine.abort(request.request_id)
        _fail(engine, running, FinwhaleError("this AsyncLLM was closed"))

    def _take_commands(self, engine: Engine, running: dict[str, _Running]) -> bool:
        """Carries out the commands in the queue; waits for one if no request runs. Returns whether
        the thread continues.
        """
        while not running or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            request, begins = command
            if not begins:
                running.pop(request.request_id, None)
                engine.abort(request.request_id)
                continue
            try:
                result = add_job(engine, request.request_id, request.job)
            except Exception as error:
                _send([(request, error)])
                continue
            running[request.request_id] = _Running(request, result)
        return True


_Update = tuple[_Request, RequestOutput | Exception]


def _fail(engine: Engine, running: dict[str, _Running], error: Exception) -> None:
    for request_id in running:
        engine.abort(request_id)
    _send([(one.request, error) for one in running.values()])
    running.clear()


def _send(updates: Sequence[_Update]) -> list[_Request]:
    """Sends updates to their event loops. Each event loop wakes once.

    Returns:
        The requests whose event loops are closed, for which no coroutine waits any more.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[_Update]] = {}
    for update in updates:
        by_loop.setdefault(update[0].loop, []).append(update)
    lost: list[_Request] = []
    for loop, found in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, found)
        except RuntimeError:  # the loop is closed
            lost += [request for request, _ in found]
    return lost


def _put(updates: Sequence[_Update]) -> None:
    for request, update in updates:
        request.put(update)
