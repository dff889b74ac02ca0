"""Checks a request's grammar before the engine sees it.

Compiling a grammar can end the process (a stack overflow inside llguidance) or take seconds and
hundreds of MiB. So each new grammar is first compiled in a process of its own, with limits on CPU
time, memory and stack, where some masks are computed too (`server/grammars/trial.py`). Only a
grammar that passes goes to the engine's process, which compiles it again on a thread beside the
step loop (`server/link/grammar_compiler.py`): llguidance's matchers cannot be sent between
processes, and masks are computed where the steps are. The trial bounds what the second compilation
costs.

Trials have a low priority. NUM_TRIALS run at once, and MAX_WAITING more may wait. Users take turns.
A trial whose client leaves or whose request times out is killed. Verdicts are remembered for each
user alone, so the time of an answer does not show which grammars others use.
"""

import asyncio
import hashlib
import json
import os
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import finwhale
from finwhale.chat.grammar_limits import GrammarError
from finwhale.errors import QueueFullError
from finwhale.request import Guide
from finwhale.server.edge.room import Room
from finwhale.server.edge.shares import Shares
from finwhale.server.errors import ApiError
from finwhale.server.grammars.trial import Verdict

NUM_TRIALS = 2
MAX_WAITING = 64
MAX_REMEMBERED = 4096
CLOSE_S = 5.0  # time in which the process must end when the server closes


class GrammarMetrics(Protocol):
    """What the server's metrics count of grammars."""

    def grammar(self, result: str) -> None: ...
    def grammar_trial(self, seconds: float) -> None: ...


class GrammarChecker:
    """Tries grammars for one server, on one asyncio loop."""

    def __init__(self, directory: Path | None, metrics: GrammarMetrics) -> None:
        """
        Args:
            directory: the tokenizer's directory; None: no tokenizer, so no request has a grammar.
            metrics: count grammars and trials; the endpoints count refused grammars.
        """
        self._directory = directory
        self._metrics = metrics
        self._room = Room(lambda: NUM_TRIALS)
        self._shares = Shares("new grammars", lambda: NUM_TRIALS + MAX_WAITING, error=self._full)
        self._known: OrderedDict[tuple[str, bytes], Verdict] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._commands: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Starts the process if it is not running; it serves once it has read the tokenizer."""
        async with self._starting:
            if self._directory is None:
                return
            if self._process is not None and self._process.returncode is None:
                return
            root = str(Path(finwhale.__file__).parents[1])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            # A process that forks must have one thread; numpy's BLAS would start others.
            single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            if self._commands is not None:
                self._commands.close()
            self._commands, theirs = socket.socketpair()
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "finwhale.server.grammars.trial", str(self._directory)),
                    stdin=theirs.fileno(),
                    env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(paths)},
                )

    async def check(self, guide: Guide, user: str = "") -> None:
        """Waits until a grammar of a user is known to be safe.

        Raises:
            GrammarError: it is not valid, or too expensive.
            QueueFullError: too many others wait, or the machine is too busy.
            ApiError (503): the process that tries grammars has ended.
        """
        key = _key(guide, user)
        result = "known"
        if key not in self._known:
            result = "passed"
            with self._shares.taken(user):
                async with self._room.taken(1, user):
                    verdict = await self._try(guide.grammar)
            self._metrics.grammar_trial(verdict.seconds)
            if verdict.reason == "busy":
                self._metrics.grammar("busy")
                raise QueueFullError(verdict.message)
            self._known[key] = verdict
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        verdict = self._known[key]
        if verdict.reason is not None:
            assert verdict.reason != "busy"
            raise GrammarError(verdict.reason, verdict.message)
        self._metrics.grammar(result)

    def bytes_of(self, guide: Guide | None, user: str = "") -> int:
        """The memory that a grammar takes, which has passed its trial lately; 0: not known."""
        verdict = None if guide is None else self._known.get(_key(guide, user))
        return 0 if verdict is None else verdict.bytes

    async def close(self) -> None:
        if self._process is None or self._commands is None:
            return
        self._commands.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def kill(self) -> None:
        """Kills the process, so that `close` does not wait for it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _full(self, message: str) -> QueueFullError:
        self._metrics.grammar("full")
        return QueueFullError(message)

    async def _try(self, grammar: str) -> Verdict:
        """Runs one trial. Cancelling this call kills the trial."""
        await self.start()
        assert self._commands is not None, "a guide needs a tokenizer"
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._commands, [b"1"], [theirs.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours)
        except OSError as error:
            ours.close()
            raise _gone() from error
        try:
            writer.write(grammar.encode())
            writer.write_eof()
            answer = await reader.read()
        except OSError as error:
            raise _gone() from error
        finally:
            writer.transport.abort()
        if not answer:
            raise _gone()
        return Verdict(**json.loads(answer))


def _key(guide: Guide, user: str) -> tuple[str, bytes]:
    return user, hashlib.sha256(guide.grammar.encode("utf-8", "surrogatepass")).digest()


def _gone() -> ApiError:
    message = "the process that checks grammars has ended; try again"
    return ApiError(503, message, code="grammar_check_failed", retry_after_s=1)
