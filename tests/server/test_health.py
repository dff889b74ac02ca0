"""The health port answers while the event loop is busy."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from finwhale.server.api import health

from .attacks import ask
from .running import RunningServer
from .test_limits import request, wait_until


def test_health_port_while_the_loop_is_busy(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(engine_timeout_s=0.6)
    monkeypatch.setattr(health, "PULSE_S", 0.05)
    loop = server.client._loop
    assert loop is not None
    pulse = asyncio.run_coroutine_threadsafe(health.pulse(server.state), loop)
    wait_until(lambda: server.state.loop_seen > 0)
    port = health.HealthPort(server.state.config, 0)
    port.start(server.state)
    try:
        wait_until(lambda: ask(port.port, "GET", "/health/ready")[0] == 200)
        monkeypatch.setattr(health, "READY_S", 0.3)
        busy = True

        def spin() -> None:
            while busy:
                pass

        loop.call_soon_threadsafe(spin)
        try:
            wait_until(lambda: ask(port.port, "GET", "/health/ready")[0] == 503)
            status, text = ask(port.port, "GET", "/metrics")
            assert status == 200 and b"finwhale_engine_up 1.0" in text
            wait_until(lambda: ask(port.port, "GET", "/health/live")[0] == 503)
            assert b"event loop" in ask(port.port, "GET", "/health/live")[1]
            with socket.create_connection(("127.0.0.1", port.port)) as sock:
                sock.sendall(b"HEAD /health/live HTTP/1.0\r\n\r\n")
                answer = b"".join(iter(lambda: sock.recv(4096), b""))
            assert b" 503 " in answer and answer.endswith(b"\r\n\r\n")
        finally:
            busy = False
        wait_until(lambda: ask(port.port, "GET", "/health/ready")[0] == 200)
        wait_until(lambda: request(server, "GET", "/health/live")[0] == 200)
    finally:
        pulse.cancel()
        port.close()


def test_a_long_step_is_no_alarm_and_a_hanging_one_is(
    start: Callable[..., RunningServer],
) -> None:
    server = start()

    class Stepping:
        silent_s = 0.2
        step_s = 500.0

    server.client.heartbeat = Stepping()  # type: ignore[assignment]
    assert health.live(server.state).reason is health.ready(server.state).reason is None
    Stepping.step_s = 601.0
    assert health.live(server.state).reason == "a step has taken 601 s"
    assert health.ready(server.state).reason is not None
    Stepping.step_s, Stepping.silent_s = 0.0, 4.0
    assert health.live(server.state).reason is None
    assert "has not run for 4 s" in (health.ready(server.state).reason or "")
