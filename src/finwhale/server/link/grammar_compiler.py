"""Compiles the grammars of new requests in the engine's process, beside its step loop."""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from finwhale.chat.grammar import Matcher
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import QueueFullError
from finwhale.server.edge.room import FairQueue
from finwhale.server.grammars.trial import STACK_BYTES
from finwhale.server.link.wire import Add

# Memory of all grammars, in use or kept for later requests, by the measurements of their trials. A
# grammar is compiled only while its user has less than what is free, so one user gets half.
BUDGET_BYTES = 1 << 30

# A request, its matcher or the exception of its compilation (None: it was dropped), and the seconds
# that the compilation took (None: the grammar was known).
Compiled = tuple[Add, Matcher | BaseException | None, float | None]


class GrammarCompiler:
    """A thread that compiles one grammar at a time. Users take turns.

    A grammar is compiled once for each user; later requests get a copy, which takes 0.1 ms and
    shares the automaton. Users share nothing, so the time of an answer says nothing about others.

    llguidance compiles without Python's lock (GIL), so steps go on meanwhile. Each grammar has
    passed its trial in another process (`server/grammars/check.py`). The thread has the priority of
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
        self._todo: FairQueue[Add] = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._compiled: deque[Compiled] = deque()
        # The compiled grammars, the last used one at the end. Those that requests use stay in
        # `_live` after they have left the cache.
        self._cache: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._live: weakref.WeakKeyDictionary[Matcher, Add] = weakref.WeakKeyDictionary()
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
        with self._changed:
            self._todo.put(command.user, command)
            self._changed.notify()

    def drop(self, request_id: str) -> None:
        """Drops a request. If its grammar is being compiled, the result is discarded."""
        self._wanted.discard(request_id)

    def take(self) -> list[Compiled]:
        """The requests whose grammars are compiled; none that was dropped."""
        found: list[Compiled] = []
        while self._compiled:
            command, result, seconds = self._compiled.popleft()
            self.done.recv_bytes()
            self._outstanding -= 1
            if command.request_id in self._wanted and result is not None:
                self._wanted.remove(command.request_id)
                found.append((command, result, seconds))
        return found

    def close(self) -> None:
        """Ends the thread after the grammar that it is compiling."""
        self._wanted.clear()
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._closed)
                if self._closed:
                    return
                command = self._todo.get()
            result: Matcher | BaseException | None = None
            seconds: float | None = None
            try:
                if command.request_id in self._wanted:
                    result, seconds = self._matcher(command)
            except BaseException as error:  # raised again in the engine's loop
                result = error
            self._compiled.append((command, result, seconds))
            self._bell.send_bytes(b"1")

    def _matcher(self, command: Add) -> tuple[Matcher, float | None]:
        """A new matcher, and the seconds it took. Raises RequestError or QueueFullError."""
        guide = command.params.guide
        assert guide is not None
        key = (command.user, guide.grammar)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key].for_request(guide), None
        self._make_room(command)
        began = time.monotonic()
        compiled = Matcher(self._tokenizer, guide)
        self._cache[key] = compiled
        self._live[compiled] = command
        return compiled.for_request(guide), time.monotonic() - began

    def _make_room(self, command: Add) -> None:
        """Forgets grammars that were not used lately until the user may have one more."""
        while True:
            live = list(self._live.values())
            used = sum(add.grammar_bytes for add in live)
            own = sum(add.grammar_bytes for add in live if add.user == command.user)
            if own <= BUDGET_BYTES - used - command.grammar_bytes:
                return
            if not self._cache:
                raise QueueFullError(
                    "the grammars of running requests take too much memory; try again"
                )
            self._cache.popitem(last=False)


def _start(target: Callable[[], None]) -> threading.Thread:
    """Starts a thread with a larger stack than a trial's, so that tried grammars compile on it."""
    before = threading.stack_size(5 * STACK_BYTES)
    try:
        thread = threading.Thread(target=target, name="grammar-compiler", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
