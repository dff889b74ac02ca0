"""Hostile clients, slow clients, a stopped engine: over loopback, against a server's process."""

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .attacks import TOKENIZE, Target, ask, completion, honest_client, run
from .test_limits import wait_until

# CPU time of the event loop that an honest client waits for.
MAX_LOOP_S = 1.0
# On the clock, beside eight attackers: of requests that the event loop answers alone, and of those
# that wait for steps of the engine, which the attackers' sequences share.
MAX_ANSWER_S, MAX_TOKEN_S = 1.5, 5.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    timeouts = ("--header-timeout", "1", "--body-timeout", "1", "--idle-timeout", "2")
    limits = ("--max-connections", "150", "--engine-timeout", "4", "--drain-timeout", "0.3")
    directory = tmp_path_factory.mktemp("hostile")
    offered = ("--batch-dir", str(directory / "batches"), "--enable-rollout-endpoints")
    made = Target(directory / "log", *timeouts, *limits, *offered)
    yield made
    made.close()


def test_no_attack_delays_an_honest_client(target: Target) -> None:
    """Each attack once. FINWHALE_HOSTILE_SECONDS: go on for so long, on an otherwise idle machine.

    The short form measures delays in CPU time of the event loop, and the long one on the clock.
    """
    seconds = float(os.environ.get("FINWHALE_HOSTILE_SECONDS", "0"))
    with honest_client(target) as seen:
        asyncio.run(run(target, attackers=4, seconds=0))
    if seconds:
        asyncio.run(run(target, attackers=8, seconds=seconds / 4))
        before = target.resident_bytes()
        with honest_client(target) as seen:
            asyncio.run(run(target, attackers=8, seconds=seconds * 3 / 4))
        print(f"{seen}, resident bytes {before}, then {target.resident_bytes()}")
        assert all(seen.longest_s[path] < MAX_ANSWER_S for path in (TOKENIZE, "/health/ready")), (
            seen
        )
        assert max(seen.longest_s.values()) < MAX_TOKEN_S, seen
        wait_until(lambda: all(n < before[p] * 1.1 for p, n in target.resident_bytes().items()))
    assert not seen.failures, seen.failures[:3]
    assert seen.count > 4
    assert max(seen.longest_loop_s.values()) < MAX_LOOP_S, seen
    assert target.process.poll() is None and target.health("ready") == 200
    lines = len(target.log.read_text().splitlines())
    assert seconds or lines < 2000 + seen.count


def receive_all(sock: socket.socket) -> bytes:
    sock.settimeout(20)
    found = b""
    while piece := sock.recv(4096):
        found += piece
    return found


@pytest.mark.parametrize(
    ("begin", "wanted"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nx: ", b"408 "),
        (b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{", b"408 "),
        (
            b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"200 ",
        ),  # closed when it is idle
    ],
    ids=["silent", "head", "body", "idle"],
)
def test_a_slow_client_is_closed(target: Target, begin: bytes, wanted: bytes) -> None:
    with socket.create_connection(("127.0.0.1", target.port)) as sock:
        sock.sendall(begin)
        answer = receive_all(sock)
    assert answer[9:13] == wanted and answer.count(b"HTTP/1.1") == bool(wanted)


def test_connections_beyond_the_limit_replace_waiting_ones(target: Target) -> None:
    held = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(300)]
    try:
        assert target.health("ready") == 200
        assert b"503 Service" in receive_all(held[0]), "the oldest has made room"
    finally:
        for sock in held:
            sock.close()


def test_no_file_descriptor_is_left(target: Target) -> None:
    pid = target.process.pid
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 30)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    lines = len(target.log.read_text().splitlines())
    used = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 20, before[1]))
    held = []
    try:
        held = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(60)]
        wait_until(lambda: "no file descriptor" in target.log.read_text())
        assert target.health("ready") == 200
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for sock in held:
            sock.close()
    assert len(target.log.read_text().splitlines()) < lines + 200


@contextmanager
def streaming(target: Target, tokens: int) -> Iterator[socket.socket]:
    """The connection of a stream that has begun."""
    body = completion(prompt="Once", stream=True, ignore_eos=True)
    body = body.replace(b'"max_tokens": 1', b'"max_tokens": %d' % tokens)
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", target.port)) as stream:
        stream.sendall(head.encode() + body)
        assert stream.recv(16).startswith(b"HTTP/1.1 200")
        yield stream


def test_a_stopped_engine_is_noticed(target: Target) -> None:
    port = target.health_port
    with streaming(target, 200) as stream:
        os.kill(target.engine_pid, signal.SIGSTOP)
        try:
            wait_until(lambda: target.health("ready") == 503)
            assert target.health("ready", port) == 503
            wait_until(lambda: target.health("live") == 503)
            status, text = ask(port, "GET", "/health/live")
            assert status == 503 and "has not run" in json.loads(text)["reason"]
        finally:
            os.kill(target.engine_pid, signal.SIGCONT)
        wait_until(lambda: target.health("ready") == target.health("live") == 200)
        answer = receive_all(stream)
    assert b"[DONE]" in answer and answer.count(b"data: {") > 150


def test_metrics_on_the_health_port(target: Target) -> None:
    status, text = ask(target.health_port, "GET", "/metrics")
    assert status == 200 and b"finwhale_engine_up 1.0" in text
    assert ask(target.health_port, "GET", "/v1/models")[0] == 404


def test_the_end_of_a_drain_is_told(target: Target) -> None:
    """The last test here: it ends the server."""
    with streaming(target, 1900) as stream:
        target.process.send_signal(signal.SIGTERM)
        answer = receive_all(stream)
    assert b'"code":"server_stopping"' in answer.replace(b": ", b":"), answer[-300:]
    assert target.process.wait(30) == 1
