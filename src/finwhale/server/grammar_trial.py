"""A process that tries grammars, each in a fork of its own, with limits on time, memory and stack.

    python -m finwhale.server.grammar_trial DIRECTORY_OF_THE_TOKENIZER

It reads commands from standard input, one JSON object a line, and writes one JSON object a line to
standard output for each trial that has ended:

    {"id": 1, "grammar": "start: ..."}     begin a trial
    {"cancel": 1}                          kill it; nothing is written for it
    {"id": 1, "reason": null, "message": "", "seconds": 0.01}

`reason` is a `Verdict.reason`. The process has one thread, so that it can fork, and it ends with
its standard input. A fork costs some milliseconds and shares the tokenizer's memory; whatever a
grammar does to it, the next trial begins from the same clean state.
"""

import gc
import json
import os
import random
import resource
import selectors
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finwhale.chat.grammar import Matcher
from finwhale.chat.grammar_limits import GrammarError, Reason
from finwhale.chat.tokenizer import Tokenizer
from finwhale.request import Guide

CPU_SECONDS = 1.0
MEMORY_BYTES = 128 << 20
# The engine's process compiles on a thread with five times this (`server/grammar_compiler.py`), and
# computes masks on one with 8 MiB.
STACK_BYTES = 6 << 20
# A trial never waits. If it takes this long, the operating system has not given it a processor.
WALL_SECONDS = 60.0
NUM_MASKS = 16
# If all cores are busy, a trial gets a third of the CPU time of a thread of the engine.
NICENESS = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one trial.

    Attributes:
        id: the trial's, from its command.
        reason: why the grammar is refused; None: it passed; "busy": the trial did not finish.
        message: the reason as a sentence for the client.
        seconds: CPU time of the trial.
    """

    id: int
    reason: Reason | Literal["busy"] | None
    message: str
    seconds: float


_TOO_DEEP: tuple[Reason, str] = (
    "crash",
    "the grammar is nested too deeply for the grammar compiler: shorten chains of references "
    "and rules",
)
_KILLED: dict[int, tuple[Reason, str]] = {
    signal.SIGPROF: (
        "time",
        f"the grammar is too expensive: compiling it takes more than {CPU_SECONDS:g} s of CPU "
        "time; use smaller numbers in multipleOf and in repetitions, or a smaller schema",
    ),
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
    signal.SIGABRT: (
        "memory",
        f"the grammar is too large: compiling it takes more than {MEMORY_BYTES >> 20} MiB of "
        "memory; use smaller numbers in multipleOf and in repetitions, or a smaller schema",
    ),
}


def main(directory: str) -> None:
    # The server decides when this process ends: a terminal's Ctrl-C reaches all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    tokenizer = Tokenizer.open(Path(directory))
    _ = tokenizer.guidance, tokenizer.words_but_end
    gc.freeze()
    Trials(tokenizer).run()


@dataclass(slots=True)
class _Trial:
    """A running trial: its forked process, and the output that it has written so far."""

    id: int
    pid: int
    deadline: float
    output: bytes = b""


class Trials:
    """Reads commands, runs trials and writes their verdicts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Trial] = {}
        self._input = b""

    def run(self) -> None:
        """Serves until standard input ends."""
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(1.0 if self._running else None):
                    if key.fd == sys.stdin.fileno():
                        if not self._take_commands():
                            return
                    elif key.fd in self._running:
                        self._take_output(key.fd)
                self._end_overdue()
        finally:
            for fd in list(self._running):
                self._end(fd, kill=True)

    def _take_commands(self) -> bool:
        """Carries out the commands that have arrived; returns False at the end of the input."""
        data = os.read(sys.stdin.fileno(), 1 << 20)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            command: dict[str, Any] = json.loads(line)
            if "cancel" in command:
                for fd, trial in list(self._running.items()):
                    if trial.id == command["cancel"]:
                        self._end(fd, kill=True)
            else:
                self._begin(command["id"], command["grammar"])
        return bool(data)

    def _begin(self, trial_id: int, grammar: str) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _run_trial(self._tokenizer, trial_id, grammar, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        self._running[reading] = _Trial(trial_id, pid, time.monotonic() + WALL_SECONDS)
        self._selector.register(reading, selectors.EVENT_READ)

    def _take_output(self, fd: int) -> None:
        data = os.read(fd, 1 << 16)
        trial = self._running[fd]
        trial.output += data
        if data:
            return
        status, seconds = self._end(fd, kill=False)
        if trial.output:
            reason, message = json.loads(trial.output)
            self._answer(Verdict(trial.id, reason, message, seconds))
            return
        reason, message = _KILLED.get(
            os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            ("crash", "the grammar compiler fails on the grammar: simplify it"),
        )
        self._answer(Verdict(trial.id, reason, message, seconds))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for fd, trial in list(self._running.items()):
            if now > trial.deadline:
                _, seconds = self._end(fd, kill=True)
                message = "the server is too busy to check the grammar; try again"
                self._answer(Verdict(trial.id, "busy", message, seconds))

    def _end(self, fd: int, *, kill: bool) -> tuple[int, float]:
        """Removes a trial from the list; returns its exit status and its CPU time."""
        trial = self._running.pop(fd)
        self._selector.unregister(fd)
        os.close(fd)
        if kill:
            os.kill(trial.pid, signal.SIGKILL)
        _, status, usage = os.wait4(trial.pid, 0)
        return status, usage.ru_utime + usage.ru_stime

    def _answer(self, verdict: Verdict) -> None:
        line = json.dumps(asdict(verdict)).encode() + b"\n"
        while line:
            line = line[os.write(sys.stdout.fileno(), line) :]


def _run_trial(tokenizer: Tokenizer, trial_id: int, grammar: str, writing: int) -> None:
    """The forked process: tries a grammar and writes (reason, message) as JSON."""
    # llguidance may write to standard error when a stack overflows. Keep that out of the log.
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    _limit(resource.RLIMIT_AS, _virtual_bytes() + MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    answer: tuple[Reason | None, str] = (None, "")
    try:
        try_grammar(tokenizer, grammar, random.Random(trial_id))
    except GrammarError as error:
        answer = (error.reason, str(error))
    except MemoryError:
        answer = _KILLED[signal.SIGABRT]
    os.write(writing, json.dumps(answer).encode())


def try_grammar(tokenizer: Tokenizer, grammar: str, choice: random.Random) -> None:
    """Compiles a grammar, and computes the masks of the beginning of a random output.

    Raises:
        GrammarError: it is not valid, it allows no output, or its masks fail.
    """
    matcher = Matcher(tokenizer, Guide(grammar=grammar))
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    for _ in range(NUM_MASKS):
        matcher.allow(words)
        if matcher.error is not None and "NoExtension" in matcher.error:
            raise GrammarError("invalid", "the grammar is not valid: no output matches it")
        if matcher.error is not None:
            raise GrammarError("masks", matcher.error)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        going_on = allowed[allowed != tokenizer.eos_id]
        if not len(going_on):
            return
        matcher.accept(int(going_on[choice.randrange(len(going_on))]))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, value) if hard < 0 else (min(value, hard), hard))


def _virtual_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1])
