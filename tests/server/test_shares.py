"""No user shuts out another: those of keys, of addresses, of a proxy, and of a Unix socket."""

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from finwhale.errors import FinwhaleError, QueueFullError
from finwhale.server.config import ServerConfig
from finwhale.server.edge.listening import user_of
from finwhale.server.edge.shares import Shares

from .running import MODEL, RunningServer
from .test_limits import wait_until

Start = Callable[..., RunningServer]
KEYS = ("ann:secret-of-ann", "ann:ann-s-next-key", "bob:secret-of-bob")


def most(shares: Shares, user: str, count: int = 1) -> int:
    """Takes units until the shares refuse. Returns how many."""
    taken = 0
    while True:
        try:
            shares.check(user, count)
        except QueueFullError:
            return taken
        shares.add(user, count)
        taken += count


def test_each_user_leaves_room_for_the_next() -> None:
    shares = Shares("sequences", lambda: 100)
    with pytest.raises(QueueFullError, match="the server is full: 0 of 100 sequences"):
        shares.check("ann", 101)
    assert [most(shares, user) for user in "abcdefg"] == [50, 25, 13, 6, 3, 2, 1]
    with pytest.raises(QueueFullError, match="the server is full: 100 of 100"):
        shares.check("h")
    # A user who has had more than a share gets no more before the others have theirs.
    shares.add("a", -30)
    with pytest.raises(QueueFullError, match="your share is full: 20 of 100 sequences are yours"):
        shares.check("a", 6)
    shares.check("b", 1)
    for user, count in {"a": 20, "b": 25, "c": 13, "d": 6, "e": 3, "f": 2, "g": 1}.items():
        shares.add(user, -count)
    assert shares.total == 0 and not shares._taken


@pytest.mark.parametrize("size", range(1, 10))
def test_small_numbers(size: int) -> None:
    shares = Shares("uploads", lambda: size)
    first = most(shares, "ann")
    assert first == max(1, (size + 1) // 2)
    assert (most(shares, "bob") > 0) == (size > 1)


def test_a_large_request_fits_an_idle_server() -> None:
    shares = Shares("sequences", lambda: 100)
    with shares.taken("ann", 100), pytest.raises(QueueFullError):
        shares.check("bob")
    with shares.taken("bob", 1), pytest.raises(QueueFullError, match="your share"):
        shares.check("ann", 99)


def test_what_is_shared_by_all() -> None:
    shares = Shares("sequences", lambda: 100, lambda: 60)
    assert most(shares, "ann") == 80, "all of what is shared, and half of the rest"
    assert most(shares, "bob") == 10
    # Nobody's share is less because others have what is shared.
    shares = Shares("sequences", lambda: 100, lambda: 60)
    shares.add("ann", 40)
    assert most(shares, "bob") == 40


def test_users_of_addresses() -> None:
    for same in (
        ("192.0.2.1", "::ffff:192.0.2.1", "::FFFF:c000:201"),
        ("2001:db8:1:2::3", "2001:db8:1:2:ffff::", "2001:db8:1:2::/64".removesuffix("/64")),
        ("unix", "unknown", "_hidden", "1.2.3", ""),
    ):
        assert len({user_of(one) for one in same}) == 1, same
    others = ("192.0.2.1", "192.0.2.2", "2001:db8:1:2::3", "2001:db8:1:3::3", "::1", "unix")
    assert len({user_of(one) for one in others}) == len(others)


class Client:
    """One client: it sends from an address of its own, and with headers of its own."""

    def __init__(self, server: RunningServer, source: str = "127.0.0.1", **headers: str) -> None:
        self._server, self._source = server, source
        self._headers = {"content-type": "application/json", **headers}

    def begin(self, n: int, tokens: int) -> http.client.HTTPResponse:
        """The head of an answer that streams."""
        if self._server.url.startswith("unix:"):
            connection = http.client.HTTPConnection("localhost", timeout=200)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self._server.url.removeprefix("unix:"))
        else:
            connection = http.client.HTTPConnection(
                self._server.url.removeprefix("http://"), timeout=200,
                source_address=(self._source, 0),
            )  # fmt: skip
        body = {"model": MODEL, "prompt": "Once", "n": n, "max_tokens": tokens, "stream": True,
                "ignore_eos": True}  # fmt: skip
        connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        return connection.getresponse()

    def status(self, n: int = 1) -> int:
        """Whether the server accepts a request; the client then leaves."""
        with self.begin(n, 1) as response:
            return response.status

    @contextmanager
    def flood(self, n: int) -> Iterator[int]:
        """Sends long requests until one is refused. Yields the number of their sequences."""
        with ExitStack() as stack:
            count = 0
            while (response := stack.enter_context(self.begin(n, 1500))).status == 200:
                count += n
            error = json.loads(response.read())["error"]
            assert response.status == 429 and "your share is full" in error["message"]
            yield count
        wait_until(lambda: self._server.client.num_sequences == 0)


# 8 sequences run, and 24 may wait: one user may have 20.
QUEUE: dict[str, Any] = {"max_queue": 24, "max_choices": 10}


def forwarded(address: str) -> dict[str, str]:
    return {"x-forwarded-for": address}


@pytest.mark.parametrize("n", [1, 10])
def test_keys(start: Start, n: int) -> None:
    server = start(**QUEUE, api_keys=KEYS)
    ann, same, bob = (
        Client(server, source, authorization=f"Bearer {key.partition(':')[2]}")
        for key, source in zip(KEYS, ("127.0.0.1", "127.0.0.2", "127.0.0.1"), strict=True)
    )
    with ann.flood(n) as count:
        assert count == 20
        assert same.status(n) == 429, "another key and address of the same user"
        assert bob.status(4) == bob.status() == 200


def test_addresses(start: Start) -> None:
    server = start(**QUEUE)
    with Client(server, "127.0.0.1").flood(10) as count:
        assert count == 20
        # A header of a client whom the server does not trust changes nothing.
        spoofed = Client(server, "127.0.0.1", **forwarded("192.0.2.9"))
        assert spoofed.status(4) == 429
        assert Client(server, "127.0.0.2").status(4) == 200


def test_a_trusted_proxy(start: Start) -> None:
    server = start(**QUEUE, trusted_proxies=("127.0.0.1", "127.0.1.0/24"))

    def through(value: str, proxy: str = "127.0.0.1") -> Client:
        return Client(server, proxy, **forwarded(value))

    with through("192.0.2.1").flood(10):
        # The proxy appends the address of the client to the addresses that the client sent.
        for same in (through("192.0.2.7, 192.0.2.1"), through("192.0.2.1", "127.0.1.9"),
                     through("192.0.2.7, 192.0.2.1, 127.0.1.8"), through("192.0.2.1:8080"),
                     through("::ffff:192.0.2.1")):  # fmt: skip
            assert same.status(4) == 429
        assert through("192.0.2.2").status(4) == through("192.0.2.1, 192.0.2.2").status(4) == 200
    with through("2001:db8::1").flood(10):
        assert through("2001:db8::2").status(4) == 429
        assert through("2001:db8:0:1::1").status(4) == 200
        assert through("192.0.2.3", "127.0.0.2").status(4) == 200, "its own address counts"


@pytest.mark.parametrize("trusted", [(), ("unix",)])
def test_a_unix_socket(start: Start, tmp_path: Path, trusted: tuple[str, ...]) -> None:
    """Its clients are one user, unless a trusted proxy tells them apart."""
    server = start(**QUEUE, uds=str(tmp_path / "s"), trusted_proxies=trusted)
    with Client(server, **forwarded("192.0.2.1")).flood(10):
        other = Client(server, **forwarded("192.0.2.2")).status(4)
        assert other == (200 if trusted else 429)


def test_http_requests_at_once(start: Start) -> None:
    server = start(max_concurrency=4)
    with Client(server).flood(1) as count:
        assert count == 2
        assert Client(server, "127.0.0.2").status() == 200


def test_connections(start: Start) -> None:
    """By address, also with keys: before a request there is no key."""
    server = start(max_connections=6, api_keys=KEYS)
    key = {"authorization": "Bearer secret-of-bob"}
    with ExitStack() as stack:
        for _ in range(3):
            assert stack.enter_context(Client(server, **key).begin(1, 1500)).status == 200
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=200) as refused:
            assert b"503 Service Unavailable" in refused.recv(1000)
        assert Client(server, "127.0.0.2", **key).status() == 200
    wait_until(lambda: server.client.num_sequences == 0)


def test_users_take_turns(start: Start) -> None:
    """Bob's request waits for one place, not for all that Ann has sent before."""
    server = start(**QUEUE, api_keys=KEYS)
    with ExitStack() as stack:
        for _ in range(20):
            ann = Client(server, authorization="Bearer secret-of-ann")
            assert stack.enter_context(ann.begin(1, 60)).status == 200
        with Client(server, authorization="Bearer secret-of-bob").begin(1, 1) as bob:
            assert b"[DONE]" in bob.read()
        # Behind all that waited, Bob's would have run beside at most 7 of Ann's.
        assert server.client.num_sequences > 8
    wait_until(lambda: server.client.num_sequences == 0)


def test_downloads(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finwhale.server.batch.routes.MAX_DOWNLOADS", 4)
    server = start(batch_dir=str(tmp_path / "b"))
    text = b"x" * (16 << 20)  # more than the buffers of a connection
    file = server.openai().files.create(file=("in.jsonl", text), purpose="batch").id

    def begin(source: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(
            server.url.removeprefix("http://"), timeout=200, source_address=(source, 0)
        )
        connection.request("GET", f"/v1/files/{file}/content")
        return connection.getresponse()

    with ExitStack() as stack:
        for source, wanted in (("127.0.0.1", 200), ("127.0.0.1", 200), ("127.0.0.1", 429),
                               ("127.0.0.2", 200)):  # fmt: skip
            assert stack.enter_context(begin(source)).status == wanted

    def whole() -> bool:
        with begin("127.0.0.1") as response:
            return response.status == 200 and len(response.read()) == len(text)

    for _ in range(3):  # those that have ended take nothing
        wait_until(whole)


def test_what_cannot_be_a_proxy() -> None:
    for wrong in ("*", "proxy.example", "10.0.0.1/8", ""):
        with pytest.raises(FinwhaleError, match="trusted prox"):
            ServerConfig(model_names=(MODEL,), trusted_proxies=(wrong,))
    for good in ("10.0.0.0/8", "::1", "fd00::/8", "unix"):
        ServerConfig(model_names=(MODEL,), trusted_proxies=(good,))
