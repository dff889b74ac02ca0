"""Prefixes of other servers: who is answered, and deadlines and failures, which are misses."""

import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from finwhale.config import EngineConfig
from finwhale.engine.plan.prefix_store import PrefixStore, RecordKind
from finwhale.engine.store import peers
from finwhale.engine.store.channel import (
    CODE_BYTES,
    FAILURES,
    HEAD,
    MOST_BYTES,
    MOST_FIRST_BYTES,
    NONCE_BYTES,
)
from finwhale.engine.store.channel import Channel as Connection
from finwhale.engine.store.directory import DirectoryStore
from finwhale.engine.store.peers import PeerServer, PeerStore
from finwhale.errors import FinwhaleError, ResourceError

from .test_directory_store import content, get, put, record

SIZES: dict[RecordKind, int] = {"block": 1000, "state": 3000}
SECRET = b"secret"
# A client's first bytes: its random number, and a message with a wrong code.
FIRST_BYTES = NONCE_BYTES + HEAD.size + 2
WRONG = HEAD.pack(2, b"c" * CODE_BYTES) + b"{}"
ABOUT = {"dtype": "float32", "device": "x"}


class Host:
    """A server with a store of its own.

    Args:
        others: hosts that it asks.
    """

    def __init__(
        self,
        path: Path,
        *others: "Host",
        secret: bytes = SECRET,
        about: dict[str, str] = ABOUT,
        port: int = 0,
    ) -> None:
        self.own = DirectoryStore(path, "f1", about)
        self.server = PeerServer(("127.0.0.1", port), self.own, secret, about, SIZES)
        self.port: int = self.server._listener.getsockname()[1]
        self.store: PrefixStore = self.server
        for host in others:
            self.store = self.asking(("127.0.0.1", host.port), secret)

    def asking(self, address: tuple[str, int], secret: bytes = SECRET) -> PeerStore:
        """Its store, which now asks the server at this address, too."""
        return PeerStore(self.store, address, secret, self.server._about)

    @property
    def last(self) -> PeerStore:
        """The part of the store that asks the last of the other hosts."""
        assert isinstance(self.store, PeerStore)
        return self.store

    def has(self, *numbers: int) -> list[bool]:
        return self.store.contains([record(number) for number in numbers])

    def read(self, number: int) -> bytes | None:
        return get(self.store, record(number))  # type: ignore[arg-type]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    """Makes hosts. No deadline passes on a slow machine unless a test shortens it."""
    for name in ("FIND_S", "READ_S", "TURN_S", "IDLE_S"):
        monkeypatch.setattr(peers, name, 300.0)
    made: list[Host] = []

    def one(*others: Host, **options: object) -> Host:
        made.append(Host(tmp_path / str(len(made)), *others, **options))
        return made[-1]

    yield one
    for host in made:
        host.store.close()


def connect(host: Host, secret: bytes = SECRET) -> Connection:
    """A connection as peers make it, by hand."""
    connection = socket.create_connection(("127.0.0.1", host.port))
    made = Connection(connection, secret, ("client", "server"), soon())
    made.send({})
    assert made.receive()["about"] == ABOUT
    return made


def soon() -> float:
    return time.monotonic() + 300


def ask(connection: Connection, number: int) -> bytes | None:
    """What a peer gets that asks for a block."""
    connection.send({"read": [record(number).key.hex(), "block", ""]})
    answer = connection.receive()
    if answer["checksum"] is None:
        return None
    assert answer == {"checksum": zlib.crc32(content(number)), "size": 1000}
    data = bytearray(1000)
    connection.receive_bytes(memoryview(data))
    return bytes(data)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends a connection and sends nothing before."""
    connection.settimeout(300)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


# --- What is found --------------------------------------------------------------------------------


def test_what_a_peer_has_is_found_and_kept(make: Callable[..., Host]) -> None:
    first = make()
    second = make(first)
    put(first.own, record(1), content(1))
    put(first.own, record(2, "state"), content(2, 3000))
    put(second.own, record(3), content(3))
    assert second.has(1, 2, 3) == [True, False, True]
    assert second.store.contains([record(2, "state"), record(1, owner=b"x" * 16)]) == [True, False]
    assert [second.read(number) for number in (1, 2, 3)] == [content(1), None, content(3)]
    assert get(second.store, record(2, "state"), 3000) == content(2, 3000)  # type: ignore[arg-type]
    assert second.own.contains([record(1), record(2, "state")]) == [True, True]
    assert first.own.contains([record(3)]) == [False]
    first.store.close()
    assert second.has(1) == [True] and second.read(1) == content(1)


def test_each_peer_is_asked_for_what_the_ones_before_lack(make: Callable[..., Host]) -> None:
    first, second = make(), make()
    third = make(first, second)
    put(first.own, record(1), content(1))
    put(second.own, record(2), content(2))
    assert third.has(1, 2, 3) == [True, True, False]
    assert [third.read(number) for number in (1, 2, 3)] == [content(1), content(2), None]


def test_many_threads(make: Callable[..., Host]) -> None:
    first = make()
    second = make(first)
    for number in range(40):
        put(first.own, record(number), content(number))

    def works(number: int) -> bool:
        return second.has(number) == [True] and second.read(number) == content(number)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(works, range(40)))


# --- Who is answered ------------------------------------------------------------------------------


def test_a_stranger_learns_and_holds_nothing(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has proved that it knows the secret, it gets random bytes alone."""
    host = make()
    address = ("127.0.0.1", host.port)
    with pytest.raises(FAILURES, match="another prefix_salt"):
        connect(host, b"guess")
    nonce = b"n" * NONCE_BYTES
    for data in (
        nonce + WRONG,
        nonce + HEAD.pack(MOST_FIRST_BYTES + 1, bytes(CODE_BYTES)),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody\r\n\r\n",
    ):
        with socket.create_connection(address) as stranger:
            assert len(stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            stranger.sendall(data)
            assert is_closed(stranger)
    monkeypatch.setattr(peers, "TURN_S", 0.05)
    with socket.create_connection(address) as silent:
        silent.recv(NONCE_BYTES, socket.MSG_WAITALL)
        assert is_closed(silent)


def test_a_proof_serves_once_and_on_one_side(
    make: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    """What a peer says to a false server is no proof to another one, nor to the peer itself."""
    host, heard = make(), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reflect() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"n" * NONCE_BYTES)
                heard.extend(connection.recv(FIRST_BYTES, socket.MSG_WAITALL))
                connection.sendall(heard[NONCE_BYTES:])
                assert is_closed(connection)

        thread = threading.Thread(target=reflect)
        thread.start()
        assert host.asking(listener.getsockname()).contains([record(1)]) == [False]
        thread.join()
    assert "has it another prefix_salt?" in caplog.text and len(heard) == FIRST_BYTES
    with socket.create_connection(("127.0.0.1", host.port)) as replay:
        replay.recv(NONCE_BYTES, socket.MSG_WAITALL)
        replay.sendall(heard)
        assert is_closed(replay)


def test_connections_beyond_the_limit_are_closed(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MOST_CONNECTIONS", 3)
    host = make()
    put(host.own, record(1), content(1))
    peer = connect(host)
    strangers = [socket.create_connection(("127.0.0.1", host.port)) for _ in range(2)]
    for stranger in strangers:
        stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)
    threads = threading.active_count()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", host.port)) as more:
            assert is_closed(more)
    assert threading.active_count() <= threads
    assert ask(peer, 1) == content(1)
    strangers[0].close()
    wait_for(lambda: len(host.server._connections) == 2)
    wait_for(lambda: _connects(host))
    strangers[1].close()


def _connects(host: Host) -> bool:
    try:
        connect(host).close()
    except FAILURES:
        return False
    return True


def test_a_server_that_does_not_know_the_secret_is_not_believed(
    make: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no name of a record, and its answers are misses."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"n" * NONCE_BYTES + WRONG)
            while data := connection.recv(10_000):
                heard.append(data)

        thread = threading.Thread(target=pretend)
        thread.start()
        host = make()
        store = host.asking(listener.getsockname())
        assert store.contains([record(1)]) == [False]
        thread.join()
    assert len(b"".join(heard)) == FIRST_BYTES
    assert "has it another prefix_salt?" in caplog.text
    store.close()


def test_another_salt_is_said_once(
    make: Callable[..., Host], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FIRST_PAUSE_S", 1e-9)
    first = make(secret=b"another")
    second = make(first)
    put(first.own, record(1), content(1))
    for _ in range(3):
        assert second.has(1) == [False] and second.read(1) is None
    assert len(caplog.records) == 1
    assert "has it another prefix_salt" in caplog.text


def test_another_fingerprint_is_said_once_and_not_asked(
    make: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    first = make(about={**ABOUT, "dtype": "bfloat16", "device": "y"})
    second = make(first)
    put(first.own, record(1), content(1))
    for _ in range(3):
        assert second.has(1) == [False] and second.read(1) is None
    assert len(caplog.records) == 1
    assert "its prefixes are of no use here: other dtype, device" in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        {"find": [["00", "../../../etc/passwd", ""]]},
        {"find": [["..", "block", ""]]},
        {"find": [["00", "block", "/"]]},
        {"find": [["00", "block"]]},
        {"find": 5},
        {"read": None},
        {"read": {"a": 1, "b": 2, "c": 3}},
        {"read": ["00", "../../../etc/passwd", ""]},
        {"write": ["00", "block", ""]},
    ],
)
def test_a_wrong_question_ends_the_connection(
    make: Callable[..., Host], message: dict[str, object]
) -> None:
    host = make()
    connection = connect(host)
    connection.send(message)
    assert is_closed(connection._connection)
    wait_for(lambda: not host.server._connections)
    assert ask(connect(host), 1) is None


def test_a_long_or_changed_message_ends_the_connection(make: Callable[..., Host]) -> None:
    host = make()
    long, changed, again = (connect(host) for _ in range(3))
    long._connection.sendall(HEAD.pack(MOST_BYTES + 1, bytes(CODE_BYTES)))
    text = b'{"find": []}'
    second = (1).to_bytes(8, "big")
    code = changed._code("client", second + text)
    changed._connection.sendall(HEAD.pack(len(text), code) + text.replace(b"f", b"g"))
    right = HEAD.pack(len(text), again._code("client", second + text)) + text
    again._connection.sendall(right)
    assert again.receive() == {"found": []}
    again._connection.sendall(right)  # the same once more
    for connection in (long, changed, again):
        assert is_closed(connection._connection)


# --- Failures -------------------------------------------------------------------------------------


def test_a_dead_peer_is_asked_again_after_a_pause(
    make: Callable[..., Host], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    second = make(first)
    put(first.own, record(1), content(1))
    assert second.has(1) == [True]
    port = first.port
    first.store.close()
    wait_for(lambda: not first.server._connections)
    assert second.has(1) == [False] and second.read(1) is None
    peer = second.last
    assert peer._pause == peers.FIRST_PAUSE_S and len(caplog.records) == 1
    third = make(port=port)
    put(third.own, record(1), content(1))
    assert second.has(1) == [False]  # it is left alone
    peer._asked_from = 0.0
    assert second.has(1) == [True] and second.read(1) == content(1)
    assert peer._pause == 0.0


def test_pauses_become_longer(make: Callable[..., Host], caplog: pytest.LogCaptureFixture) -> None:
    first = make()
    second = make(first)
    first.store.close()
    peer, pauses = second.last, []
    for _ in range(10):
        peer._asked_from = 0.0
        second.has(1)
        pauses.append(peer._pause)
    assert pauses == [10, 20, 40, 80, 160, 320, 640, 900, 900, 900]
    assert len(caplog.records) == 1


def test_a_peer_that_restarts_is_no_failure(make: Callable[..., Host]) -> None:
    first = make()
    second = make(first)
    assert second.has(1) == [False]
    port = first.port
    first.store.close()
    wait_for(lambda: not first.server._connections)
    third = make(port=port)
    put(third.own, record(1), content(1))
    assert second.has(1) == [True] and second.read(1) == content(1)


@contextmanager
def answering(answer: Callable[[Connection], None]) -> Iterator[tuple[str, int]]:
    """The address of a server that knows the secret, and answers each question as it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(*FAILURES):
                channel = Connection(connection, SECRET, ("server", "client"), soon())
                channel.receive()
                channel.send({"about": ABOUT})
                while True:
                    channel.receive()
                    answer(channel)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def test_a_silent_server(
    make: Callable[..., Host], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that accepts connections and says nothing costs one deadline, and for several threads
    one pause.
    """
    monkeypatch.setattr(peers, "FIND_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = make().asking(listener.getsockname())
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(store.contains, [[record(1)]] * 20)) == [[False]] * 20
        assert store.contains([record(1)]) == [False]
    assert store._pause == peers.FIRST_PAUSE_S
    assert len(caplog.records) == 1 and "timed out" in caplog.text


RIGHT = {"checksum": zlib.crc32(content(1)), "size": 1000}


@pytest.mark.parametrize("how", ["late", "in the middle", "ended", "damaged"])
def test_a_record_that_does_not_arrive_whole(
    make: Callable[..., Host],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """It is a miss and is not kept. After the pause, the peer is asked over a new connection."""
    failing = True

    def answer(channel: Connection) -> None:
        channel.send(RIGHT)
        data = content(1)
        if not failing:
            channel.send_bytes(data)
        elif how == "damaged":
            channel.send_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
        elif how != "late":
            channel.send_bytes(data[:500])
        if failing and how == "ended":
            raise ConnectionError

    host = make()
    if how in ("late", "in the middle"):
        monkeypatch.setattr(peers, "READ_S", 0.2)
    with answering(answer) as address:
        host.store = store = host.asking(address)
        assert host.read(1) is None and host.own.contains([record(1)]) == [False]
        wanted = {"ended": "it ended the connection", "damaged": "a record was damaged on the way"}
        assert wanted.get(how, "timed out") in caplog.text and not store._idle
        monkeypatch.setattr(peers, "READ_S", 300.0)
        assert host.read(1) is None  # it is left alone
        failing, store._asked_from = False, 0.0
        assert host.read(1) == content(1) and host.own.contains([record(1)]) == [True]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"checksum": 5},
        {"checksum": RIGHT["checksum"], "size": 999},
        {"checksum": RIGHT["checksum"], "size": 10**12},
        {"checksum": "x", "size": 1000},
        {"checksum": [1], "size": 1000},
        {"found": []},
        {"found": [True, True]},
        {"found": 5},
        {"found": ["yes"], "checksum": None},
    ],
)
def test_a_server_that_answers_nonsense(make: Callable[..., Host], answer: dict[str, Any]) -> None:
    """Even if it knows the secret, its answers are misses."""

    def give(channel: Connection) -> None:
        channel.send(answer)
        channel.send_bytes(content(1))

    with answering(give) as address:
        store = make().asking(address)
        assert store.contains([record(1)]) == [False]
        store._asked_from = 0.0
        assert not store.read(record(1), memoryview(bytearray(1000)))
        assert store._store.contains([record(1)]) == [False]


@pytest.mark.parametrize("about", [5, None, "x", [1], {"dtype": 1}, {}])
def test_a_server_that_introduces_itself_with_nonsense(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, about: object
) -> None:
    monkeypatch.setitem(globals(), "ABOUT", about)
    with answering(lambda channel: None) as address:
        store = make(about={"dtype": "float32"}).asking(address)
        assert store.contains([record(1)]) == [False] and store._pause > 0


@pytest.mark.parametrize("taken", [0, 100_000])
def test_a_client_that_does_not_read(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """It holds a thread of the server until a deadline, and nobody else waits for it."""
    monkeypatch.setitem(SIZES, "state", 2**25)  # more than the system buffers
    first = make()
    second = make(first)
    put(first.own, record(1), content(1))
    assert second.has(1) == [True]
    assert first.own.write(record(2, "state"), memoryview(bytearray(2**25)))
    slow = connect(first)
    monkeypatch.setattr(peers, "TURN_S", 1.0)
    slow.send({"read": [record(2).key.hex(), "state", ""]})
    assert slow.receive()["size"] == 2**25
    monkeypatch.setattr(peers, "TURN_S", 300.0)  # the server has begun to wait
    slow.receive_bytes(memoryview(bytearray(taken)))
    assert second.read(1) == content(1)
    wait_for(lambda: len(first.server._connections) == 1)  # that of the second host
    with pytest.raises(ConnectionError):
        slow.receive_bytes(memoryview(bytearray(2**25)))


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefix_peers": "a:5"}, "prefix_peers needs prefix_store and prefix_salt"),
        (
            {"prefix_peer_port": "5", "prefix_store": "/x"},
            "prefix_peer_port needs prefix_store and prefix_salt",
        ),
        ({"prefix_peers": 5}, "prefix_peers must be a string, got int"),
        *(
            (
                {"prefix_peers": given, "prefix_store": "/x", "prefix_salt": "s"},
                f"prefix_peers must be [HOST:]PORT (5557, 10.0.0.1:5557), got {got!r}",
            )
            for given, got in (
                ("", ""), ("a:5,", ""), ("a", "a"), ("a:0", "a:0"), ("a:99999", "a:99999"),
                ("a:-1", "a:-1"), ("a:1:b", "a:1:b"),
            )
        ),
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(FinwhaleError) as caught:
        EngineConfig(**options)
    assert str(caught.value) == message


def test_a_port_that_is_taken(make: Callable[..., Host]) -> None:
    port = make().port
    with pytest.raises(ResourceError, match=f"prefix_peer_port 127.0.0.1:{port} cannot be used"):
        make(port=port)
