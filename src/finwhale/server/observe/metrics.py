"""Metrics of the server and its engine, for Prometheus and for the page."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from finwhale.engine.loop.metrics import BOUNDS, EngineMetrics
from finwhale.engine.plan.executor import RankState
from finwhale.platform import process_memory
from finwhale.server.edge.bodies import Budget
from finwhale.server.edge.connections import ConnectionRefusal
from finwhale.server.errors import ErrorCode
from finwhale.server.link.client import EngineClient
from finwhale.server.link.wire import Delta
from finwhale.server.observe.logs import RequestLog

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
    60)  # fmt: skip
RATE_WINDOW_S = 5.0
# A metric's type, name, text and labels, and the number for each tuple of their values.
_Row = tuple[
    type[GaugeMetricFamily | CounterMetricFamily], str, str, tuple[str, ...], Mapping[Any, float]
]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self, client: EngineClient, budget: Budget) -> None:
        self._client = client
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(client, budget))
        counter = partial(Counter, registry=self.registry)
        seconds = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self.requests = counter(
            "finwhale_requests", "HTTP requests by endpoint and status", ["endpoint", "status"]
        )
        self._in_flight = Gauge(
            "finwhale_requests_in_flight", "requests that are being answered",
            registry=self.registry,
        )  # fmt: skip
        self._prompt = counter("finwhale_prompt_tokens", "tokens of accepted prompts")
        self._output = counter("finwhale_output_tokens", "generated tokens")
        self._first = seconds(
            "finwhale_time_to_first_token_seconds",
            "time from a request's arrival to its first token",
        )
        self._between = seconds(
            "finwhale_time_per_output_token_seconds", "time between a continuation's tokens"
        )
        self._duration = seconds(
            "finwhale_request_seconds",
            "time from a request's arrival to its end",
            buckets=(*SECONDS, 300, 1800),
        )
        self._grammars = counter(
            "finwhale_grammars",
            "requests' grammars by result: passed (tried and accepted), known (tried before), full "
            "or busy (try again later), or the reason for the refusal",
            ["result"],
        )
        self.grammar_trial = seconds(
            "finwhale_grammar_trial_seconds", "CPU time of a grammar's trial"
        ).observe
        self.compile_seconds = seconds(
            "finwhale_grammar_compile_seconds",
            "time in which the engine's process compiled a request's grammar",
        )
        self._refusals = counter(
            "finwhale_refusals",
            "requests that were refused or failed, by the error's code; closed connections",
            ["reason"],
        )
        for reason in (*get_args(ErrorCode), *get_args(ConnectionRefusal)):
            self._refusals.labels(reason)
        self.loop_delay = seconds(
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
                log.key.use.tokens -= len(delta.token_ids)
        if delta.milestone is not None:
            log.cached[delta.request_id] = delta.milestone.cached_tokens
            if delta.milestone.times is not None:
                log.times[delta.request_id] = delta.milestone.times
        if delta.finish_reason is not None:
            log.finish.append(delta.finish_reason)

    def end(self, log: RequestLog) -> None:
        self._in_flight.dec()
        self._duration.observe(time.monotonic() - log.begin)

    def grammar(self, result: str) -> None:
        """Counts a request's grammar as accepted or refused."""
        self._grammars.labels(result).inc()

    def refused(self, reason: str) -> None:
        """Counts a refusal. `reason`: an ErrorCode, a ConnectionRefusal, or "status_N"."""
        self._refusals.labels(reason).inc()

    def text(self) -> bytes:
        """The answer of /metrics."""
        return generate_latest(self.registry)

    def live(self) -> dict[str, object]:
        """The engine's numbers that the page draws."""
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


class _Collector(Collector):
    """What is read when it is asked for: the engine's latest metrics, and memory."""

    def __init__(self, client: EngineClient, budget: Budget) -> None:
        self._client, self._budget = client, budget

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "finwhale_engine_up", "1 while the engine lives", value=float(self._client.alive)
        )
        engine = self._client.metrics
        if engine is not None:
            yield from engine_families(engine)
        yield GaugeMetricFamily(
            "finwhale_buffered_body_bytes",
            "bytes of all request bodies that count towards --max-buffered-bytes",
            value=self._budget.total,
        )
        memory = GaugeMetricFamily(
            "finwhale_resident_memory_bytes", "resident memory of a process", labels=["process"]
        )
        for name, pid in (("server", "self"), ("engine", self._client.engine_pid)):
            found = None if pid is None else process_memory(pid)
            if found is not None:
                memory.add_metric([name], found)
        yield memory


def engine_families(engine: EngineMetrics) -> Iterator[Metric]:
    """The engine's metrics as Prometheus' metric families."""
    for kind, name, text, labels, found in (*_of_engine(engine), *_of_ranks(engine)):
        family = kind(name, text, labels=labels)
        for values, number in found.items():
            family.add_metric(values, number)
        yield family
    for name, text, times in (
        ("finwhale_engine_time_to_first_token_seconds",
         "time from the engine's receipt of a request", engine.time_to_first_token),
        ("finwhale_engine_time_between_tokens_seconds", "time between tokens of one sequence",
         engine.time_between_tokens),
        ("finwhale_engine_time_per_output_token_seconds",
         "mean time between tokens of one sequence", engine.time_per_output_token),
        ("finwhale_engine_time_of_verification_seconds",
         "time of forward and sampling in decode steps", engine.time_of_verification),
        ("finwhale_engine_time_of_draft_seconds", "time of the draft head in decode steps",
         engine.time_of_draft),
    ):  # fmt: skip
        bounds = [*map(str, BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(times.counts), strict=True))
        yield HistogramMetricFamily(name, text, buckets=buckets, sum_value=times.total)


def _of_engine(engine: EngineMetrics) -> Iterator[_Row]:
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    for kind, name, text, number in (
        (gauge, "finwhale_running", "running sequences", engine.running),
        (gauge, "finwhale_waiting", "waiting sequences", engine.waiting),
        (gauge, "finwhale_idle_blocks", "cached blocks that no running sequence uses",
         engine.idle_blocks),
        (counter, "finwhale_steps", "forward passes", engine.steps),
        (counter, "finwhale_dropped_kv_events", "events of --kv-events that were not sent",
         engine.dropped_events),
        (counter, "finwhale_ordinary_requests",
         "requests to a prefill server that no decode server continues", engine.ordinary_requests),
        (counter, "finwhale_prefill_tokens", "tokens of admitted prompts", engine.prompt_tokens),
        (counter, "finwhale_prefix_hit_tokens", "prompt tokens found in the prefix cache",
         engine.cached_tokens),
        (counter, "finwhale_preemptions", "sequences preempted to free their pages",
         engine.preemptions),
        (gauge, "finwhale_draft_tokens", "number of drafts that a sequence may have now",
         engine.draft_tokens),
        # vLLM's names and meanings; positions count from 0.
        (counter, "finwhale_spec_decode_num_draft_tokens", "drafts that were verified",
         sum(engine.drafts_proposed)),
        (counter, "finwhale_spec_decode_num_accepted_tokens", "drafts that became output",
         sum(engine.drafts_accepted)),
        (counter, "finwhale_spec_decode_num_drafts",
         "verifications, each of one sequence's drafts", engine.verifications),
        (gauge, "finwhale_draft_mean_accepted_length",
         "mean number of tokens from one verification; 0 without any",
         engine.mean_accepted_length),
    ):  # fmt: skip
        yield kind, name, text, (), {(): number}
    pages = {
        (group, state): count
        for group, use in engine.pages.items()
        for state, count in (("used", use.used), ("free", use.total - use.used))
    }
    yield gauge, "finwhale_pages", "cache pages by kind", ("kind", "state"), pages
    yield from _of_tiers(engine)
    for name, text, label, found in (
        ("finwhale_late_compilations",
         "kernels and graphs compiled or loaded since the engine was ready", "compiler",
         engine.late_compilations),
        ("finwhale_endings", "sequences that ended", "how", engine.endings),
        ("finwhale_spec_decode_num_draft_tokens_per_pos", "drafts that were verified", "position",
         dict(enumerate(engine.drafts_proposed))),
        ("finwhale_spec_decode_num_accepted_tokens_per_pos", "drafts that became output",
         "position", dict(enumerate(engine.drafts_accepted))),
    ):  # fmt: skip
        yield counter, name, text, (label,), {(str(key),): n for key, n in found.items()}


def _of_tiers(engine: EngineMetrics) -> Iterator[_Row]:
    """Where prefixes were found, and what the prefix store does."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    tiers = {"device": (engine.cache_hits, engine.cached_tokens, engine.evicted_blocks)}
    store = engine.store
    if store is not None:
        tiers["store"] = (store.loads, store.loaded_tokens, store.evicted)
    for index, (name, text) in enumerate((
        ("finwhale_prefix_tier_hits", "requests that resumed in the cache; loads from the store"),
        ("finwhale_prefix_tier_tokens", "tokens of these; `device` has those of `store` too"),
        ("finwhale_prefix_tier_evictions", "evicted blocks; files that this server removed"),
    )):  # fmt: skip
        found = {(tier,): counts[index] for tier, counts in tiers.items()}
        yield counter, name, text, ("tier",), found
    if store is None:
        return
    text = "1 while the prefix store is used; 0: the log says why it is not"
    yield gauge, "finwhale_prefix_store_up", text, (), {(): float(not engine.store_off)}
    for name, text, number in (
        ("finwhale_prefix_store_read_bytes", "bytes read from the prefix store", store.read_bytes),
        ("finwhale_prefix_store_read_seconds", "time in which the prefix store was being read",
         store.read_seconds),
        ("finwhale_prefix_store_written_bytes", "bytes written to the prefix store",
         store.written_bytes),
        ("finwhale_prefix_store_skipped_saves", "saves given up because too many were on their way",
         store.skipped),
        ("finwhale_prefix_store_failures", "records that could not be read or written",
         store.failed),
    ):  # fmt: skip
        yield counter, name, text, (), {(): number}


def _of_ranks(engine: EngineMetrics) -> Iterator[_Row]:
    ranks = {(str(number), rank.device): rank for number, rank in enumerate(engine.ranks)}
    memory = {
        (*labels, kind): used
        for labels, rank in ranks.items()
        for kind, used in (asdict(rank.memory) if rank.memory else {}).items()
    }
    text = "bytes that a rank holds on its device: weights, workspace and cache"
    labels = ("rank", "device", "kind")
    yield GaugeMetricFamily, "finwhale_rank_memory_bytes", text, labels, memory
    times: tuple[tuple[str, str, Callable[[RankState], float | None]], ...] = (
        ("finwhale_rank_heartbeat_age_seconds", "time since a rank's process was last seen alive",
         lambda rank: rank.heartbeat_age_s),
        ("finwhale_rank_step_seconds",
         "mean time of a rank's last measured steps, waits for other ranks included",
         lambda rank: rank.times.step_seconds),
        ("finwhale_rank_lm_head_seconds",
         "mean time of the LM head in steps with prefill, which waits for no other rank",
         lambda rank: rank.times.head_seconds),
    )  # fmt: skip
    for name, text, read in times:
        found = {labels: read(rank) for labels, rank in ranks.items()}
        known = {labels: value for labels, value in found.items() if value is not None}
        yield GaugeMetricFamily, name, text, ("rank", "device"), known
