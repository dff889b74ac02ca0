"""Checks a request's grammar before the engine sees it.

Compiling a grammar can end the process (a stack overflow inside llguidance) or take seconds and
hundreds of MiB. So each new grammar is first compiled in a process of its own, where some masks are
computed too: `server/grammar_trial.py` keeps one process with the tokenizer and forks it for each
trial, with limits on CPU time, memory and stack. Only a grammar that passes goes to the engine's
process, which compiles it again on a thread beside the step loop (`server/grammar_compiler.py`):
llguidance's matchers cannot be sent between processes, and masks are computed where the steps are.
The limits of the trial bound what the second compilation costs.

Trials have a low priority, NUM_TRIALS run at once and MAX_WAITING more may wait. One whose client
leaves or whose request times out is killed. Verdicts are remembered, so a grammar is tried once.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import finwhale
from finwhale.chat.grammar_limits import GrammarError
from finwhale.request import Guide
from finwhale.server.client import QueueFullError
from finwhale.server.errors import ApiError
from finwhale.server.grammar_trial import Verdict
from finwhale.server.shares import Shares

NUM_TRIALS = 2
MAX_WAITING = 32
MAX_REMEMBERED = 4096
CLOSE_S = 5.0  # time in which the process must end when the server closes


class Observer(Protocol):
    """Counts grammars and trials (the metrics do). The endpoints count refused grammars."""

    def grammar(self, result: str) -> None: ...

    def grammar_trial(self, seconds: float) -> None: ...


class GrammarChecker:
    """Tries grammars for one server, on one asyncio loop."""

    def __init__(
        self,
        directory: Path | None,
        observer: Observer,
        *,
        num_trials: int = NUM_TRIALS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """
        Args:
            directory: the tokenizer's directory; None: no tokenizer, so no request has a grammar.
            num_trials: number of trials that run at once.
            max_waiting: number of further grammars that may wait for a trial.
        """
        self._directory = directory
        self._observer = observer
        self._free = asyncio.Semaphore(num_trials)
        room = num_trials + max_waiting
        self._shares = Shares("new grammars", lambda: room)
        self._ids = itertools.count()
        self._known: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._process: _TrialProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Starts the process if it is not running; it serves once it has read the tokenizer."""
        async with self._starting:
            if self._directory is not None and (self._process is None or self._process.ended):
                self._process = await _TrialProcess.start(self._directory)

    async def check(self, guide: Guide | None, user: str = "") -> None:
        """Waits until a grammar of a user is known to be safe.

        Raises:
            GrammarError: it is not valid, or too expensive.
            QueueFullError: too many others wait, for all or for this user; or the machine is too
                busy.
            ApiError (503): the process that tries grammars has ended.
        """
        if guide is None:
            return
        digest = hashlib.sha256(guide.grammar.encode("utf-8", "surrogatepass")).digest()
        result = "known"
        if digest not in self._known:
            result = "passed"
            self._remember(digest, await self._queue(guide.grammar, user))
        self._known.move_to_end(digest)
        error = self._known[digest]
        if error is not None:
            raise GrammarError(error.reason, str(error))
        self._observer.grammar(result)

    async def close(self) -> None:
        if self._process is not None:
            await self._process.close()

    def kill(self) -> None:
        """Kills the process, so that `close` does not wait for it."""
        if self._process is not None:
            self._process.kill()

    def _remember(self, digest: bytes, verdict: Verdict) -> None:
        self._observer.grammar_trial(verdict.seconds)
        if verdict.reason == "busy":
            self._observer.grammar("busy")
            raise QueueFullError(verdict.message)
        self._known[digest] = (
            None if verdict.reason is None else GrammarError(verdict.reason, verdict.message)
        )
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    async def _queue(self, grammar: str, user: str) -> Verdict:
        try:
            self._shares.check(user)
        except QueueFullError:
            self._observer.grammar("full")
            raise
        with self._shares.taken(user):
            async with self._free:
                await self.start()
                assert self._process is not None, "a guide needs a tokenizer"
                return await self._process.run(next(self._ids), grammar)


class _TrialProcess:
    """The server's end of the pipe to `server/grammar_trial.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, directory: Path) -> "_TrialProcess":
        root = str(Path(finwhale.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        # A process that forks must have one thread; numpy's BLAS would start others.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "finwhale.server.grammar_trial", str(directory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(paths)},
        )
        return cls(process)

    @property
    def ended(self) -> bool:
        return self._reader.done()

    async def run(self, trial_id: int, grammar: str) -> Verdict:
        """Run one trial. Cancelling this call kills the trial."""
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[trial_id] = answer
        try:
            await self._send({"id": trial_id, "grammar": grammar})
            return await answer
        finally:
            del self._waiting[trial_id]
            if answer.cancelled() or not answer.done():
                with contextlib.suppress(ApiError):
                    self._write({"cancel": trial_id})

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reader

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._process.kill()

    async def _send(self, command: dict[str, object]) -> None:
        self._write(command)
        assert self._process.stdin is not None
        try:
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise _gone() from error

    def _write(self, command: dict[str, object]) -> None:
        assert self._process.stdin is not None
        if self.ended:
            raise _gone()
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            verdict = Verdict(**json.loads(line))
            if (answer := self._waiting.get(verdict.id)) is not None and not answer.done():
                answer.set_result(verdict)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_gone())


def _gone() -> ApiError:
    return ApiError(
        503,
        "the process that checks grammars has ended; try again",
        code="grammar_check_failed",
        retry_after_s=1,
    )
