"""Bodies that cost too much are refused before they cost it."""

import http.client
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from finwhale.chat.known_fields import FieldError, check_fields
from finwhale.server.edge.bodies import SMALL_BYTES, Budget, count_outside_strings
from finwhale.server.errors import TRY_AGAIN, ApiError
from finwhale.server.protocols.known_fields import shape_of
from finwhale.server.protocols.schemas import (
    ChatBody,
    CompletionBody,
    CountTokensBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
)

from .running import MODEL, RunningServer
from .test_limits import request, wait_until


def random_json(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if depth and kind < 0.3:
        return [random_json(draw, depth - 1) for _ in range(draw.randrange(4))]
    if depth and kind < 0.6:
        return {text(draw): random_json(draw, depth - 1) for _ in range(draw.randrange(4))}
    return text(draw) if kind < 0.9 else draw.random()


def text(draw: random.Random) -> str:
    return "".join(draw.choice('\\"[{:a\n') for _ in range(draw.randrange(8)))


def structures(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(structures, value.values()))
    return 1 + sum(map(structures, value)) if isinstance(value, list) else 0


def test_structures_are_counted_outside_strings() -> None:
    draw = random.Random(0)
    for _ in range(500):
        value = random_json(draw, 6)
        assert count_outside_strings(json.dumps(value).encode(), b"[{:", -1) == structures(value)


@pytest.mark.parametrize(
    "kind",
    [ChatBody, TokenizeBody, ResponsesBody, MessagesBody, CountTokensBody, CompletionBody],
    ids=lambda kind: kind.__name__,
)
def test_a_list_of_wrong_values_has_few_errors(kind: type[BaseModel]) -> None:
    """Each error costs the event loop 4 us, and a body may have 100,000 values."""
    items = range(9999)
    wrong: list[Any] = [[1 for _ in items], ["x" for _ in items], [{} for _ in items]]
    wrong.append({str(i): [] for i in items})
    for name in kind.model_fields:
        for junk in wrong:
            try:
                check_fields(shape_of(kind), {name: junk})
                kind.model_validate({name: junk})
            except FieldError:
                pass  # It tells of the first.
            except ValidationError as error:
                found = error.error_count()
                assert found < 1100, name


def test_budget() -> None:
    budget = Budget(1000, largest=lambda: 1000)
    for _ in range(5):
        budget.resize(0, SMALL_BYTES)
    budget.resize(0, SMALL_BYTES + 600)
    with pytest.raises(ApiError) as caught:
        budget.resize(10, SMALL_BYTES + 401)
    assert caught.value.status == 503 and caught.value.code in TRY_AGAIN
    budget.resize(SMALL_BYTES + 600, 0)
    budget.resize(10, SMALL_BYTES + 1000)
    assert budget.total == 1000


@pytest.mark.parametrize("kind", [None, "text/plain", "text/x+json", "application/octet-stream"])
def test_a_body_that_is_not_marked_as_json(server: RunningServer, kind: str | None) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = json.dumps({"prompt": "Hi", "nonsense": 1}).encode()
    connection.request("POST", "/tokenize", body, {} if kind is None else {"content-type": kind})
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert response.status == 415 and error["code"] == "unsupported_media_type"
    assert "content-type: application/json" in error["message"]


@pytest.mark.parametrize("kind", ["Application/JSON; charset=utf-8", "application/x+json"])
def test_media_types_of_json(server: RunningServer, kind: str) -> None:
    body = json.dumps({"prompt": "Hi"}).encode()
    assert request(server, "POST", "/tokenize", body, {"content-type": kind})[0] == 200


def test_large_bodies_share_a_budget(start: Callable[..., RunningServer]) -> None:
    server = start(max_buffered_bytes=300_000)
    small = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1}).encode()
    large = small + b" " * 250_000
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as held:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 400000\r\n\r\n"
        held.sendall(head.encode() + large)
        wait_until(lambda: server.state.budget.total > 100_000)
        status, headers, answer = request(server, "POST", "/v1/completions", large)
        assert status == 503 and json.loads(answer)["error"]["code"] == "overloaded"
        assert headers["retry-after"] == "1"
        assert request(server, "POST", "/v1/completions", small)[0] == 200
    wait_until(lambda: server.state.budget.total == 0)
    assert request(server, "POST", "/v1/completions", large)[0] == 200
    # The server drops the body after it has sent the answer.
    wait_until(lambda: server.state.budget.total == 0)


def test_text_beyond_the_context_is_not_encoded(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    tokenizer = server.state.need_tokenizer()
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    assert tokenizer.longest_token == longest
    limit = server.state.ready.max_model_len * longest
    assert (
        request(server, "POST", "/tokenize", json.dumps({"prompt": "x" * limit}).encode())[0] == 200
    )
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: time.sleep(60))
    long = "x" * (limit + 1)
    message = [{"role": "user", "content": long}]
    for path, fields in (
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": message}),
        ("/v1/completions", {"prompt": ["x", long][1:]}),
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/responses", {"input": long}),
        ("/v1/messages", {"messages": message, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": message}),
    ):
        body = json.dumps({"model": MODEL, **fields}).encode()
        status, _, answer = request(server, "POST", path, body)
        words = "prompt is too long" if path.startswith("/v1/messages") else "tokens or more"
        assert status == 400 and words in answer.decode(), (path, answer)
