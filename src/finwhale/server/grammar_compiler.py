"""Compiles the grammars of new requests in the engine's process, beside its step loop."""

import queue
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from finwhale.chat.grammar import Matcher
from finwhale.chat.tokenizer import Tokenizer
from finwhale.server.grammar_trial import STACK_BYTES
from finwhale.server.wire import Add

# A request, its matcher or the exception of its compilation (None: it was dropped), and the seconds
# that the compilation took.
Compiled = tuple[Add, Matcher | BaseException | None, float]


class GrammarCompiler:
    """A thread that compiles one grammar at a time.

    llguidance compiles without Python's lock (GIL), so steps go on meanwhile. Each grammar has
    passed its trial in another process (`server/grammar_check.py`). The thread has the priority of
    the step loop: other processes could pause a thread of lower priority while it holds the lock,
    and the step loop would wait for it (on a busy machine for a second).

    Attributes:
        done: becomes readable (`multiprocessing.connection.wait`) when `take` has results.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.done: Connection
        self.done, self._bell = Pipe(duplex=False)
        self._tokenizer = tokenizer
        self._outstanding = 0
        self._wanted: set[str] = set()
        self._todo: queue.SimpleQueue[Add | None] = queue.SimpleQueue()
        self._compiled: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a grammar is being compiled, or `take` has results."""
        return self._outstanding > 0

    def submit(self, command: Add) -> None:
        """Begins to compile the grammar of a request."""
        if self._thread is None:
            self._thread = _start(self._run)
        self._outstanding += 1
        self._wanted.add(command.request_id)
        self._todo.put(command)

    def drop(self, request_id: str) -> None:
        """Drops a request. If its grammar is being compiled, the result is discarded."""
        self._wanted.discard(request_id)

    def take(self) -> list[tuple[Add, Matcher | BaseException, float]]:
        """Returns the requests whose grammars are compiled, each with its matcher or exception and
        the seconds that this took."""
        found = []
        while not self._compiled.empty():
            command, result, seconds = self._compiled.get()
            self.done.recv_bytes()
            self._outstanding -= 1
            if command.request_id in self._wanted and result is not None:
                self._wanted.remove(command.request_id)
                found.append((command, result, seconds))
        return found

    def close(self) -> None:
        """Ends the thread after the grammar that it is compiling."""
        self._wanted.clear()
        self._todo.put(None)

    def _run(self) -> None:
        while (command := self._todo.get()) is not None:
            assert command.params.guide is not None
            result: Matcher | BaseException | None = None
            began = time.monotonic()
            try:
                if command.request_id in self._wanted:
                    result = Matcher(self._tokenizer, command.params.guide)
            except BaseException as error:  # raised again in the engine's loop
                result = error
            self._compiled.put((command, result, time.monotonic() - began))
            self._bell.send_bytes(b"1")


def _start(target: Callable[[], None]) -> threading.Thread:
    """Starts a thread with a larger stack than a trial's, so that tried grammars compile on it."""
    before = threading.stack_size(5 * STACK_BYTES)
    try:
        thread = threading.Thread(target=target, name="grammar-compiler", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
