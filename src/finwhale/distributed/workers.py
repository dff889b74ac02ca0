"""The owner's side of worker processes: starts them, watches them and ends them.

Rank 0 runs in the owner's process; rank i in worker i - 1. Each worker has a socket to its owner
for rare messages (worker_messages.py), and an inbox for the owner's messages. worker.py has the
worker's side.

`SpawnedProcesses` starts workers on this host; their inbox is a ring (ring.py). hosts.py connects
workers that torchrun or Ray has started on one or several hosts.
"""

import contextlib
import json
import logging
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from finwhale.distributed import worker_messages
from finwhale.distributed.rank import Rank
from finwhale.distributed.ring import Ring
from finwhale.distributed.worker import STACKS_SIGNAL, OwnerLink
from finwhale.errors import EngineDeadError, FinwhaleError

logger = logging.getLogger(__name__)
T = TypeVar("T")

TICK_S = 0.25
# A worker without heartbeats has failed after STOPPED_S if a signal has stopped it, after SILENT_S
# in the steady state, and after SILENT_AT_START_S before. During the start, imports and compilers
# can keep a heartbeat waiting for the interpreter's lock.
STOPPED_S, SILENT_S, SILENT_AT_START_S = 1.0, 6.0, 300.0
CONNECT_S = 60.0  # time limit for a worker's process to begin, and for its connection to rank 0
STACKS_S = 2.0  # time limit for a silent worker to begin to write its stacks
STOP_S = 2.0  # time limit for a worker to stop
STUCK_S = 4.0  # time limit for the owner to notice a failure, before `on_stuck`

_MAIN = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.path[:] = json.loads(sys.argv[1]); "
    "from finwhale.distributed.worker import worker_main; "
    "worker_main(*map(int, sys.argv[2:6]))"
)


class Process(Protocol):
    """The owner's view of a worker's process."""

    @property
    def pid(self) -> int: ...

    def beats(self) -> int:
        """Number of the process's heartbeats so far."""

    def is_stopped(self) -> bool:
        """Whether a signal is known to have stopped the process."""

    def write_stacks(self) -> None:
        """Let the process write the stacks of its threads to its stderr, if it is on this host,
        and give it time for that.
        """

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end of the process. Returns whether it has ended in this time."""

    def ending(self) -> str:
        """How the process has ended: the predicate of a message about it."""

    def kill(self) -> None:
        """End the process at once. Any thread may call this."""


class WorkerProcesses(Protocol):
    """The processes of ranks 1 to `len(labels)`.

    Attributes:
        labels: the device of each process, and its host if a launcher or Ray started it. For
            messages.
    """

    labels: Sequence[str]

    def start(self) -> list[tuple[Connection, Process]]:
        """Start the processes; returns each with its socket. The calling thread watches them."""

    def write(self, message: bytes, wait: Callable[[], None]) -> None:
        """Put a message into every inbox.

        Args:
            wait: called whenever an inbox has no room; it may raise.
        """

    def close(self) -> None:
        """Free the processes' resources, after they have ended."""


class SpawnedProcesses:
    """Processes that this process starts on its host."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = labels
        self._ring = Ring.create(len(labels))
        self.write = self._ring.write

    def start(self) -> list[tuple[Connection, Process]]:
        started: list[tuple[Connection, Process]] = []
        size = 1 + len(self.labels)
        for index in range(1, size):
            ours, theirs = Pipe()
            numbers = [theirs.fileno(), self._ring.file, index, size]
            process = subprocess.Popen(
                # Not multiprocessing: that would run the user's own main module again.
                [sys.executable, "-c", _MAIN, json.dumps(sys.path), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=numbers[:2],
                # Only the owner gets a terminal's Ctrl-C and Ctrl-Z.
                start_new_session=True,
            )
            theirs.close()
            started.append((ours, _Child(process, self._ring, index - 1)))
        os.close(self._ring.file)  # the mapping stays
        return started

    def close(self) -> None:
        """Do nothing: the ring's memory is freed with its last process."""


class _Child:
    """A process that this process has started. It reads the ring as number `reader`."""

    def __init__(self, process: "subprocess.Popen[bytes]", ring: Ring, reader: int) -> None:
        self.pid, self.kill = process.pid, process.kill
        self._process, self._ring, self._reader = process, ring, reader

    def beats(self) -> int:
        return self._ring.beats(self._reader)

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def write_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)
        # A busy host may not run the process for a while.
        end = time.monotonic() + STACKS_S
        while is_pending(self.pid, STACKS_SIGNAL) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(TICK_S)

    def wait(self, seconds: float | None) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def ending(self) -> str:
        if not self.wait(2):
            return "has closed its connection"
        code = self._process.returncode
        return f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}"


@dataclass(slots=True)
class WorkerState:
    """The state of one worker. Only the watching thread changes it.

    Attributes:
        phase: the phase of the worker's start; None: its process has not begun.
        phase_s: seconds since the phase began.
        about: Opened.about; None: the worker is not open.
        silent_s: seconds without a heartbeat.
        status: its latest status (`OwnerLink.status`); None: it has reported none.
        answers: the answers that `Workers.wait_answers` has not returned yet.
        results, read: the results of steps that `wait_result` has not returned yet, and the number
            of those that it has.
    """

    rank: Rank
    label: str
    control: Connection
    process: Process
    phase: worker_messages.Phase | None = None
    phase_s: float = 0.0
    opened: bool = False
    about: Any = None
    beats: int = 0
    silent_s: float = 0.0
    status: Any = None
    answers: SimpleQueue[worker_messages.Answer] = field(default_factory=SimpleQueue)
    results: SimpleQueue[bytes] = field(default_factory=SimpleQueue)
    read: int = 0

    @property
    def name(self) -> str:
        return f"rank {self.rank.index} ({self.label})"


class Workers:
    """The worker processes of all ranks but the first, and the thread that watches them.

    Once a worker has failed, all of them are killed, and `check` raises: no rank can continue
    without the others.

    Args:
        work: called in every worker with its OwnerLink; picklable.
        processes: the workers' processes.

    Attributes:
        steady: startup and compilation are over, so heartbeats must arrive regularly.
        on_stuck: called with the cause of a failure if the owner is still inside `guard` STUCK_S
            later, for example because its GPU waits for a rank that is gone. Ends the process.
    """

    def __init__(self, work: Callable[[OwnerLink], None], processes: WorkerProcesses) -> None:
        self.size = 1 + len(processes.labels)
        self.steady = False
        self.on_stuck: Callable[[str], None] = end_process
        self._payload = pickle.dumps(work)
        self._processes = processes
        self._workers: list[WorkerState] = []
        self._owner = os.getpid()
        self._failure: FinwhaleError | None = None
        self._opened = threading.Event()
        self._closing = False
        self._inside = False
        # This thread starts the processes too: the kernel kills a worker when the thread that
        # started it ends.
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if a worker has failed: at the start the worker's error, later EngineDeadError."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def wait_opened(self) -> None:
        """Wait until every worker is ready. Raises the error of one that fails."""
        while not self._opened.wait(TICK_S):
            self.check()
        self.check()

    def send(self, message: bytes) -> None:
        """Write a message for all workers. Raises if one has failed."""
        self.check()
        self._processes.write(message, self._wait_for_room)

    def _wait_for_room(self) -> None:
        self.check()
        time.sleep(20e-6)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """The context for calls that may block forever if a worker is gone (see `on_stuck`)."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def states(self) -> list[WorkerState]:
        """The latest state of each worker."""
        return list(self._workers)

    def wait_answers(self) -> list[worker_messages.Answer]:
        """Wait for one answer of each worker; raises if a worker fails."""
        return [self._wait_in(worker.answers) for worker in self._workers]

    def wait_result(self, index: int, number: int) -> bytes:
        """Wait for result `number` of the rank `index`, counted from 1; forgets those before it."""
        worker = self._workers[index - 1]
        while worker.read < number:
            found = self._wait_in(worker.results)
            worker.read += 1
        return found

    def _wait_in(self, queue: "SimpleQueue[T]") -> T:
        while True:
            try:
                return queue.get(timeout=TICK_S)
            except Empty:
                self.check()

    def fail(self, error: FinwhaleError) -> None:
        """Record a failure of the owner's own rank, and kill the workers."""
        if self._failure is None and not self._closing:
            self._failure = error
        for worker in self._workers:
            worker.process.kill()

    def wait_failure(self, wait_s: float = 1.0) -> FinwhaleError | None:
        """Wait until a worker's failure is noticed, for at most `wait_s`; None: there is none."""
        end = time.monotonic() + wait_s
        while self._failure is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._failure

    def close(self) -> None:
        """End the workers, and wait for them to end. Does nothing in a forked process."""
        if os.getpid() != self._owner or self._closing:
            return
        self._closing = True
        # The garbage collector may call this on the watching thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The remaining methods run on the watching thread.

    def _watch(self) -> None:
        try:
            self._start()
            last = time.monotonic()
            while self._failure is None and not self._closing:
                ready = wait([w.control for w in self._workers], TICK_S)
                now = time.monotonic()
                # If this thread was delayed, its workers may have been delayed too.
                spent, last = min(now - last, 2 * TICK_S), now
                for worker in self._workers:
                    if worker.control in ready:
                        self._receive(worker)
                    self._check_heartbeat(worker, spent)
                if all(worker.opened for worker in self._workers):
                    self._opened.set()
        except Exception as error:  # otherwise an error of this thread would go unnoticed
            logger.exception("the thread that watches the ranks has failed")
            self._fail(FinwhaleError, f"cannot watch the ranks: {error}")
        finally:
            self._end()

    def _start(self) -> None:
        for index, (control, process) in enumerate(self._processes.start(), 1):
            rank, label = Rank(index, self.size), self._processes.labels[index - 1]
            self._workers.append(WorkerState(rank, label, control, process))
        level = logging.getLogger("finwhale").getEffectiveLevel()
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.control.send((os.getpid(), level))
                worker.control.send_bytes(self._payload)

    def _receive(self, worker: WorkerState) -> None:
        while self._failure is None and worker.control.poll():
            try:
                report: worker_messages.Report = worker.control.recv()
            except (EOFError, OSError):
                if not self._closing:
                    self._fail(None, f"{worker.name} {worker.process.ending()}")
                return
            if isinstance(report, logging.LogRecord):
                report.msg = f"{worker.name}: {report.msg}"
                logging.getLogger(report.name).handle(report)
            elif isinstance(report, worker_messages.Failed):
                self._fail(report.kind, f"{worker.name}: {report.message}")
            elif isinstance(report, worker_messages.Status):
                worker.status = report.status
            elif isinstance(report, worker_messages.Answer):
                worker.answers.put(report)
            elif isinstance(report, worker_messages.LaneResults):
                worker.results.put(report.pickled)
            elif isinstance(report, worker_messages.Phase):
                worker.phase, worker.phase_s = report, 0.0
            else:
                worker.about, worker.opened = report.about, True

    def _check_heartbeat(self, worker: WorkerState, spent: float) -> None:
        beats = worker.process.beats()
        worker.phase_s += spent
        worker.silent_s = worker.silent_s + spent if beats == worker.beats else 0.0
        worker.beats = beats
        if worker.silent_s >= STOPPED_S and worker.process.is_stopped():
            self._fail(None, f"{worker.name} was stopped by a signal")
        elif worker.silent_s >= (SILENT_S if self.steady else SILENT_AT_START_S):
            worker.process.write_stacks()
            self._fail(None, f"{worker.name} has not answered for {worker.silent_s:.0f} s")
        elif worker.phase in (None, worker_messages.CONNECTING) and worker.phase_s >= CONNECT_S:
            cause = "rank 0 does not answer" if worker.phase else "its process does not begin"
            self._fail(None, f"{worker.name} has not connected for {CONNECT_S:.0f} s: {cause}")

    def _fail(self, kind: type[FinwhaleError] | None, message: str) -> None:
        """Record a failure. `kind` is its class during the start; None: FinwhaleError."""
        opened = self._opened.is_set()
        if self._failure is None:
            self._failure = (EngineDeadError if opened else kind or FinwhaleError)(message)
            logger.error("%s", message)

    def _end(self) -> None:
        """End all workers: by a message, or after a failure by a signal. Leaves no zombie."""
        began = time.monotonic()
        if self._failure is None:
            # A worker that does not react to this message is killed.
            for worker in self._workers:
                with contextlib.suppress(OSError):
                    worker.control.send_bytes(worker_messages.STOP)
            patience = STOP_S
        else:
            patience = 0.0
        for worker in self._workers:
            if not worker.process.wait(max(0.0, began + patience - time.monotonic())):
                worker.process.kill()
                worker.process.wait(None)
        for worker in self._workers:
            worker.control.close()
        self._processes.close()
        while self._failure is not None and self._inside and not self._closing:
            if time.monotonic() - began > STUCK_S:
                self.on_stuck(str(self._failure))
                return
            time.sleep(TICK_S)


def end_process(cause: str) -> None:
    """End this process at once, because its device waits forever."""
    text = f"finwhale: the device waits for a rank that is gone, so this process ends: {cause}\n"
    # A pipe that nobody reads must not block the process.
    with contextlib.suppress(OSError):
        if select.select((), (2,), (), 0)[1]:
            os.write(2, text.encode())
    os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "T"


def is_pending(pid: int, number: int) -> bool:
    """Whether a process has not begun to handle a signal that was sent to it."""
    try:
        pending = Path(f"/proc/{pid}/status").read_text().partition("ShdPnd:")[2].split()[0]
    except (OSError, IndexError):
        return False
    return bool(int(pending, 16) >> (number - 1) & 1)
