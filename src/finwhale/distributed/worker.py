"""The worker's side of a worker process (workers.py has the owner's side).

A worker ends when its owner ends for any reason: a thread of the worker sees the socket close. The
kernel also kills the workers of this host (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

from finwhale.distributed.rank import Rank
from finwhale.distributed.ring import Ring
from finwhale.distributed.worker_messages import STOP, Failed, Phase, Report, Status
from finwhale.errors import FinwhaleError, OtherRankError, first_line

logger = logging.getLogger(__name__)

BEAT_S = 0.2
STACKS_SIGNAL = signal.SIGUSR1  # makes a worker write the stacks of its threads to its stderr
CAUSE_S = 2.0  # how long a rank that noticed another's failure waits for the owner to know it
_PR_SET_PDEATHSIG = 1


class Inbox(Protocol):
    """A worker's inbox of its owner's messages."""

    def read(self) -> bytes:
        """Wait for the next message, and remove it from the inbox."""

    def beat(self) -> None:
        """Send a heartbeat to the owner."""


class OwnerLink:
    """A worker's connection to its owner.

    Attributes:
        status: called at every heartbeat to report a change of its result; None: not called.
    """

    def __init__(self, rank: Rank, control: Connection, inbox: Inbox) -> None:
        self.rank = rank
        self.status: Callable[[], Any] | None = None
        self._control, self._inbox = control, inbox
        self._lock = threading.Lock()

    def report(self, report: Report) -> None:
        """Send a report to the owner, unless it is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._control.send(report)

    def report_failure(self, error: BaseException) -> None:
        """Tell the owner that this worker cannot continue.

        If another rank has failed, this one may be the first to notice. So it waits: once the owner
        knows the cause, it ends this process.
        """
        if notices_another(error):
            time.sleep(CAUSE_S)
        if isinstance(error, FinwhaleError):
            self.report(Failed(type(error), str(error)))
            return
        logger.error("the rank has failed", exc_info=error)
        self.report(Failed(FinwhaleError, f"{type(error).__name__}: {first_line(error)}"))

    def read(self) -> bytes:
        """The next message from the owner."""
        return self._inbox.read()

    def _beat(self) -> None:
        told: Any = None
        while True:
            self._inbox.beat()
            if self.status is not None and (status := self.status()) != told:
                told = status
                self.report(Status(status))
            time.sleep(BEAT_S)

    def _end_with_owner(self) -> None:
        code = 1
        with contextlib.suppress(EOFError, OSError):
            assert self._control.recv_bytes() == STOP
            code = 0
        os._exit(code)  # at once: a device that waits for another rank would block a normal exit


def notices_another(error: BaseException) -> bool:
    """Whether the error may only say that another rank has failed, whose connections break."""
    return isinstance(error, RuntimeError | OtherRankError)


class _Forwarding(logging.Handler):
    """Sends log records to the owner, which formats and writes them."""

    def __init__(self, owner: OwnerLink) -> None:
        super().__init__()
        self._link = owner

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.msg += "\n" + logging.Formatter().formatException(record.exc_info)
            record.exc_info = record.exc_text = None
        vars(record).update(rank=self._link.rank.index)
        self._link.report(record)


def worker_main(control: int, ring: int, index: int, size: int) -> NoReturn:
    """Run a worker until its owner ends it (SpawnedProcesses.start has the arguments)."""
    connection = Connection(control)
    owner, level = connection.recv()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)  # the owner ended before prctl took effect
    inbox = Ring(ring, size - 1, index - 1)
    run_task(OwnerLink(Rank(index, size), connection, inbox), connection, level)


def run_task(owner: OwnerLink, control: Connection, level: int) -> NoReturn:
    """Receive a worker's task, and run it until the owner ends this process.

    Args:
        level: the lowest level of the log records to forward.
    """
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    owner.report(Phase("importing"))
    payload = control.recv_bytes()
    for target in (owner._beat, owner._end_with_owner):
        threading.Thread(target=target, name=target.__name__, daemon=True).start()
    root = logging.getLogger()
    root.handlers[:] = [_Forwarding(owner)]
    root.setLevel(level)
    try:
        pickle.loads(payload)(owner)
    except BaseException as error:
        owner.report_failure(error)
    os._exit(1)
