"""A prefix store that asks the servers of other hosts for the records that its own store lacks.

A server answers its peers over TCP (channel.py):

    {}                                   ->  {"about": what decides the bytes of its records}
    {"find": [[key, kind, owner], ...]}  ->  {"found": [bool, ...]}
    {"read": [key, kind, owner]}         ->  {"checksum": CRC-32, "size": bytes} and the record, or
                                             {"checksum": null}

Whatever fails is a miss. A peer that fails or is too slow is left alone for a while, so that it
delays no other request.
"""

import hashlib
import logging
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from finwhale.config import EngineConfig
from finwhale.engine.plan.prefix_store import PrefixStore, Record, RecordKind
from finwhale.engine.store.channel import FAILURES, Channel
from finwhale.engine.store.directory import differing
from finwhale.errors import ResourceError
from finwhale.options import host_and_port

logger = logging.getLogger(__name__)

# A peer has this long to say which records it has, and to give one.
FIND_S, READ_S = 1.0, 2.0
# A server waits this long for each of these: the first message, the rest of a question, and until
# an answer is taken. A connection without questions ends after IDLE_S.
TURN_S, IDLE_S = 2.0, 10.0
# Of one server. Each has a thread and room for one record: 200 MB for Flash's states of 5 MB.
MOST_CONNECTIONS = 40
# A peer that has failed is left alone for this long, and then for twice as long each time.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 900.0


class PeerServer:
    """A store that also answers peers (plan/prefix_store.py has the contract).

    Args:
        secret: which all peers know.
        about: what decides the records' bytes (fingerprint.py).
        sizes: bytes of a record, by kind.

    Raises:
        ResourceError: the address cannot be used.
    """

    def __init__(
        self,
        address: tuple[str, int],
        store: PrefixStore,
        secret: bytes,
        about: dict[str, str],
        sizes: Mapping[RecordKind, int],
    ) -> None:
        self._store, self._secret, self._about, self._sizes = store, secret, about, sizes
        self.contains, self.read, self.write = store.contains, store.read, store.write
        self._connections: set[socket.socket] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            name = f"{address[0]}:{address[1]}"
            raise ResourceError(f"prefix_peer_port {name} cannot be used: {error}") from None
        threading.Thread(target=self._accept, name="prefix-peers", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for one in (self._listener, *self._connections.copy()):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self._listener.close()
        self._store.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # closed, or no file descriptor is free
                continue
            if len(self._connections) >= MOST_CONNECTIONS:
                connection.close()
                continue
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            deadline = time.monotonic() + TURN_S
            channel = Channel(connection, self._secret, ("server", "client"), deadline)
            channel.receive()
            channel.send({"about": self._about})
            buffer = memoryview(bytearray(max(self._sizes.values())))
            while not self._closed and channel.readable(IDLE_S):
                channel.deadline = time.monotonic() + TURN_S
                answer, content = self._answer(channel.receive(), buffer)
                channel.deadline = time.monotonic() + TURN_S
                channel.send(answer)
                channel.send_bytes(content)
        except FAILURES as error:
            logger.debug("a connection of the prefix store's peers ends: %s", error)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(
        self, question: Mapping[str, Any], buffer: memoryview
    ) -> tuple[dict[str, Any], memoryview]:
        """The answer to a question, and the bytes that follow it."""
        if "find" in question:
            records = [self._record(*words) for words in question["find"]]
            return {"found": self._store.contains(records)}, buffer[:0]
        record = self._record(*question["read"])
        content = buffer[: self._sizes[record.kind]]
        if not self._store.read(record, content):
            return {"checksum": None}, buffer[:0]
        return {"checksum": zlib.crc32(content), "size": len(content)}, content

    def _record(self, key: str, kind: RecordKind, owner: str) -> Record:
        if kind not in self._sizes:
            raise ValueError(f"it asks for a record of kind {kind!r}")
        return Record(bytes.fromhex(key), kind, bytes.fromhex(owner))


class PeerStore:
    """A store that asks one peer for what another store lacks (plan/prefix_store.py has the
    contract).

    It keeps what it got there: the blocks that are saved here continue these prefixes, and would be
    of no use without them once the peer is gone.

    Args:
        store: that is asked first, and keeps the records.
        secret, about: as in PeerServer.
    """

    def __init__(
        self, store: PrefixStore, address: tuple[str, int], secret: bytes, about: dict[str, str]
    ) -> None:
        self._store, self._address, self._secret, self._about = store, address, secret, about
        self.write = store.write
        self._mutex = threading.Lock()
        self._idle: list[Channel] = []
        self._pause, self._asked_from, self._told = 0.0, 0.0, ""

    def contains(self, records: Sequence[Record]) -> list[bool]:
        found = self._store.contains(records)
        if all(found):
            return found
        with suppress(*FAILURES), self._channel(FIND_S) as channel:
            missing = [number for number, has in enumerate(found) if not has]
            channel.send({"find": [_words(records[number]) for number in missing]})
            answers = dict(zip(missing, channel.receive()["found"], strict=True))
            return [has or answers[number] is True for number, has in enumerate(found)]
        return found

    def read(self, record: Record, into: memoryview) -> bool:
        if self._store.read(record, into):
            return True
        with suppress(*FAILURES), self._channel(READ_S) as channel:
            channel.send({"read": _words(record)})
            answer = channel.receive()
            if answer["checksum"] is None:
                return False
            if answer["size"] != len(into):
                raise ValueError("it has a record of another size")
            channel.receive_bytes(into)
            if zlib.crc32(into) != answer["checksum"]:
                raise ValueError("a record was damaged on the way")
            self.write(record, into)
            return True
        return False

    @contextmanager
    def _channel(self, seconds: float) -> Iterator[Channel]:
        """A connection that no other thread uses, with a deadline.

        Raises one of FAILURES, or what the caller has raised of them, if the peer gives no answer.
        """
        deadline, channel = time.monotonic() + seconds, None
        with self._mutex:
            if time.monotonic() < self._asked_from:
                raise TimeoutError("it is left alone")
            while self._idle and channel is None:
                channel = self._idle.pop()
                if channel.readable(0):  # the peer has closed it
                    channel.close()
                    channel = None
        try:
            channel = channel or self._connect(deadline)
            channel.deadline = deadline
            yield channel
        except FAILURES as error:
            if channel is not None:
                channel.close()
            self._leave_alone(error)
            raise
        with self._mutex:
            self._idle.append(channel)
            self._pause, self._told = 0.0, ""

    def _connect(self, deadline: float) -> Channel:
        left = max(0.001, deadline - time.monotonic())
        connection = socket.create_connection(self._address, left)
        try:
            channel = Channel(connection, self._secret, ("client", "server"), deadline)
            channel.send({})
            if names := differing(self._about, dict(channel.receive()["about"])):
                raise ValueError(f"its prefixes are of no use here: other {', '.join(names)}")
            return channel
        except BaseException:
            connection.close()
            raise

    def _leave_alone(self, error: Exception) -> None:
        with self._mutex:
            self._close_idle()
            if time.monotonic() < self._asked_from:
                return  # another thread has seen the same
            self._pause = min(2 * self._pause or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._asked_from = time.monotonic() + self._pause
            if self._told != str(error):
                self._told = str(error)
                logger.warning(
                    "the prefix store does not ask peer %s:%d: %s", *self._address, error
                )

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        self._close_idle()
        self._store.close()


def open_peers(
    config: EngineConfig, own: PrefixStore, about: dict[str, str], sizes: Mapping[RecordKind, int]
) -> PrefixStore:
    """Let a store answer the servers of other hosts, and ask those that the options name.

    Args:
        about, sizes: as in PeerServer.

    Raises:
        ResourceError: the port cannot be used.
    """
    port, names = config.prefix_peer_port, config.prefix_peers
    if port is None and names is None:
        return own
    assert config.prefix_salt is not None  # EngineConfig checks it
    # Whoever does not know the salt of the records' names gets no record.
    secret = hashlib.blake2b(config.prefix_salt.encode(), person=b"prefix-peers").digest()
    store = own
    if port is not None:
        address = host_and_port("prefix_peer_port", port)
        store = PeerServer(address, own, secret, about, sizes)
    for name in names.split(",") if names else ():
        store = PeerStore(store, host_and_port("prefix_peers", name), secret, about)
    return store


def _words(record: Record) -> list[str]:
    return [record.key.hex(), record.kind, record.owner.hex()]
