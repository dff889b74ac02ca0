"""A prefix store that asks the servers of other hosts for the records that its own store lacks.

Each server answers its peers over TCP (channel.py). It reads a record that a peer wants into memory
that is registered for remote reads, and *leases* it: the record stays there until the peer's next
message, the end of the connection, or a deadline. The peer reads it (nixl_reads.py) and checks its
checksum.

Whatever fails is a miss. A peer that fails or is too slow is left alone for a while, so that it
delays no other request.
"""

import base64
import hashlib
import logging
import mmap
import queue
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from finwhale.config import EngineConfig
from finwhale.engine.plan.prefix_store import PrefixStore, Record, RecordKind
from finwhale.engine.store.channel import FAILURES, Channel
from finwhale.errors import ResourceError
from finwhale.extras import import_extra
from finwhale.options import host_and_port

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A peer has this long to say which records it has, and to give one. A lease is longer than any
# read, so no record that arrives in time has been overwritten.
FIND_S, READ_S, LEASE_S = 1.0, 2.0, 5.0
# A server waits this long for a proof of the secret, for a whole message, and for a next one.
HANDSHAKE_S, MESSAGE_S, IDLE_S = 2.0, 2.0, 60.0
MOST_CONNECTIONS = 64  # of one server, each with a thread
SLOTS = 16  # for leases, and as many for reads, which 8 threads call
SLOT_WAIT_S = 1.0  # what a lease waits for a slot
POLL_S = 0.0005  # between two looks at a transfer
# A peer that has failed is left alone for this long, and then for twice as long each time.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 900.0
ALIGN = 4096
LOOPBACK = ("localhost", "::1")


class RemoteReads(Protocol):
    """Reads other processes' registered memory into this process's. Several threads may call it.

    Attributes:
        address: where this process's registered memory begins, as other processes name it.
        metadata: what others need to read it.
    """

    address: int
    metadata: bytes

    def connect(self, metadata: bytes) -> bytes:
        """Prepare to read from another process; returns its name. Raises OSError."""
        ...

    def read(
        self, remote: bytes, address: int, offset: int, size: int
    ) -> Callable[[], bool | None]:
        """Begin to read, to `offset` of this process's memory. The result tells whether the read
        has ended well; None: it goes on, and may still write.
        """
        ...

    def advance(self) -> None:
        """Let the reads of others make progress."""
        ...


@dataclass(frozen=True, slots=True)
class Shared:
    """What a server and its peers agree on, and the registered memory.

    Attributes:
        about: what decides the records' bytes (fingerprint.py).
        sizes: bytes of a record, by kind.
    """

    secret: bytes
    about: dict[str, str]
    sizes: Mapping[RecordKind, int]
    memory: memoryview
    reads: RemoteReads


class Slots:
    """Places in the registered memory, each for one record."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        # Slots that a transfer may still write to.
        self._late: queue.SimpleQueue[tuple[Callable[[], bool | None], int]] = queue.SimpleQueue()
        for offset in offsets:
            self._free.put(offset)

    def take(self, deadline: float) -> int | None:
        with suppress(queue.Empty):
            for _ in range(self._late.qsize()):
                self.free(*self._late.get_nowait())
        with suppress(queue.Empty):
            return self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        return None

    def free(self, ended: Callable[[], bool | None], offset: int) -> None:
        """Free a slot when its transfer has ended. No transfer can be cancelled."""
        if ended() is None:
            self._late.put((ended, offset))
        else:
            self._free.put(offset)


class PeerServer:
    """Leases the records of a store to peers.

    Raises:
        ResourceError: the address cannot be used.
    """

    def __init__(
        self, address: tuple[str, int], store: PrefixStore, shared: Shared, slots: Slots
    ) -> None:
        self._store, self._shared, self._slots = store, shared, slots
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._sockets: set[socket.socket] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            name = f"{address[0]}:{address[1]}"
            raise ResourceError(f"prefix_peer_port {name} cannot be used: {error}") from None
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="prefix-peers", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        for one in (self._listener, *self._sockets.copy()):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # closed, or no file descriptor is free
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            self._sockets.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        shared, deadline = self._shared, time.monotonic() + HANDSHAKE_S
        try:
            channel = Channel(connection, shared.secret, ("server", "client"), deadline)
            metadata = base64.b64encode(shared.reads.metadata).decode()
            channel.send({"about": shared.about, "metadata": metadata}, deadline)
            while not self._closed and channel.readable(IDLE_S):
                question = channel.receive(time.monotonic() + MESSAGE_S)
                if "find" in question:
                    records = [self._record(*words) for words in question["find"]]
                    found = self._store.contains(records)
                    channel.send({"found": found}, time.monotonic() + MESSAGE_S)
                elif "lease" in question:
                    self._lease(channel, self._record(*question["lease"]))
        except FAILURES as error:
            logger.debug("a connection of the prefix store's peers ends: %s", error)
        finally:
            self._sockets.discard(connection)
            connection.close()
            self._places.release()

    def _lease(self, channel: Channel, record: Record) -> None:
        """Lease a record to a peer until its next message."""
        answer: dict[str, Any] = {"address": None}
        slot = self._slots.take(time.monotonic() + SLOT_WAIT_S)
        try:
            if slot is not None:
                place = self._shared.memory[slot : slot + self._shared.sizes[record.kind]]
                if self._store.read(record, place):
                    address = self._shared.reads.address + slot
                    answer = {"address": address, "checksum": zlib.crc32(place)}
            until = time.monotonic() + LEASE_S
            channel.send(answer, until)
            while answer["address"] and time.monotonic() < until and not channel.readable(POLL_S):
                self._shared.reads.advance()
        finally:
            if slot is not None:
                self._slots.free(_ended, slot)

    def _record(self, key: str, kind: RecordKind, owner: str) -> Record:
        if kind not in self._shared.sizes:
            raise ValueError(f"it asks for a record of kind {kind!r}")
        return Record(bytes.fromhex(key), kind, bytes.fromhex(owner))


class Peer:
    """Another host's server. No method raises."""

    def __init__(self, address: tuple[str, int], shared: Shared, slots: Slots) -> None:
        self._address, self._shared, self._slots = address, shared, slots
        self._mutex = threading.Lock()
        self._idle: list[tuple[Channel, bytes]] = []
        self._pause, self._asked_from = 0.0, 0.0
        self._told = ""

    def contains(self, records: Sequence[Record]) -> list[bool]:
        def ask(channel: Channel, remote: bytes, deadline: float) -> list[bool]:
            channel.send({"find": [_words(record) for record in records]}, deadline)
            found = [one is True for one in channel.receive(deadline)["found"]]
            if len(found) != len(records):
                raise ValueError("it answers another question")
            return found

        return self._ask(ask, FIND_S) or [False] * len(records)

    def read(self, record: Record, into: memoryview) -> bool:
        def ask(channel: Channel, remote: bytes, deadline: float) -> bool:
            channel.send({"lease": _words(record)}, deadline)
            lease = channel.receive(deadline)
            if lease["address"] is None:
                return False
            self._fetch(remote, lease["address"], into, deadline)
            channel.send({"done": True}, deadline)
            if zlib.crc32(into) != lease["checksum"]:
                raise ValueError("a record was damaged on the way")
            return True

        return self._ask(ask, READ_S) or False

    def _fetch(self, remote: bytes, address: int, into: memoryview, deadline: float) -> None:
        """Copy a leased record. The transfer writes to a slot, not to `into`: after the deadline it
        may still write.
        """
        slot = self._slots.take(deadline)
        if slot is None:
            raise TimeoutError("earlier transfers have not ended")
        ended: Callable[[], bool | None] = _ended
        try:
            ended = self._shared.reads.read(remote, address, slot, len(into))
            while (well := ended()) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
                time.sleep(POLL_S)
            if not well:
                raise ConnectionError("a transfer failed")
            into[:] = self._shared.memory[slot : slot + len(into)]
        finally:
            self._slots.free(ended, slot)

    def _ask(self, ask: Callable[[Channel, bytes, float], T], seconds: float) -> T | None:
        """Ask a question over a connection that no other thread uses; None: there is no answer."""
        deadline, connected = time.monotonic() + seconds, None
        try:
            with self._mutex:
                if time.monotonic() < self._asked_from:
                    return None
                while self._idle and connected is None:
                    connected = self._idle.pop()
                    if connected[0].readable(0):  # the peer has closed it
                        connected[0].close()
                        connected = None
            connected = connected or self._connect(deadline)
            answer = ask(*connected, deadline)
        except FAILURES as error:
            if connected is not None:
                connected[0].close()
            self._leave_alone(error)
            return None
        with self._mutex:
            self._idle.append(connected)
            self._pause, self._told = 0.0, ""
        return answer

    def _connect(self, deadline: float) -> tuple[Channel, bytes]:
        left = max(0.001, deadline - time.monotonic())
        connection = socket.create_connection(self._address, left)
        try:
            channel = Channel(connection, self._shared.secret, ("client", "server"), deadline)
            hello = channel.receive(deadline)
            own, theirs = self._shared.about, hello["about"]
            if theirs != own:
                names = ", ".join(name for name in own if own[name] != theirs.get(name))
                raise ValueError(f"its prefixes are of no use here: other {names}")
            return channel, self._shared.reads.connect(base64.b64decode(hello["metadata"]))
        except BaseException:
            connection.close()
            raise

    def _leave_alone(self, error: Exception) -> None:
        self.close()
        with self._mutex:
            if time.monotonic() < self._asked_from:
                return  # another thread has seen the same
            self._pause = min(2 * self._pause or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            self._asked_from = time.monotonic() + self._pause
            told, self._told = self._told, str(error)
        if told != str(error):
            logger.warning("the prefix store does not ask peer %s:%d: %s", *self._address, error)

    def close(self) -> None:
        with self._mutex:
            idle, self._idle = self._idle, []
        for channel, _ in idle:
            channel.close()


class PeerStore:
    """A store that asks peers for what it lacks (plan/prefix_store.py has the contract).

    It keeps what it got from them: the blocks that it saves itself continue these prefixes, and
    would be of no use without them once the peer is gone.
    """

    def __init__(self, own: PrefixStore, peers: Sequence[Peer], server: PeerServer | None) -> None:
        self._own, self._peers, self._server = own, peers, server
        self.write = own.write

    def contains(self, records: Sequence[Record]) -> list[bool]:
        found = self._own.contains(records)
        for peer in self._peers:
            missing = [number for number, has in enumerate(found) if not has]
            if missing:
                answers = peer.contains([records[number] for number in missing])
                for number, has in zip(missing, answers, strict=True):
                    found[number] = has
        return found

    def read(self, record: Record, into: memoryview) -> bool:
        if self._own.read(record, into):
            return True
        found = any(peer.read(record, into) for peer in self._peers)
        if found:
            self._own.write(record, into)
        return found

    def close(self) -> None:
        for part in (self._server, *self._peers, self._own):
            if part is not None:
                part.close()


def open_peers(
    config: EngineConfig,
    own: PrefixStore,
    about: dict[str, str],
    sizes: Mapping[RecordKind, int],
) -> PrefixStore:
    """Let a store ask the peers that the options name, and answer them.

    Args:
        about, sizes: as in Shared.

    Raises:
        FinwhaleError: the extra "nixl" is missing, or the port cannot be used.
    """
    port, names = config.prefix_peer_port, config.prefix_peers
    if port is None and names is None:
        return own
    assert config.prefix_salt is not None  # EngineConfig checks it
    server = [] if port is None else [host_and_port("prefix_peer_port", port)]
    others = [host_and_port("prefix_peers", one) for one in names.split(",")] if names else []
    size = -(-max(sizes.values()) // ALIGN) * ALIGN
    memory = memoryview(mmap.mmap(-1, 2 * SLOTS * size))
    loopback = all(h.startswith("127.") or h in LOOPBACK for h, _ in server + others)
    reads = import_extra("finwhale.engine.store.nixl_reads").NixlReads(memory, loopback=loopback)
    # Whoever does not know the salt of the records' names gets no record.
    secret = hashlib.blake2b(config.prefix_salt.encode(), person=b"prefix-peers").digest()
    shared = Shared(secret, about, sizes, memory, reads)
    copies, leases = (
        Slots(range(first * size, (first + SLOTS) * size, size)) for first in (0, SLOTS)
    )
    peers = [Peer(address, shared, copies) for address in others]
    return PeerStore(own, peers, PeerServer(server[0], own, shared, leases) if server else None)


def _words(record: Record) -> list[str]:
    return [record.key.hex(), record.kind, record.owner.hex()]


def _ended() -> bool:
    """The state of a slot that no transfer writes to."""
    return True
