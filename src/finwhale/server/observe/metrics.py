"""Metrics of the server and its engine, for Prometheus and for the page."""

import resource
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.server.edge.bodies import Budget
from finwhale.server.edge.connections import ConnectionRefusal
from finwhale.server.errors import ErrorCode
from finwhale.server.link.client import EngineClient
from finwhale.server.link.wire import Delta
from finwhale.server.observe.logs import RequestLog

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)
RATE_WINDOW_S = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self, client: EngineClient, budget: Budget) -> None:
        self._client = client
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(client))
        self.registry.register(_ServerCollector(client, budget))
        registry = self.registry
        seconds = partial(Histogram, buckets=SECONDS, registry=registry)
        self._requests = Counter(
            "finwhale_requests",
            "HTTP requests by endpoint and status",
            ["endpoint", "status"],
            registry=registry,
        )
        self._in_flight = Gauge(
            "finwhale_requests_in_flight", "requests that are being answered", registry=registry
        )
        self._prompt = Counter(
            "finwhale_prompt_tokens", "tokens of accepted prompts", registry=registry
        )
        self._output = Counter("finwhale_output_tokens", "generated tokens", registry=registry)
        self._first = seconds(
            "finwhale_time_to_first_token_seconds",
            "time from a request's arrival to its first token",
        )
        self._between = seconds(
            "finwhale_time_per_output_token_seconds", "time between a continuation's tokens"
        )
        self._duration = Histogram(
            "finwhale_request_seconds",
            "time from a request's arrival to its end",
            buckets=(*SECONDS, 300, 1800),
            registry=registry,
        )
        self._grammars = Counter(
            "finwhale_grammars",
            "requests' grammars by result: passed (tried and accepted), known (tried before), full "
            "or busy (try again later), or the reason for the refusal",
            ["result"],
            registry=registry,
        )
        self._grammar_seconds = seconds(
            "finwhale_grammar_trial_seconds", "CPU time of a grammar's trial"
        )
        self._compile_seconds = seconds(
            "finwhale_grammar_compile_seconds",
            "time in which the engine's process compiled a request's grammar",
        )
        self._refusals = Counter(
            "finwhale_refusals",
            "requests that were refused or failed, by the error's code; closed connections",
            ["reason"],
            registry=registry,
        )
        for reason in (*get_args(ErrorCode), *get_args(ConnectionRefusal)):
            self._refusals.labels(reason)
        self._loop_delay = seconds(
            "finwhale_event_loop_delay_seconds",
            "delay of the wake-ups of the server's event loop, measured ten times a second",
        )
        self._recent: deque[tuple[float, int]] = deque()

    def step(self, deltas: Sequence[Delta]) -> None:
        """Counts the tokens of a step."""
        count = sum(len(delta.token_ids) for delta in deltas)
        if count:
            self._output.inc(count)
            self._recent.append((time.monotonic(), count))
            self._trim()

    def begin(self, log: RequestLog) -> None:
        self._in_flight.inc()
        self._prompt.inc(log.prompt_tokens)

    def delta(self, log: RequestLog, delta: Delta) -> None:
        """Counts a request's part of a step."""
        now = time.monotonic()
        if delta.token_ids:
            if log.first_token_s is None:
                log.first_token_s = now - log.begin
                self._first.observe(log.first_token_s)
            continuation = delta.request_id, delta.index
            if continuation in log.last_tokens:
                each = (now - log.last_tokens[continuation]) / len(delta.token_ids)
                for _ in delta.token_ids:
                    self._between.observe(each)
            log.last_tokens[continuation] = now
            log.output_tokens += len(delta.token_ids)
            if log.key is not None:
                log.key.use.spend(len(delta.token_ids))
        if delta.milestone is not None:
            log.cached[delta.request_id] = delta.milestone.cached_tokens
            if delta.milestone.times is not None:
                log.times[delta.request_id] = delta.milestone.times
        if delta.finish_reason is not None:
            log.finish.append(delta.finish_reason)

    def end(self, log: RequestLog) -> None:
        self._in_flight.dec()
        self._duration.observe(time.monotonic() - log.begin)

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def grammar(self, result: str) -> None:
        """Counts a request's grammar as accepted or refused."""
        self._grammars.labels(result).inc()

    def grammar_trial(self, seconds: float) -> None:
        """Counts a trial of a grammar, and its CPU time."""
        self._grammar_seconds.observe(seconds)

    def grammar_compiled(self, seconds: float) -> None:
        """Counts a grammar that the engine has compiled."""
        self._compile_seconds.observe(seconds)

    def refused(self, reason: str) -> None:
        """Counts a refusal. `reason`: an ErrorCode, a ConnectionRefusal, or "status_N"."""
        self._refusals.labels(reason).inc()

    def loop_delay(self, seconds: float) -> None:
        """Counts a wake-up of the event loop."""
        self._loop_delay.observe(max(0.0, seconds))

    def text(self) -> bytes:
        """The answer of /metrics."""
        return generate_latest(self.registry)

    def live(self) -> dict[str, object]:
        """The numbers that the page draws."""
        self._trim()
        found: dict[str, object] = {
            "alive": self._client.alive,
            "tokens_per_second": sum(count for _, count in self._recent) / RATE_WINDOW_S,
            "output_tokens": _value(self._output),
            "running": 0,
            "waiting": 0,
            "pages": {},
        }
        engine = self._client.metrics
        if engine is not None:
            found |= {
                "running": engine.running,
                "waiting": engine.waiting,
                "pages": {kind: [use.used, use.total] for kind, use in engine.pages.items()},
                "prompt_tokens": engine.prompt_tokens,
                "prefix_hit_tokens": engine.cached_tokens,
                "preemptions": engine.preemptions,
                "ranks": [asdict(rank) for rank in engine.ranks],
            }
        return found

    def _trim(self) -> None:
        horizon = time.monotonic() - RATE_WINDOW_S
        while self._recent and self._recent[0][0] < horizon:
            self._recent.popleft()


def _value(counter: Counter) -> int:
    return int(next(iter(counter.collect())).samples[0].value)


class _EngineCollector(Collector):
    """The engine's latest metrics."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "finwhale_engine_up", "1 while the engine lives", value=float(self._client.alive)
        )
        engine = self._client.metrics
        if engine is not None:
            yield from engine_families(engine)


class _ServerCollector(Collector):
    """The memory of the processes, and of request bodies."""

    def __init__(self, client: EngineClient, budget: Budget) -> None:
        self._client, self._budget = client, budget

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "finwhale_buffered_body_bytes",
            "bytes of all request bodies that count towards --max-buffered-bytes",
            value=self._budget.bytes,
        )
        memory = GaugeMetricFamily(
            "finwhale_resident_memory_bytes", "resident memory of a process", labels=["process"]
        )
        for name, pid in (("server", "self"), ("engine", self._client.engine_pid)):
            found = None if pid is None else resident_bytes(pid)
            if found is not None:
                memory.add_metric([name], found)
        yield memory


def resident_bytes(pid: int | str) -> int | None:
    """The resident memory of a process; None: it has ended, or the system has no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * resource.getpagesize()


def engine_families(engine: EngineMetrics) -> Iterable[Metric]:
    """The engine's metrics as Prometheus' metric families."""
    yield from _counts(engine)
    yield from _ranks(engine)
    yield from _drafts(engine)
    yield from _times(engine)


def _counts(engine: EngineMetrics) -> Iterable[Metric]:
    yield GaugeMetricFamily("finwhale_running", "running sequences", value=engine.running)
    yield GaugeMetricFamily("finwhale_waiting", "waiting sequences", value=engine.waiting)
    yield GaugeMetricFamily(
        "finwhale_idle_blocks",
        "cached blocks that no running sequence uses",
        value=engine.idle_blocks,
    )
    pages = GaugeMetricFamily("finwhale_pages", "cache pages by kind", labels=["kind", "state"])
    for kind, use in engine.pages.items():
        pages.add_metric([kind, "used"], use.used)
        pages.add_metric([kind, "free"], use.total - use.used)
    yield pages
    for name, text, value in (
        ("finwhale_steps", "forward passes", engine.steps),
        ("finwhale_prefill_tokens", "tokens of admitted prompts", engine.prompt_tokens),
        (
            "finwhale_prefix_hit_tokens",
            "prompt tokens found in the prefix cache",
            engine.cached_tokens,
        ),
        (
            "finwhale_preemptions",
            "sequences preempted to free their pages",
            engine.preemptions,
        ),
    ):
        yield CounterMetricFamily(name, text, value=value)
    late = CounterMetricFamily(
        "finwhale_late_compilations",
        "kernels and graphs compiled or loaded since the engine was ready",
        labels=["compiler"],
    )
    for compiler, value in engine.late_compilations.items():
        late.add_metric([compiler], value)
    yield late
    endings = CounterMetricFamily("finwhale_endings", "sequences that ended", labels=["how"])
    for how, value in engine.endings.items():
        endings.add_metric([how], value)
    yield endings


def _ranks(engine: EngineMetrics) -> Iterable[Metric]:
    memory = GaugeMetricFamily(
        "finwhale_rank_memory_bytes",
        "bytes that a rank holds on its device: weights, workspace and cache",
        labels=["rank", "device", "kind"],
    )
    age = GaugeMetricFamily(
        "finwhale_rank_heartbeat_age_seconds",
        "time since a rank's process was last seen alive",
        labels=["rank", "device"],
    )
    step = GaugeMetricFamily(
        "finwhale_rank_step_seconds",
        "mean time of a rank's last measured steps, waits for other ranks included",
        labels=["rank", "device"],
    )
    head = GaugeMetricFamily(
        "finwhale_rank_lm_head_seconds",
        "mean time of the LM head in steps with prefill, which waits for no other rank",
        labels=["rank", "device"],
    )
    for number, rank in enumerate(engine.ranks):
        labels = [str(number), rank.device]
        for family, seconds in (
            (step, rank.times.step_seconds),
            (head, rank.times.head_seconds),
        ):
            if seconds is not None:
                family.add_metric(labels, seconds)
        age.add_metric(labels, rank.heartbeat_age_s)
        for kind, used in (asdict(rank.memory) if rank.memory else {}).items():
            memory.add_metric([*labels, kind], used)
    yield from (memory, age, step, head)


def _drafts(engine: EngineMetrics) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "finwhale_draft_tokens",
        "number of drafts that a sequence may have now",
        value=engine.draft_tokens,
    )
    # vLLM's names and meanings; positions count from 0.
    for name, by_position, text, counts in (
        (
            "finwhale_spec_decode_num_draft_tokens",
            "finwhale_spec_decode_num_draft_tokens_per_pos",
            "drafts that were verified",
            engine.drafts_proposed,
        ),
        (
            "finwhale_spec_decode_num_accepted_tokens",
            "finwhale_spec_decode_num_accepted_tokens_per_pos",
            "drafts that became output",
            engine.drafts_accepted,
        ),
    ):
        yield CounterMetricFamily(name, text, value=sum(counts))
        family = CounterMetricFamily(by_position, text, labels=["position"])
        for position, count in enumerate(counts):
            family.add_metric([str(position)], count)
        yield family
    yield CounterMetricFamily(
        "finwhale_spec_decode_num_drafts",
        "verifications, each of one sequence's drafts",
        value=engine.verifications,
    )
    yield GaugeMetricFamily(
        "finwhale_draft_mean_accepted_length",
        "mean number of tokens from one verification; 0 without any",
        value=engine.mean_accepted_length,
    )


def _times(engine: EngineMetrics) -> Iterable[Metric]:
    for name, text, found in (
        (
            "finwhale_engine_time_to_first_token_seconds",
            "time from the engine's receipt of a request",
            engine.time_to_first_token,
        ),
        (
            "finwhale_engine_time_between_tokens_seconds",
            "time between tokens of one sequence",
            engine.time_between_tokens,
        ),
        (
            "finwhale_engine_time_per_output_token_seconds",
            "mean time between tokens of one sequence",
            engine.time_per_output_token,
        ),
        (
            "finwhale_engine_time_of_verification_seconds",
            "time of forward and sampling in decode steps",
            engine.time_of_verification,
        ),
        (
            "finwhale_engine_time_of_draft_seconds",
            "time of the draft head in decode steps",
            engine.time_of_draft,
        ),
    ):
        sums = list(accumulate(found.counts))
        bounds = [*map(str, found.bounds), "+Inf"]
        yield HistogramMetricFamily(
            name,
            text,
            buckets=list(zip(bounds, sums, strict=True)),
            sum_value=found.total,
        )
