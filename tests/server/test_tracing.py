"""Traces as a real collector sees them: a receiver of OTLP over HTTP on loopback decodes them."""

import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from finwhale.errors import FinwhaleError
from finwhale.server.observe import tracing
from finwhale.server.run import open_traces

from .running import MODEL, RunningServer
from .test_limits import LONG, request, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 5}


class Collector:
    """Receives traces. `spans` are all those received, `resources` their resources."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def take(self, received: ExportTraceServiceRequest) -> None:
        for of_resource in received.resource_spans:
            self.resources.append(attributes(of_resource.resource))
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans

    def root(self, request_id: str) -> Span:
        """The server span of a request, once it and its children have arrived."""

        def found() -> list[Span]:
            # Children end first, so they are sent in the same batch or before.
            return [s for s in self.spans if attributes(s).get("gen_ai.request.id") == request_id]

        wait_until(lambda: bool(found()), 120)
        return found()[0]

    def children(self, root: Span) -> list[Span]:
        found = [span for span in self.spans if span.parent_span_id == root.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in of.attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    found = Collector()
    yield found
    found.close()


def post(server: RunningServer, path: str, body: dict[str, Any], **headers: str) -> tuple[int, str]:
    """The status and the server's request id."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, found, _ = request(server, "POST", path, json.dumps(body).encode(), named)
    return status, found["x-request-id"]


def test_spans_of_a_request(
    start: Callable[..., RunningServer], collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    server = start(otlp_traces_endpoint=collector.url)
    traceparent = f"00-{TRACE}-{PARENT}-01"
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
    sent = {"temperature": 0.5, "seed": 2**63 - 1, "ignore_eos": True}
    headers = {"traceparent": traceparent, "x_request_id": "mine-1"}
    status, request_id = post(server, "/v1/chat/completions", chat | sent, **headers)
    assert status == 200

    root = collector.root(request_id)
    assert root.name == "POST /v1/chat/completions" and root.kind == Span.SPAN_KIND_SERVER
    assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() == PARENT
    assert root.status.code == Status.STATUS_CODE_UNSET
    found = attributes(root)
    usage = {name: found.pop(name) for name in list(found) if ".usage." in name}
    assert usage.pop("gen_ai.usage.input_tokens") > 0
    assert usage == {"gen_ai.usage.output_tokens": 6, "gen_ai.usage.cache_read.input_tokens": 0}
    first_s = found.pop("gen_ai.response.time_to_first_chunk")
    assert found == {
        "http.request.method": "POST",
        "http.request.header.x-request-id": ["mine-1"],
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "finwhale",
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": False,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 2**63 - 1,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert collector.resources[0].items() >= {
        "service.name": "finwhale", "deployment.environment": "test"
    }.items()  # fmt: skip

    queue, prefill, decode = collector.children(root)
    assert [queue.name, prefill.name, decode.name] == ["queue", "prefill", "decode"]
    edges = [root.start_time_unix_nano]
    for span in (queue, prefill, decode):
        assert span.trace_id == root.trace_id
        edges += [span.start_time_unix_nano, span.end_time_unix_nano]
    edges.append(root.end_time_unix_nano)
    assert edges == sorted(edges)
    assert edges[2] == edges[3] and edges[4] == edges[5] and edges[5] < edges[6]
    # The client's first token comes after the engine's.
    assert edges[4] - edges[0] < first_s * 1e9 < edges[7] - edges[0]

    # A second trace has its own id; each prompt has its own spans.
    both = {**ASK, "prompt": ["Once", "Then"], "n": 2, "temperature": 1}
    _, request_id = post(server, "/v1/completions", both)
    root = collector.root(request_id)
    assert root.trace_id.hex() != TRACE and not root.parent_span_id
    assert attributes(root)["gen_ai.operation.name"] == "text_completion"
    spans = collector.children(root)
    named = [(attributes(span)["finwhale.prompt.index"], span.name) for span in spans]
    assert sorted(named) == [(i, name) for i in (0, 1) for name in ("decode", "prefill", "queue")]

    # The server sends no trace of an unsampled request or of a health check.
    _, unsampled = post(server, "/v1/completions", ASK, traceparent=traceparent[:-1] + "0")
    assert request(server, "GET", "/health/ready")[0] == request(server, "GET", "/")[0] == 200
    collector.root(post(server, "/v1/completions", ASK)[1])
    ids = {attributes(span).get("gen_ai.request.id") for span in collector.spans}
    assert unsampled not in ids
    names = {span.name for span in collector.spans} - {"queue", "prefill", "decode"}
    assert names == {"POST /v1/chat/completions", "POST /v1/completions"}


def test_status_of_refused_and_aborted_requests(
    start: Callable[..., RunningServer], collector: Collector
) -> None:
    server = start(otlp_traces_endpoint=collector.url, api_keys=("a-key-of-ours",))
    key = {"authorization": "Bearer a-key-of-ours"}
    for body, headers, status, kind, reason in (
        (ASK, {}, 401, "invalid_api_key", "a valid API key is needed"),
        (ASK | {"model": "secret"}, key, 404, "model_not_found", "the model 'secret'"),
        (ASK | {"temperature": -1}, key, 400, "invalid_value", "temperature: "),
        (ASK | {"prompt": ""}, key, 400, "invalid_request", "the prompt is empty"),
        (ASK | {"nonsense": 1}, key, 400, "unknown_parameter", "unknown parameter: nonsense"),
    ):
        answered, request_id = post(server, "/v1/completions", body, **headers)
        root = collector.root(request_id)
        assert answered == status == attributes(root)["http.response.status_code"]
        assert attributes(root)["error.type"] == kind
        assert root.status.code == Status.STATUS_CODE_ERROR
        assert root.status.message.startswith(reason)
        assert not collector.children(root)

    def leave(stream: Any) -> None:
        stream.http_response.close()

    def cut_off(stream: Any) -> None:
        assert server.client._loop is not None
        server.client._loop.call_soon_threadsafe(server.client.cut_off)
        with pytest.raises(openai.APIError, match="cut off"):
            list(stream.parse())

    client = server.openai(api_key="a-key-of-ours")
    for end, kind in ((leave, "client_gone"), (cut_off, "server_stopping")):
        stream = client.completions.with_raw_response.create(**LONG, stream=True)
        pieces = iter(stream.parse())
        for _ in range(3):
            next(pieces)
        end(stream)
        root = collector.root(stream.headers["x-request-id"])
        assert root.status.code == Status.STATUS_CODE_ERROR
        assert attributes(root)["error.type"] == kind
        assert attributes(root)["http.response.status_code"] == 200
        queue, prefill, decode = collector.children(root)
        assert queue.name == "queue" and prefill.name == "prefill"
        assert decode.end_time_unix_nano > decode.start_time_unix_nano


def test_a_collector_that_does_not_answer(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue holds less than all spans, so that the exporter would have to wait if it could. Its
    thread ends with the server, after the last attempts.
    """
    monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    before = {*threading.enumerate()}
    for name, value in {
        "SCHEDULE_DELAY": "1", "MAX_QUEUE_SIZE": "8", "MAX_EXPORT_BATCH_SIZE": "4"
    }.items():  # fmt: skip
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    # It takes connections and never answers.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        server = start(otlp_traces_endpoint=url)
        for _ in range(10):
            assert post(server, "/v1/completions", ASK)[0] == 200
        server.close()
        for thread in {*threading.enumerate()} - before:
            thread.join(120)
            assert not thread.is_alive(), thread
    exporter = logging.getLogger(tracing._EXPORT_LOGGERS[0])
    record = logging.LogRecord("name", logging.ERROR, "", 0, "no collector: %s", ("reason",), None)
    assert exporter.filter(record) and not exporter.filter(record)


def test_a_missing_extra_is_one_line(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = start().state.config
    assert open_traces(config) is None
    for name in [*sys.modules]:
        if name.partition(".")[0] == "opentelemetry":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "finwhale.server.observe.tracing", raising=False)
    object.__setattr__(config, "otlp_traces_endpoint", "http://127.0.0.1:4318/v1/traces")
    with pytest.raises(FinwhaleError, match=r"pip install 'finwhale\[trace\]'"):
        open_traces(config)
