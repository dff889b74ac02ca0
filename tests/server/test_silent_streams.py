"""Streams open when their request is accepted, and are never silent for long."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, MutableMapping
from typing import Any

import httpx2 as httpx
import pytest

from finwhale.server.sse import COMMENT, Stream

from .running import MODEL, RunningServer

TEXT = "Once upon a time, " * 8
MESSAGES = [{"role": "user", "content": TEXT}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "n": 2},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
OPENING = {
    "/v1/chat/completions": ["", ""],
    "/v1/completions": [],
    "/v1/responses": ["response.created", "response.in_progress"],
    "/v1/messages": ["message_start"],
}


@pytest.fixture
def held(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunningServer, threading.Event]]:
    """A server whose engine makes no step before the event is set."""
    server, go = start(ping_interval_s=0.01), threading.Event()
    step = server.engine.step

    def wait() -> Any:
        go.wait()
        return step()

    monkeypatch.setattr(server.engine, "step", wait)
    yield server, go
    go.set()


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields (name, data) for each event. The data of a comment is None."""
    name = ""
    for line in lines:
        if line.startswith(":"):
            yield line, None
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield name, json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", REQUESTS)
def test_before_the_first_token(held: tuple[RunningServer, threading.Event], path: str) -> None:
    server, go = held
    body = {"model": MODEL, "stream": True, **REQUESTS[path]}
    with httpx.stream("POST", server.url + path, json=body, timeout=200) as response:
        assert response.status_code == 200
        found = events(response.iter_lines())
        opening = [next(found) for _ in OPENING[path]]
        assert [name for name, _ in opening] == OPENING[path]
        is_ping = ("ping", {"type": "ping"}) if path == "/v1/messages" else (": waiting", None)
        assert [next(found) for _ in range(2)] == [is_ping] * 2
        if path == "/v1/responses":
            time.sleep(1.01)  # its times are whole seconds
        go.set()
        rest = [(name, data) for name, data in found if (name, data) != is_ping and data]
    if path == "/v1/chat/completions":
        assert [data["choices"][0]["index"] for _, data in opening if data] == [0, 1]
        roles = [c["delta"].get("role") for _, d in opening + rest if d for c in d["choices"]]
        assert roles.count("assistant") == 2
    elif path == "/v1/responses":
        numbers = [data["sequence_number"] for _, data in opening + rest if data]
        assert numbers == list(range(len(numbers)))
        ends = opening[0][1], rest[-1][1]
        assert len({end and end["response"]["created_at"] for end in ends}) == 1
    elif path == "/v1/messages":
        assert [name for name, _ in rest].count("message_start") == 0


def test_usage_of_a_cached_prompt(server: RunningServer) -> None:
    """The stream opens before anybody knows how much of the prompt is cached."""
    client = server.anthropic()
    long = [{"role": "user", "content": TEXT * 12}]
    client.messages.create(model=MODEL, max_tokens=1, messages=long)  # type: ignore[arg-type]
    with client.messages.stream(model=MODEL, max_tokens=1, messages=long) as stream:  # type: ignore[arg-type]
        found = {event.type: event for event in stream}
        final = stream.get_final_message().usage
    counted = client.messages.count_tokens(model=MODEL, messages=long).input_tokens  # type: ignore[arg-type]
    opened = found["message_start"].message.usage  # type: ignore[union-attr]
    assert (opened.input_tokens, opened.cache_read_input_tokens) == (counted, 0)
    assert final.cache_read_input_tokens and final.cache_read_input_tokens > 0
    assert final.input_tokens + final.cache_read_input_tokens == counted
    *_, last = server.openai().responses.create(
        model=MODEL, input=TEXT * 12, max_output_tokens=1, stream=True
    )
    usage = last.response.usage  # type: ignore[union-attr]
    assert usage is not None and usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("path", REQUESTS)
def test_refusals_come_before_the_stream(new_server: RunningServer, path: str) -> None:
    body = {"model": MODEL, "stream": True, **REQUESTS[path]}
    for field in ("prompt", "input"):
        if field in body:
            body[field] = "one " * 3000
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "one " * 3000}]
    response = httpx.post(new_server.url + path, json=body)
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")


def test_no_ping_is_inside_an_event() -> None:
    """An event may come in several pieces. The second event waits for a ping after the first."""
    sent: list[bytes] = []
    pinged = asyncio.Event()

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"data: {"
        await asyncio.sleep(0.05)  # ten times the interval
        yield b"}\n\n"
        await pinged.wait()
        yield b"data: [DONE]\n\n"

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))
        if sent[-1] == COMMENT:
            pinged.set()

    async def receive() -> MutableMapping[str, Any]:
        return await asyncio.get_running_loop().create_future()

    stream = Stream(source(), "text/event-stream", ping_interval_s=0.005)
    asyncio.run(stream({"type": "http", "state": {}}, receive, send))
    assert b"".join(sent).startswith(b"data: {}\n\n" + COMMENT)
    assert sent[-2] == b"data: [DONE]\n\n"
