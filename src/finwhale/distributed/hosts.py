"""Connects workers that torchrun or Ray has started, on one or several hosts, to rank 0.

Each worker has two TCP connections to rank 0: one for its reports, and one for plans from rank 0
and the worker's heartbeats. Both ends prove that they know a secret before they unpickle anything.
The secret is in the ranks' store, so the network between the hosts must be trusted.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NoReturn

from torch._C._distributed_c10d import Store

from finwhale.distributed.peers import join_store, listen
from finwhale.distributed.rank import Placement, Rank
from finwhale.distributed.worker import OwnerLink, run_task
from finwhale.distributed.workers import CONNECT_S, TICK_S, Process
from finwhale.errors import FinwhaleError

logger = logging.getLogger(__name__)

LOST_MS = 6000  # a connection is lost if a host does not acknowledge data for this long
HANDSHAKE_S = 5
_INVITATION = "hosts/invitation"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address and the secret with which a worker connects to rank 0."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Introduction:
    """A worker's first message on each of its connections.

    Attributes:
        plans: the connection is for plans; otherwise it is for reports.
    """

    index: int
    plans: bool
    host: str
    local_index: int
    pid: int


class RemoteProcesses:
    """The workers that have connected (workers.WorkerProcesses)."""

    def __init__(
        self,
        labels: Sequence[str],
        workers: Sequence["RemoteWorker"],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.labels, self.close = labels, close
        self._workers = workers

    def start(self) -> list[tuple[Connection, Process]]:
        return [(worker.control, worker) for worker in self._workers]

    def write(self, message: bytes, wait: Callable[[], None]) -> None:
        try:
            for worker in self._workers:
                # A full connection blocks until `kill` closes it.
                worker.plans.send_bytes(message)
        except OSError:
            while True:  # until the watching thread notices
                wait()


class RemoteWorker:
    """One worker that has connected (workers.Process)."""

    def __init__(self, reports: "_Admitted", plans: "_Admitted") -> None:
        self.introduction = reports.introduction
        self.pid = reports.introduction.pid
        self.control, self.plans = reports.connection, plans.connection
        self._sockets = (reports.socket, plans.socket)
        self._beats = 0
        self._ended = False

    def beats(self) -> int:
        try:
            while self.plans.poll():
                self.plans.recv_bytes()
                self._beats += 1
        except (EOFError, OSError):
            self._ended = True
        return self._beats

    def is_stopped(self) -> bool:
        return False  # unknown: the process may be on another host

    def write_stacks(self) -> None:
        """Do nothing: the process may be on another host."""

    def wait(self, seconds: float | None) -> bool:
        end = float("inf") if seconds is None else time.monotonic() + seconds
        self.beats()
        while not self._ended and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                self.plans.poll(min(left, TICK_S))
            self.beats()
        return self._ended

    def ending(self) -> str:
        return "has ended, or the connection to it is lost"

    def kill(self) -> None:
        """Close the connections, which makes the worker end."""
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Admitted:
    introduction: Introduction
    connection: Connection
    socket: socket.socket


class WorkerListener:
    """The socket on which rank 0 waits for its workers, which reach this host at address `host`."""

    def __init__(self, host: str) -> None:
        self._listener = listen(host)
        port = self._listener.getsockname()[1]
        self.invitation = Invitation(host, port, secrets.token_bytes(_SECRET_BYTES))

    def publish(self, store: Store) -> None:
        """Write the invitation into the ranks' store."""
        store.set(_INVITATION, f"{self.invitation.port} {self.invitation.secret.hex()}")

    def receive(self, size: int, check: Callable[[], None] = lambda: None) -> list[RemoteWorker]:
        """Wait for the workers of ranks 1 to size - 1; returns them in order.

        Args:
            check: called repeatedly while waiting; it may raise.

        Raises:
            FinwhaleError: a worker has not connected for CONNECT_S seconds.
        """
        found: dict[tuple[int, bool], _Admitted] = {}
        wanted = {(index, plans) for index in range(1, size) for plans in (False, True)}
        end = time.monotonic() + CONNECT_S
        self._listener.settimeout(TICK_S)
        with self._listener:
            while missing := sorted({index for index, _ in wanted - found.keys()}):
                if time.monotonic() > end:
                    ranks = ", ".join(f"rank {index}" for index in missing)
                    raise FinwhaleError(f"not connected for {CONNECT_S:.0f} s: {ranks}")
                check()
                try:
                    connection, address = self._listener.accept()
                except TimeoutError:
                    continue
                admitted = self._admit(connection)
                key = admitted and (admitted.introduction.index, admitted.introduction.plans)
                if admitted is None or key not in wanted or key in found:
                    logger.warning("refused a connection from %s", address[0])
                    connection.close()
                    continue
                found[key] = admitted
        return [RemoteWorker(found[i, False], found[i, True]) for i in range(1, size)]

    def _admit(self, end: socket.socket) -> _Admitted | None:
        """Authenticate a connection. None: the other end does not know the secret."""
        connection = _connection(end)
        secret = self.invitation.secret
        try:
            with _limited(end, HANDSHAKE_S):
                deliver_challenge(connection, secret)
                answer_challenge(connection, secret)
                introduction = connection.recv()
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            return None
        return _Admitted(introduction, connection, end)


def work_at(placement: Placement) -> NoReturn:
    """Run this process's rank until rank 0 ends it.

    Raises:
        FinwhaleError: rank 0 cannot be reached.
    """
    begin = time.monotonic()
    store = join_store(placement.store, CONNECT_S)
    left = max(1.0, CONNECT_S - (time.monotonic() - begin))
    try:
        store.wait([_INVITATION], timedelta(seconds=left))
    except RuntimeError as error:
        raise FinwhaleError(
            f"rank {placement.rank.index} has waited {CONNECT_S:.0f} s for rank 0 to begin"
        ) from error
    port, secret = store.get(_INVITATION).decode().split()
    invitation = Invitation(placement.store.host, int(port), bytes.fromhex(secret))
    work_for(invitation, placement.rank, placement.local_index)


def work_for(invitation: Invitation, rank: Rank, local_index: int) -> NoReturn:
    """Run a rank here until rank 0 ends it.

    Raises:
        FinwhaleError: rank 0 cannot be reached.
    """
    try:
        control, plans = (
            _enter(
                invitation,
                Introduction(rank.index, plans, socket.gethostname(), local_index, os.getpid()),
            )
            for plans in (False, True)
        )
        _, level = control.recv()
    except (OSError, EOFError, AuthenticationError) as error:
        where = f"{invitation.host} port {invitation.port}"
        raise FinwhaleError(
            f"rank {rank.index} cannot connect to rank 0 on {where}: {error or 'refused'}"
        ) from error
    # Rank 0 decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    run_task(OwnerLink(rank, control, _PlanInbox(plans)), control, level)


class _PlanInbox:
    """A connection for plans (worker.Inbox)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (OSError, EOFError):
            os._exit(1)

    def beat(self) -> None:
        try:
            self._connection.send_bytes(b"")
        except OSError:
            os._exit(1)


def _enter(invitation: Invitation, introduction: Introduction) -> Connection:
    end = socket.create_connection((invitation.host, invitation.port), timeout=CONNECT_S / 2)
    connection = _connection(end)
    # Rank 0 may first accept other connections.
    with _limited(end, int(CONNECT_S)):
        answer_challenge(connection, invitation.secret)
        deliver_challenge(connection, invitation.secret)
        connection.send(introduction)
    end.close()
    return connection


def _connection(end: socket.socket) -> Connection:
    """A connection over a duplicate of a TCP socket, which stays open."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
    return Connection(os.dup(end.fileno()))


@contextlib.contextmanager
def _limited(end: socket.socket, seconds: int) -> Iterator[None]:
    """Within the context, reads and writes raise OSError after this time."""
    for limit in (seconds, 0):  # 0: no limit
        for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, name, struct.pack("@ll", limit, 0))
        if limit:
            yield
