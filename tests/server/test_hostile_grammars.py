"""Grammars that have stopped a server, over a real socket, while another client streams.

The stream may never pause for more than a second. Here a pause is measured in CPU time of this
process, which is the server's and the engine's: a busy machine does not fail the test, but any work
that holds up the step loop does. `soak.py` measures the same pauses on the clock.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from finwhale.chat import grammar
from finwhale.server.edge.shares import Shares
from finwhale.server.link import grammar_compiler

from .hostile import (
    EXPENSIVE,
    HOSTILE_SCHEMAS,
    ONE_GRAMMAR,
    TOO_EXPENSIVE,
    chained_definitions,
    chained_rules,
    expensive_schema,
    nested_schema,
    ways_in,
)
from .running import MODEL, RunningServer
from .test_grammar_check import trials_of as running_trials
from .test_limits import LONG, request, wait_until

Start = Callable[..., RunningServer]
Fields = dict[str, Any]

# Of CPU time. A machine that was half as fast as usual needed 1.03 s for the process's other work.
MAX_PAUSE_S = 2.0
LONG_FORM = bool(os.environ.get("FINWHALE_LONG"))
ASKED = [{"role": "user", "content": "Answer in json."}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def chat(response_format: Fields, **more: Any) -> Fields:
    return {"messages": ASKED, "max_tokens": 8, "response_format": response_format, **more}


def json_format(schema: Any) -> Fields:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def lark_format(text: str) -> Fields:
    return {"type": "grammar", "grammar": text}


def with_tool(schema: Any) -> Fields:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", **schema}},
    }
    return {"messages": ASKED, "max_tokens": 8, "tools": [tool], "tool_choice": "required"}


# A reference that no look at the text finds.
HIDDEN = json.dumps(chained_definitions(1000)).replace("$ref", "\\u0024ref")

REFUSED: dict[str, tuple[str, Fields, str]] = {
    "chained definitions": (CHAT, chat(json_format(chained_definitions(1000))), "1001 references"),
    "the same as a tool": (CHAT, with_tool(chained_definitions(1000)), "1001 references"),
    "the same, hidden": (CHAT, chat(lark_format(f"start: %json {HIDDEN}")), "nested too deeply"),
    "chained rules": (
        COMPLETIONS,
        {"prompt": "x", "response_format": lark_format(chained_rules(6000))},
        "6002 rules",
    ),
    "an expensive schema": (
        RESPONSES,
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema":
                                           expensive_schema(0)}}},
        TOO_EXPENSIVE,
    ),
    "an expensive schema of a tool": (
        CHAT,
        with_tool({"properties": {"x": expensive_schema(1)}}),
        TOO_EXPENSIVE,
    ),
    "much memory": (
        COMPLETIONS,
        {"prompt": "x", "response_format": lark_format('start: "a"' + ' | "a"' * 150_000)},
        "more than 128 MiB",
    ),
    "nested arrays": (
        MESSAGES,
        {"messages": ASKED, "max_tokens": 8,
         "output_config": {"format": {"type": "json_schema", "schema": nested_schema(70)}}},
        "nested deeper than 64",
    ),
    "nested groups": (
        COMPLETIONS,
        {"prompt": "x", "response_format": {"type": "regex", "regex": "(" * 99 + "a" + ")" * 99}},
        "more than 64 levels",
    ),
}  # fmt: skip


class Watched:
    """A client that streams, again and again, until stopped.

    Attributes:
        events: pieces of text that it has got.
        longest_pause_s: between two of them, in CPU time of this process.
    """

    def __init__(self, server: RunningServer) -> None:
        self.events = 0
        self.longest_pause_s = 0.0
        self._client = server.openai()
        self._stop = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with self._client.completions.create(**LONG, stream=True) as stream:
                    before = None
                    for _ in stream:
                        now = time.process_time()
                        if before is not None:
                            self.longest_pause_s = max(self.longest_pause_s, now - before)
                        before = now
                        self.events += 1
                        if self._stop.is_set():
                            break
        except Exception as error:  # told in the test's thread
            self.failure = error

    def wait_for(self, events: int) -> None:
        """Wait until `events` more events have come."""
        goal = self.events + events
        wait_until(lambda: self.events >= goal or self.failure is not None)
        assert self.failure is None, self.failure

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert self.failure is None, self.failure


@contextmanager
def watched(server: RunningServer) -> Iterator[Watched]:
    stream = Watched(server)
    try:
        stream.wait_for(5)
        yield stream
        stream.wait_for(5)
    finally:
        stream.end()
    assert stream.longest_pause_s < MAX_PAUSE_S


def post(server: RunningServer, path: str, fields: Fields) -> tuple[int, dict[str, str], Fields]:
    status, headers, body = request(
        server, "POST", path, json.dumps({"model": MODEL, **fields}).encode()
    )
    return status, headers, json.loads(body)


def trials_of(server: RunningServer) -> list[int]:
    """The process ids of the trials that run."""
    return [] if server.state.grammars._process is None else running_trials(server.state.grammars)


def assert_it_serves_grammars(server: RunningServer) -> None:
    made = server.openai().completions.create(
        model=MODEL, prompt="x", max_tokens=9,
        extra_body={"response_format": {"type": "regex", "regex": "yes|no"}},
    )  # fmt: skip
    assert made.choices[0].text in ("yes", "no")


def test_each_is_one_error_and_the_stream_goes_on(server: RunningServer) -> None:
    with watched(server) as stream:
        for name, (path, fields, message) in REFUSED.items():
            before = stream.events
            status, _, body = post(server, path, fields)
            assert status == 400, (name, body)
            assert body["error"]["type"] == "invalid_request_error"
            found = body["error"]["message"]
            assert re.search(message, found) and len(found) < 400, (name, found)
            assert "\n" not in found, name
            if message == TOO_EXPENSIVE:
                assert stream.events >= before + 5, name
        # Not expensive for all its numbers: it is served.
        status, _, body = post(
            server, COMPLETIONS,
            {"prompt": "x", "max_tokens": 20, "response_format": json_format(
                {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"})},
        )  # fmt: skip
        assert status == 200 and set(body["choices"][0]["text"].strip('"')) <= {"a"}
        assert_it_serves_grammars(server)
    text = request(server, "GET", "/metrics")[2].decode()
    for line in (
        'finwhale_grammars_total{result="references"} 2.0',
        'finwhale_grammars_total{result="rules"} 1.0',
        'finwhale_grammars_total{result="nesting"} 1.0',
        'finwhale_grammars_total{result="crash"} 1.0',
        'finwhale_grammars_total{result="time"} 2.0',
        'finwhale_grammars_total{result="memory"} 1.0',
        'finwhale_grammars_total{result="passed"} 2.0',
        "finwhale_grammar_trial_seconds_count 6.0",
    ):
        assert line in text.splitlines(), line


def test_every_way_in_has_the_same_protection(server: RunningServer) -> None:
    """FINWHALE_LONG: also the schemas whose trials take about a second."""
    with watched(server):
        for name, (schema, wanted) in HOSTILE_SCHEMAS.items():
            for way, (path, fields) in ways_in(schema).items():
                if name in EXPENSIVE and (not LONG_FORM or way not in ONE_GRAMMAR):
                    continue
                status, _, body = post(server, path, fields)
                # A strict tool's grammar begins with any text, so a trial may not reach the rest.
                # deepseek-recipe refuses some schemas that llguidance accepts.
                allowed = (200, 400) if wanted == 200 or "strict" in way else (400,)
                assert status in allowed, (name, way, body)
                if status != 200:
                    message = body["error"]["message"]
                    assert message and len(message) < 400 and "\n" not in message, (name, way)
        assert_it_serves_grammars(server)


@pytest.mark.parametrize(
    "grammar_text", ["start: start", "start: a\na: start", 'start: %json {"$ref": "#"}']
)
def test_grammars_without_an_output(server: RunningServer, grammar_text: str) -> None:
    for path, asked in ((CHAT, {"messages": ASKED}), (COMPLETIONS, {"prompt": "x"})):
        for stream in (False, True):
            fields = {**asked, "stream": stream, "response_format": lark_format(grammar_text)}
            status, _, body = post(server, path, fields)
            assert status == 400 and "no output matches it" in body["error"]["message"]


SMALL: dict[str, Fields] = {
    CHAT: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
           "max_tokens": 1, "stop": ["x"], "user": "x", "cache_salt": "x", "metadata": {"x": "x"}},
    COMPLETIONS: {"prompt": ["x"], "max_tokens": 1, "stop": "x", "user": "x",
                  "response_format": lark_format('start: "x"')},
    RESPONSES: {"input": "x", "instructions": "x", "max_output_tokens": 1, "user": "x"},
    MESSAGES: {"messages": ASKED, "max_tokens": 1, "system": "x", "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": {"messages": ASKED, "system": "x"},
    "/v1/responses/input_tokens": {"input": "x", "instructions": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}  # fmt: skip


def spoiled(value: Any) -> Iterator[Any]:
    """Copies of JSON, each with half a surrogate pair in one string or name."""
    if isinstance(value, str):
        yield value + "\ud800"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from ([*value[:i], bad, *value[i + 1 :]] for bad in spoiled(item))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield {**value, name + "\udfff": item}
            yield from ({**value, name: bad} for bad in spoiled(item))


@pytest.mark.parametrize("path", SMALL)
def test_lone_surrogates(server: RunningServer, path: str) -> None:
    fields = {"model": MODEL, **SMALL[path]}
    assert post(server, path, {**fields, "model": MODEL})[0] == 200
    for bad in spoiled(fields):
        status, _, body = post(server, path, bad)
        assert status == 400 and "lone surrogate (\\ud" in body["error"]["message"], bad
    # A pair in two escapes is one character.
    assert post(server, "/tokenize", {"prompt": "\U0001f40b"})[0] == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_a_deeply_nested_body(server: RunningServer, path: str) -> None:
    depth = 47_000
    body = b'{"model": "demo", "tools": ' + b"[" * depth + b"]" * depth + b"}"
    status, _, found = request(server, "POST", path, body)
    assert status == 400 and json.loads(found)["error"]["type"] == "invalid_request_error"


@contextmanager
def abandoned(server: RunningServer, schemas: list[Fields]) -> Iterator[None]:
    """Asks for expensive grammars, and leaves at the end of the block."""
    host, port = server.url.removeprefix("http://").split(":")
    socks = []
    for schema in schemas:
        body = json.dumps({"model": MODEL, **chat(json_format(schema))}).encode()
        socks.append(socket.create_connection((host, int(port))))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        socks[-1].sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    try:
        yield
    finally:
        for sock in socks:
            sock.close()


def test_clients_that_leave_end_their_trials(new_server: RunningServer) -> None:
    grammars = new_server.state.grammars
    with watched(new_server) as stream:
        assert_it_serves_grammars(new_server)
        with abandoned(new_server, [expensive_schema(i) for i in range(6)]):
            wait_until(lambda: grammars._shares.total == 6 and len(trials_of(new_server)) == 2)
            for trial in trials_of(new_server):
                os.kill(trial, signal.SIGSTOP)  # it never ends by itself
            stream.wait_for(1)
        wait_until(lambda: grammars._shares.total == 0 and not trials_of(new_server))
        assert_it_serves_grammars(new_server)
    # None of them came to its end.
    text = request(new_server, "GET", "/metrics")[2].decode()
    assert "finwhale_grammar_trial_seconds_count 1.0" in text.splitlines()


def test_a_trial_counts_in_the_time_out(start: Start) -> None:
    server = start(request_timeout_s=0.3)
    status, _, body = post(server, CHAT, chat(json_format(expensive_schema(0))))
    assert status == 504 and body["error"]["code"] == "timeout"
    wait_until(lambda: server.state.grammars._shares.total == 0 and not trials_of(server))


def test_a_full_queue_of_trials_is_429(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(retry_after_s=7)
    monkeypatch.setattr(server.state.grammars, "_shares", Shares("new grammars", lambda: 1))
    with abandoned(server, [expensive_schema(0)]):
        wait_until(lambda: server.state.grammars._shares.total == 1)
        status, headers, body = post(server, CHAT, chat(json_format({"type": "object"})))
        assert (status, headers["retry-after"]) == (429, "7")
        assert body["error"]["code"] == "queue_full"
    wait_until(lambda: server.state.grammars._shares.total == 0)


class SlowMatcher(grammar.Matcher):
    """One whose compilation ends when the test says so."""

    begun, end = threading.Event(), threading.Event()

    def __init__(self, *args: Any) -> None:
        self.begun.set()
        assert self.end.wait(60)
        super().__init__(*args)


def test_steps_go_on_while_the_engine_compiles(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "Matcher", SlowMatcher)
    SlowMatcher.begun.clear()
    SlowMatcher.end.clear()
    schema = json_format({"type": "boolean"})
    answers: list[Fields] = []
    with watched(server) as stream:
        asking = threading.Thread(
            target=lambda: answers.append(post(server, CHAT, chat(schema))[2]), daemon=True
        )
        asking.start()
        assert SlowMatcher.begun.wait(60)
        with abandoned(server, [{"type": "null"}]):
            wait_until(lambda: server.client.num_sequences == 3)
        wait_until(lambda: server.client.num_sequences == 2)
        stream.wait_for(20)
        assert not answers
        SlowMatcher.end.set()
        asking.join(60)
    assert answers[0]["choices"][0]["message"]["content"] in ("true", "false")


def test_slow_masks_end_their_own_request(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial, in another process, knows nothing of the smaller allowance here."""
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "MASK_BURST_SECONDS", 1e-7)
    fields = {"prompt": "x", "max_tokens": 9, "response_format": json_format({"type": "object"})}
    with watched(server):
        status, _, body = post(server, COMPLETIONS, fields)
        assert status == 500 and body["error"]["code"] == "generation_failed"
        assert body["error"]["message"].startswith("the grammar is too slow")
        with pytest.raises(openai.APIError, match="the grammar is too slow"):
            list(server.openai().completions.create(
                model=MODEL, prompt="x", stream=True,
                extra_body={"response_format": fields["response_format"]},
            ))  # fmt: skip
