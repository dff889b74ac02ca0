"""What stands before the endpoints, and what a request leaves behind: nothing."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from starlette.types import Message, Receive, Scope, Send

from finwhale import LLM
from finwhale.server.api.gate import Bounded
from finwhale.server.edge.bodies import Budget, parse_body
from finwhale.server.errors import ApiError

from .running import MODEL, RunningServer
from .test_openai import QUESTION

Start = Callable[..., RunningServer]
KEYS = ("a-key-of-ours", "another-key")
LONG: dict[str, Any] = {
    "model": MODEL, "prompt": "Once", "max_tokens": 1500, "extra_body": {"ignore_eos": True},
}  # fmt: skip


def request(
    server: RunningServer,
    method: str,
    path: str,
    body: bytes | Iterator[bytes] | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    try:
        sent = {"content-type": "application/json", **(headers or {})}
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        found = {k.lower(): v for k, v in response.getheaders()}
        return response.status, found, response.read()
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@contextmanager
def long_requests(server: RunningServer, count: int) -> Iterator[None]:
    """Runs requests that would take long, until the block ends: their clients then go away."""
    streams = [server.openai().completions.create(**LONG, stream=True) for _ in range(count)]
    try:
        yield
    finally:
        for stream in streams:
            stream.close()
        wait_until(lambda: server.client.num_sequences == 0)


def test_keys(start: Start) -> None:
    server = start(api_keys=KEYS)
    for key in KEYS:
        assert list(server.openai(api_key=key).models.list())
        assert server.anthropic(api_key=key).messages.count_tokens(model=MODEL, messages=QUESTION)  # type: ignore[arg-type]
    for key in ("a-key-of-our", "a-key-of-ours2", ""):
        with pytest.raises(openai.AuthenticationError) as caught:
            server.openai(api_key=key or "x").models.list()
        assert caught.value.code == "invalid_api_key"
    for path, wanted in {"/health/live": 200, "/": 200, "/metrics": 401, "/live": 401}.items():
        assert request(server, "GET", path)[0] == wanted
    status, _, body = request(server, "POST", "/v1/messages", b"{}")
    assert status == 401 and json.loads(body)["error"]["type"] == "authentication_error"


def test_body_limits(start: Start) -> None:
    server = start(max_body_bytes=10_000)
    status, _, body = request(server, "POST", "/v1/completions", b"x" * 10_001)
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"

    # Without a length the bytes are counted as they come.
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.request(
        "POST", "/v1/completions", iter([b"x" * 6000] * 2), {"content-type": "application/json"},
        encode_chunked=True,
    )  # fmt: skip
    assert connection.getresponse().status == 413
    connection.close()
    for wrong in (b"{", b"", b"[1]", b"\xff\xfe", b'{"model": NaN}', b"[" * 9000):
        status, _, body = request(server, "POST", "/v1/chat/completions", wrong)
        assert status == 400, wrong
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    surrogate = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "\ud800"}]})
    for path in ("/v1/chat/completions", "/tokenize"):
        assert request(server, "POST", path, surrogate.encode())[0] == 400
    assert request(server, "POST", "/v1/completions", surrogate.encode())[0] == 400
    status, _, body = request(server, "GET", "/nowhere")
    assert status == 404 and json.loads(body)["error"]["type"] == "not_found_error"
    assert request(server, "GET", "/v1/completions")[0] == 405


def test_depth() -> None:
    deep: Any = 1
    for _ in range(65):
        deep = {"x": [deep]}
    with pytest.raises(ApiError, match="nested deeper"):
        parse_body(json.dumps(deep).encode(), 100)
    parse_body(b'{"x": [[[[1]]]]}', 100)


def test_prompt_limit(start: Start) -> None:
    server = start(max_prompt_tokens=20)
    with pytest.raises(openai.BadRequestError, match="limit of 20 tokens"):
        server.openai().completions.create(model=MODEL, prompt="whale " * 30)


def test_full_queue_is_429(start: Start) -> None:
    server = start(max_queue=2, retry_after_s=7)
    # 8 sequences run at once, and 2 more may wait; one user may have 9 of these 10.
    with long_requests(server, 9):
        for attempt in (
            lambda: server.openai().completions.create(model=MODEL, prompt="a"),
            lambda: server.openai().completions.create(model=MODEL, prompt="a", stream=True),
        ):
            with pytest.raises(openai.RateLimitError) as caught:
                attempt()
            assert caught.value.response.headers["retry-after"] == "7"
            assert caught.value.code == "queue_full"
    assert server.openai().completions.create(model=MODEL, prompt="a").choices


def test_concurrency_limit_leaves_health(start: Start) -> None:
    server = start(max_concurrency=3)  # 2 of one user
    with long_requests(server, 2):
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model=MODEL, prompt="a")
        assert request(server, "GET", "/health/live")[0] == 200
        status, headers, body = request(server, "HEAD", "/health/live")
        assert status == 200 and int(headers["content-length"]) > 0 and not body
        assert request(server, "GET", "/metrics")[0] == 200


def test_an_unexpected_error(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets the usual headers and no details, which are in the log."""
    server = start(cors_origins=("https://page.test",))

    def fail(name: str) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.state, "check_model", fail)
    status, headers, text = request(
        server, "GET", "/v1/models/x", headers={"origin": "https://page.test"}
    )
    assert status == 500 and headers["access-control-allow-origin"]
    assert headers["x-request-id"].startswith("req_") and b"secret" not in text
    assert json.loads(text)["error"]["code"] == "internal_error"
    (record,) = (record for record in caplog.records if record.message == "unexpected error")
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


def test_timeout(start: Start) -> None:
    server = start(request_timeout_s=0.3)
    with pytest.raises(openai.InternalServerError) as caught:
        server.openai().completions.create(**LONG)
    assert caught.value.status_code == 504 and caught.value.code == "timeout"
    with pytest.raises(openai.APIError) as ended:
        list(server.openai().completions.create(**LONG, stream=True))
    assert ended.value.code == "timeout"
    wait_until(lambda: server.client.num_sequences == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_request(server: RunningServer, stream: bool) -> None:
    body = json.dumps({k: v for k, v in LONG.items() if k != "extra_body"} | {
        "ignore_eos": True, "stream": stream, "n": 3}).encode()  # fmt: skip
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            assert b"200 OK" in sock.recv(1000)
        wait_until(lambda: server.live()["running"] == 3)
    wait_until(lambda: server.client.num_sequences == 0)
    wait_until(lambda: server.live()["running"] == 0)
    assert server.live()["output_tokens"] < 3 * 1500, "the answers were generated to their ends"


def test_cors_is_off_unless_asked_for(demo_llm: Any, start: Start) -> None:
    asking = {"origin": "http://a.example", "access-control-request-method": "POST"}
    server = start()
    status, headers, _ = request(server, "OPTIONS", "/v1/chat/completions", headers=asking)
    assert status == 405 and "access-control-allow-origin" not in headers
    server.close()
    server = RunningServer(
        demo_llm._engine, cors_origins=("http://a.example",), api_keys=KEYS, max_body_bytes=1000,
        allowed_hosts=("127.0.0.1",),
    )  # fmt: skip
    try:
        status, headers, _ = request(server, "OPTIONS", "/v1/chat/completions", headers=asking)
        assert status == 200 and headers["access-control-allow-origin"] == "http://a.example"
        # The host check also applies to preflights.
        for method in ("OPTIONS", "GET"):
            status, _, body = request(
                server, method, "/v1/models", headers=asking | {"host": "c.example"}
            )
            assert status == 400 and json.loads(body)["error"]["code"] == "host_not_allowed"
        # Pages can read errors, too.
        key = {"authorization": f"Bearer {KEYS[0]}"}
        for wanted, given, sent in (
            (401, {}, b"{}"), (413, key, b" " * 1001), (413, key, iter([b" " * 600] * 2)),
            (400, key, b"{}"), (200, key, None),
        ):  # fmt: skip
            path, method = ("/v1/completions", "POST") if sent else ("/v1/models", "GET")
            given = {**given, "origin": asking["origin"]}
            status, headers, _ = request(server, method, path, sent, given)
            assert status == wanted and headers["access-control-allow-origin"] == asking["origin"]
            exposed = headers["access-control-expose-headers"].split(", ")
            assert set(exposed) == {"x-request-id", "retry-after", "finwhale-ignored"}
            assert headers["x-request-id"]
        asking["origin"] = "http://b.example"
        status, headers, _ = request(server, "POST", "/v1/completions", b"{}", asking)
        assert status == 401 and "access-control-allow-origin" not in headers
        status, headers, _ = request(server, "OPTIONS", "/v1/chat/completions", headers=asking)
        assert "access-control-allow-origin" not in headers
    finally:
        server.close()


def test_logs_hold_no_prompts(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = server.openai()
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "zanzibar"}], max_tokens=3
    )
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "zanzibar", "content": "zanzibar"}],  # type: ignore[list-item,misc]
        )
    ours = [record for record in caplog.records if record.name.startswith("finwhale")]
    assert {record.status for record in ours if record.message == "request"} == {200, 400}  # type: ignore[attr-defined]
    assert not any("zanzibar" in str(vars(record)) for record in ours)


def test_prompts_are_logged_where_that_is_asked_for(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = start(log_prompts=True)
    server.openai().completions.create(model=MODEL, prompt="zanzibar", max_tokens=1)
    assert any("zanzibar" in str(vars(record)) for record in caplog.records)


def test_metrics_add_up(server: RunningServer) -> None:
    client = server.openai()
    for _ in range(3):
        client.completions.create(
            model=MODEL, prompt="Once", max_tokens=5, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: server.live()["running"] == 0)
    status, headers, body = request(server, "GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=")
    values = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in body.decode().splitlines()
        if not line.startswith("#")
    }
    assert values["finwhale_output_tokens_total"] == 15
    assert values["finwhale_prompt_tokens_total"] == 6
    assert values["finwhale_time_to_first_token_seconds_count"] == 3
    assert values["finwhale_time_per_output_token_seconds_count"] == 12
    assert values['finwhale_requests_total{endpoint="/v1/completions",status="200"}'] == 3
    assert values["finwhale_engine_up"] == 1 and values["finwhale_requests_in_flight"] == 0
    kinds = [key for key in values if key.startswith("finwhale_pages{")]
    assert len(kinds) >= 4
    assert values["finwhale_prefill_tokens_total"] >= 6
    assert values["finwhale_preemptions_total"] == 0
    live = json.loads(request(server, "GET", "/live")[2])
    assert live["output_tokens"] == 15 and live["tokens_per_second"] > 0


def test_time_between_tokens_of_each_continuation(new_server: RunningServer) -> None:
    new_server.openai().completions.create(
        model=MODEL, prompt=["Once", "Twice"], n=2, max_tokens=3, extra_body={"ignore_eos": True}
    )
    text = request(new_server, "GET", "/metrics")[2].decode()
    # Two intervals in each of four continuations.
    assert "finwhale_time_per_output_token_seconds_count 8.0\n" in text


def test_cached_tokens_of_several_prompts(server: RunningServer) -> None:
    def cached(prompt: Any) -> int:
        answer = server.openai().completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=1)
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    prompts = [[number] * 300 for number in (7, 8)]
    server.engine.reset()
    assert cached(prompts) == 0
    each = [cached(prompt) for prompt in prompts]
    assert min(each) >= 256
    assert cached(prompts) == sum(each)


def answer_with_drafts(path: Path, draft_tokens: int) -> tuple[Any, list[str]]:
    """One answer, and the server's metrics after it."""
    engine = LLM(path, device="cpu", max_model_len=256, draft_tokens=draft_tokens)._engine
    server = RunningServer(engine)
    answer = server.openai().completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=40, temperature=0.7, seed=5, logprobs=2
    )
    wait_until(lambda: (now := server.client.metrics) is not None and not now.running)
    lines = request(server, "GET", "/metrics")[2].decode().splitlines()
    server.close()
    return (answer.choices[0].text, answer.choices[0].logprobs), lines


def test_metrics_of_drafting(short_demo_path: Path) -> None:
    """By position; and the answer is that of a server which does not draft."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wanted, _ = answer_with_drafts(short_demo_path, 0)
    found, lines = answer_with_drafts(short_demo_path, 2)
    torch.set_num_threads(threads)
    assert found == wanted
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    prefix = "finwhale_spec_decode_num"
    proposed, accepted = (
        [float(values[f'{prefix}_{kind}_per_pos_total{{position="{i}"}}']) for i in (0, 1, 2)]
        for kind in ("draft_tokens", "accepted_tokens")
    )
    assert proposed[0] >= proposed[1] >= accepted[1] and proposed[2] == accepted[2] == 0
    assert 0 < accepted[0] <= proposed[0] == float(values[f"{prefix}_drafts_total"])
    assert sum(proposed) == float(values[f"{prefix}_draft_tokens_total"])
    assert sum(accepted) == float(values[f"{prefix}_accepted_tokens_total"])
    mean = float(values["finwhale_draft_mean_accepted_length"])
    assert mean == pytest.approx(1 + sum(accepted) / proposed[0])
    assert float(values["finwhale_draft_tokens"]) == 2


def test_requests_while_the_model_loads(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setattr(server.client, "ready", None)
    assert request(server, "GET", "/health/live")[0] == 200
    assert request(server, "GET", "/health/ready")[0] == 503
    with pytest.raises(openai.InternalServerError, match="still loading") as refused:
        server.openai().completions.create(model=MODEL, prompt="a")
    assert refused.value.status_code == 503 and refused.value.code == "loading"
    assert refused.value.response.headers["retry-after"] == "1"
    # The context, from which the limits of a body follow, is not known yet.
    prompts = json.dumps({"model": MODEL, "prompt": [[5] * 1000] * 132, "max_tokens": 1}).encode()
    # The server answers before it reads a body that is too large, so do not send that.
    for body, length in ((prompts, len(prompts)), (b"", 5 << 20)):
        given = {"content-length": str(length)}
        status, headers, text = request(server, "POST", "/v1/completions", body, given)
        assert status == 503 and json.loads(text)["error"]["code"] == "loading"
        assert headers["retry-after"] == "1"
    # This limit is the same for every context.
    status, _, text = request(server, "POST", "/v1/completions", b"[" * 140_000)
    assert status == 400 and json.loads(text)["error"]["code"] == "too_complex"


def test_a_set_limit_holds_while_the_model_loads(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(max_body_bytes=100)
    monkeypatch.setattr(server.client, "ready", None)
    status, _, text = request(server, "POST", "/v1/completions", b" " * 101)
    assert status == 413 and json.loads(text)["error"]["code"] == "body_too_large"


def test_a_dead_engine_charges_nobody(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(api_keys=("ann:secret-of-ann",))
    key = server.state.keys.find("secret-of-ann")
    assert key is not None
    key.use.tokens = 100
    monkeypatch.setattr(server.client, "failure", "the device is gone")
    with pytest.raises(openai.InternalServerError, match="the device is gone"):
        server.openai(api_key="secret-of-ann").completions.create(model=MODEL, prompt="Once")
    monkeypatch.undo()
    authorization = {"authorization": "Bearer secret-of-ann"}
    text = request(server, "GET", "/metrics", headers=authorization)[2].decode()
    assert "finwhale_requests_in_flight 0.0\n" in text
    assert "finwhale_prompt_tokens_total 0.0\n" in text
    assert key.use.tokens == 100


def test_engine_failure_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    engine = server.engine
    begun = threading.Event()
    step = engine.step

    def failing() -> Any:
        if begun.is_set():
            raise RuntimeError("the device is gone")
        return step()

    monkeypatch.setattr(type(engine), "step", lambda self: failing())
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    stream = server.openai().completions.create(**LONG, stream=True)
    next(iter(stream))
    begun.set()
    with pytest.raises(openai.APIError, match="the device is gone") as caught:
        list(stream)
    assert caught.value.code == "engine_dead"
    assert request(server, "GET", "/health/live")[0] == 503
    assert request(server, "GET", "/health/ready")[0] == 503
    with pytest.raises(openai.InternalServerError) as refused:
        server.openai().completions.create(model=MODEL, prompt="a")
    assert refused.value.status_code == 503 and refused.value.code == "engine_dead"


def test_an_application_that_swallows_a_refused_body_answers_nothing() -> None:
    async def careless(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ApiError):
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"12345", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    config = SimpleNamespace(max_body_bytes=4, batch_dir=None)
    budget = Budget(1 << 20, lambda: 1)
    state: Any = SimpleNamespace(config=config, max_body_bytes=4, budget=budget)
    scope = {"path": "/x", "method": "POST", "headers": [], "state": {"user": ""}}
    with pytest.raises(ApiError, match="more than 4 bytes"):
        asyncio.run(Bounded(careless, state)(scope, receive, send))
    assert not sent and budget.total == 0
