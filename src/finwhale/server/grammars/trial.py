"""Processes that try grammars, each with limits on time, memory and stack.

    python -m finwhale.server.grammars.trial DIRECTORY_OF_THE_TOKENIZER

This process has the tokenizer and runs no trial itself. For each trial, it receives a socket on
standard input, and forks. The fork reads the grammar from the socket, up to its end, forks the
process of the trial, and writes the verdict as JSON. If the other end of the socket is closed
before, it kills the trial. So each trial has a process of its own, from the same clean state, which
costs some milliseconds and shares the tokenizer's memory. A new process would take 1.9 s of CPU
time and 245 MiB with DeepSeek-V4's tokenizer.

The process has one thread, so that it can fork, and it ends with its standard input.
"""

import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from finwhale.chat.grammar import Matcher
from finwhale.chat.grammar_limits import GrammarError, Reason
from finwhale.chat.tokenizer import Tokenizer
from finwhale.platform import process_memory
from finwhale.request import Guide

CPU_SECONDS = 1.0
MEMORY_BYTES = 128 << 20
# The engine's process compiles on a thread with five times this
# (`server/link/grammar_compiler.py`), and computes masks on one with 8 MiB.
STACK_BYTES = 6 << 20
# A trial never waits. If it takes this long, the operating system has not given it a processor.
WALL_SECONDS = 60.0
NUM_MASKS = 16
# A mask holds up the steps of all requests.
LONGEST_MASK_SECONDS = 0.02
# If all cores are busy, a trial gets a third of the CPU time of a thread of the engine.
NICENESS = 5
# Memory that every trial takes, whatever its grammar: copies of shared pages, for example.
BASE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one trial.

    Attributes:
        reason: why the grammar is refused; None: it passed; "busy": the trial did not finish.
        message: the reason as a sentence for the client.
        seconds: CPU time of the trial.
        bytes: memory that the compiled grammar takes.
    """

    reason: Reason | Literal["busy"] | None
    message: str = ""
    seconds: float = 0.0
    bytes: int = 0


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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    os.nice(NICENESS)
    tokenizer = Tokenizer.open(Path(directory))
    _ = tokenizer.guidance, tokenizer.words_but_end
    gc.freeze()
    commands = socket.socket(fileno=sys.stdin.fileno())
    while fds := socket.recv_fds(commands, 1, 1)[1]:
        if not os.fork():
            _exit_after(lambda: _supervise(tokenizer, socket.socket(fileno=fds[0])))
        os.close(fds[0])


def _supervise(tokenizer: Tokenizer, client: socket.socket) -> None:
    """Runs one trial in a fork and writes its verdict; kills it if the client leaves."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with client.makefile("rb") as file:
        grammar = file.read().decode()
    reading, writing = os.pipe()
    before = process_memory() or 0
    pid = os.fork()
    if not pid:
        _exit_after(lambda: _run_trial(tokenizer, grammar, writing))
    os.close(writing)
    poll = select.poll()
    poll.register(client, 0)  # POLLHUP: closed in both directions
    poll.register(reading, select.POLLIN)
    ready = dict(poll.poll(1000 * WALL_SECONDS))
    if reading not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    if output := os.read(reading, 1 << 16):
        reason, message = json.loads(output)
    elif not ready:
        reason, message = "busy", "the server is too busy to check the grammar; try again"
    else:
        reason, message = _KILLED.get(
            os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            ("crash", "the grammar compiler fails on the grammar: simplify it"),
        )
    grown = max(8 * len(grammar), (usage.ru_maxrss << 10) - before - BASE_BYTES)
    verdict = Verdict(reason, message, usage.ru_utime + usage.ru_stime, grown)
    client.sendall(json.dumps(asdict(verdict)).encode())


def _exit_after(work: Callable[[], None]) -> NoReturn:
    """Does the work of a fork, and ends it."""
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def _run_trial(tokenizer: Tokenizer, grammar: str, writing: int) -> None:
    """The process of a trial: tries a grammar and writes (reason, message) as JSON."""
    # llguidance may write to standard error when a stack overflows. Keep that out of the log.
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    _limit(resource.RLIMIT_AS, (process_memory(kind="virtual") or 0) + MEMORY_BYTES)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    answer: tuple[Reason | None, str] = (None, "")
    try:
        try_grammar(tokenizer, grammar, random.Random(0))
    except GrammarError as error:
        answer = (error.reason, str(error))
    except MemoryError:
        answer = _KILLED[signal.SIGABRT]
    os.write(writing, json.dumps(answer).encode())


def try_grammar(tokenizer: Tokenizer, grammar: str, choice: random.Random) -> None:
    """Compiles a grammar, and computes the masks of the beginning of a random output. Raises
    GrammarError: it is not valid, it allows no output, or its masks fail."""
    matcher = Matcher(tokenizer, Guide(grammar=grammar))
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    for _ in range(NUM_MASKS):
        began = time.thread_time()
        matcher.allow(words)
        seconds = time.thread_time() - began
        if matcher.error is not None and "NoExtension" in matcher.error:
            raise GrammarError("invalid", "the grammar is not valid: no output matches it")
        if matcher.error is not None:
            raise GrammarError("masks", matcher.error)
        if seconds > LONGEST_MASK_SECONDS:
            raise GrammarError(
                "masks",
                "the grammar is too slow: finding the tokens that it allows takes "
                f"{1000 * seconds:.0f} ms of CPU time, and {1000 * LONGEST_MASK_SECONDS:g} ms are "
                "allowed; use smaller numbers in repetitions, or fewer alternatives",
            )
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        going_on = allowed[allowed != tokenizer.eos_id]
        if not len(going_on):
            return
        matcher.accept(int(going_on[choice.randrange(len(going_on))]))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, value) if hard < 0 else (min(value, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1])
