"""OpenTelemetry traces of requests, sent to a collector over OTLP (HTTP, protobuf).

A request's spans are made after its answer, from times that the log and the engine have anyway. A
thread of OpenTelemetry's SDK sends them. If the collector is slow or gone, the SDK's queue drops
spans; requests never wait.

OpenTelemetry's HTTP and GenAI conventions name the attributes. The SDK itself reads its environment
variables, such as OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

import finwhale
from finwhale.extras import named_extras
from finwhale.request import RequestTimes
from finwhale.server.edge.connections import RepeatedMessages
from finwhale.server.observe.logs import RequestLog, printable

with named_extras():
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.propagate import extract
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

FLUSH_S = 2.0  # time limit for sending the last spans when the server ends
MAX_TEXT = 256  # maximum length of an attribute from a client
_EXPORT_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
# Fields of SamplingParams to which OpenTelemetry gives the same names.
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty",
    "frequency_penalty")  # fmt: skip

Attributes = dict[str, Any]


class Traces:
    """Makes and sends the spans of one server's requests."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: URL that takes traces, such as http://127.0.0.1:4318/v1/traces."""
        own = {"service.name": "finwhale", "service.version": finwhale.__version__}
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES replace ours.
        given = Resource(own).merge(OTELResourceDetector().detect())
        resource = Resource.create(given.attributes)
        repeated = RepeatedMessages()  # a missing collector must not fill the log
        for name in _EXPORT_LOGGERS:
            logging.getLogger(name).addFilter(
                lambda record: repeated.left_out(str(record.msg)) is not None
            )
        # The SDK would wait up to 30 s for a collector when the process ends.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("finwhale", finwhale.__version__)

    def add(
        self, scope: Mapping[str, Any], status: int, begin: float, log: RequestLog | None
    ) -> str | None:
        """Adds the spans of a request that has ended; returns the id of its trace.

        Args:
            scope: of the request; `scope["state"]` says how the request ended.
            status: the HTTP status; 0: there was no answer.
            begin: the time of the request's arrival (time.monotonic()).
            log: None: the request was refused before its body was read.

        Returns:
            The trace's id as 32 hexadecimal digits; None: the trace is not sampled.
        """
        headers = Headers(scope=dict(scope))
        offset_ns = time.time_ns() - time.monotonic_ns()
        route = getattr(scope.get("route"), "path", None)
        span = self._tracer.start_span(
            f"{scope['method']} {route or 'unknown'}",
            context=extract(headers),
            kind=SpanKind.SERVER,
            attributes=_of_http(scope, headers, status, route),
            start_time=_ns(begin, offset_ns),
        )
        if span.is_recording():
            _set_status(span, scope["state"], status)
            if log is not None:
                span.set_attributes(_of_request(log, begin))
                inside = set_span_in_context(span)
                for index, times in enumerate(log.times.values()):
                    attributes = {"finwhale.prompt.index": index} if len(log.times) > 1 else None
                    for name, start, end in (
                        ("queue", times.arrival, times.admission),
                        ("prefill", times.admission, times.first_token),
                        ("decode", times.first_token, _end(times, log)),
                    ):
                        child = self._tracer.start_span(
                            name, inside, attributes=attributes, start_time=_ns(start, offset_ns)
                        )
                        child.end(_ns(end, offset_ns))
        span.end(time.monotonic_ns() + offset_ns)
        context = span.get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else None

    def close(self) -> None:
        """Sends the last spans, if the collector takes them within FLUSH_S."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)


def _ns(moment: float, offset_ns: int) -> int:
    """Nanoseconds since 1970 of a time of time.monotonic()."""
    return int(moment * 1e9) + offset_ns


def _end(times: RequestTimes, log: RequestLog) -> float:
    """The time of the last token. The engine does not report it if the request was cut off."""
    if len(log.finish) == log.num_sequences or times.last_token > times.first_token:
        return times.last_token
    return max([times.first_token, *log.last_tokens.values()])


def _of_http(
    scope: Mapping[str, Any], headers: Headers, status: int, route: str | None
) -> Attributes:
    found: Attributes = {
        "http.request.method": scope["method"],
        "url.scheme": scope["scheme"],
        "url.path": printable(scope["path"], MAX_TEXT),
        # The id of the answer's header x-request-id and of the log.
        "gen_ai.request.id": scope["state"]["request_id"],
    }
    if route is not None:
        found["http.route"] = route
    if status:
        found["http.response.status_code"] = status
    if given := headers.get("x-request-id"):
        found["http.request.header.x-request-id"] = [printable(given, MAX_TEXT)]
    return found


def _of_request(log: RequestLog, begin: float) -> Attributes:
    is_chat = log.endpoint != "/v1/completions"
    found: Attributes = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "finwhale",
        "gen_ai.request.model": printable(log.model, MAX_TEXT),
        "gen_ai.request.stream": log.stream,
    }
    if log.params is None:
        return found
    found["gen_ai.request.choice.count"] = log.params.n
    for name in _PARAMETERS:
        if (value := getattr(log.params, name)) is not None:
            found[f"gen_ai.request.{name}"] = value
    found |= {
        "gen_ai.usage.input_tokens": log.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": log.cached_tokens,
        "gen_ai.usage.output_tokens": log.output_tokens,
    }
    if log.finish:
        found["gen_ai.response.finish_reasons"] = log.finish
    if log.first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = log.begin + log.first_token_s - begin
    return found


def _set_status(span: Span, state: Mapping[str, Any], status: int) -> None:
    """Marks the span of a request that was refused, failed, or lost its client."""
    refusal = state.get("refusal")
    if refusal is not None:
        kind, reason = refusal.get("code", str(status)), refusal["reason"]
    elif state.get("client_gone"):
        kind, reason = "client_gone", "the client closed its connection"
    elif status >= 400 or not status:
        kind, reason = str(status or "no_answer"), None
    else:
        return
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, reason))
