"""The metrics of operation; the dashboard, the alerts and the docs name metrics that exist."""

import asyncio
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from finwhale import LLM
from finwhale.engine.loop.metrics import PageUse
from finwhale.engine.plan.executor import RankTimes
from finwhale.engine.plan.prefix_store import StoreCounts
from finwhale.platform import process_memory
from finwhale.server.api import health
from finwhale.server.edge.bodies import Budget
from finwhale.server.link.wire import Delta
from finwhale.server.observe.logs import RequestLog
from finwhale.server.observe.metrics import Metrics, engine_families

from .running import MODEL, RunningServer
from .test_limits import request, wait_until

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/finwhale.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
# Labels that Prometheus adds to every sample, and its own metric.
TARGET = {"instance", "job"}
OF_PROMETHEUS = {"up": TARGET}
SELECTOR = re.compile(r"\b([a-z_:][\w:]*)\s*(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
FUNCTIONS = {"histogram_quantile", "increase", "rate", "sum"}

Labels = dict[str, dict[str, set[str]]]


def scrape(server: RunningServer) -> Labels:
    """The labels of each sample in /metrics, and their values."""
    found: Labels = {}
    for family in text_string_to_metric_families(request(server, "GET", "/metrics")[2].decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def value(server: RunningServer, line: str) -> float:
    text = request(server, "GET", "/metrics")[2].decode()
    return float(re.search(rf"^{re.escape(line)} (.*)$", text, re.MULTILINE)[1])  # type: ignore[index]


def used_server(start: Callable[..., RunningServer]) -> RunningServer:
    """A server after a grammar and a refusal, so that every label has values."""
    server = start()
    regex = {"type": "regex", "regex": "[ab]{4}"}
    for fields, status in (({"max_tokens": 4, "response_format": regex}, 200), ({"n": 0}, 400)):
        body = json.dumps({"model": MODEL, "prompt": "Once", **fields}).encode()
        assert request(server, "POST", "/v1/completions", body)[0] == status
    wait_until(lambda: server.live()["running"] == 0)
    # On a CPU no kernel is compiled, so this metric has no label. Grammars' steps are not timed.
    metrics = server.client.metrics
    assert metrics is not None
    times = RankTimes(step_seconds=0.02, head_seconds=0.001)
    ranks = tuple([dataclasses.replace(rank, times=times) for rank in metrics.ranks])
    found = dataclasses.replace(metrics, late_compilations={"triton": 0}, ranks=ranks)
    server.client.metrics = found
    return server


def expressions() -> Iterator[tuple[str, str]]:
    """Where each PromQL expression stands, and its text."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def check(expression: str, samples: Labels) -> None:
    """Every metric of an expression exists, and every label is one of its metrics."""
    grouped = {name.strip() for part in GROUPING.findall(expression) for name in part.split(",")}
    plain = re.sub(r"\[[^]]*\]", "", GROUPING.sub("", expression))
    labels: set[str] = set()
    metrics = 0
    for name, matchers in SELECTOR.findall(plain):
        if name in FUNCTIONS:
            assert not matchers
            continue
        metrics += 1
        assert name in samples or name in OF_PROMETHEUS, name
        known = samples.get(name, {})
        labels |= {*known, *TARGET}
        for label, sign, wanted in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
            assert label in {*known, *TARGET}, f"{name} has no label {label}"
            if label in ("reason", "state"):
                values = set(wanted.split("|")) if "~" in sign else {wanted}
                assert values <= known[label], f"{name}: {values - known[label]}"
    assert metrics, "there is no metric"
    assert grouped <= labels, f"there is no label {grouped - labels}"


def test_the_dashboard_and_the_alerts_name_what_exists(start: Callable[..., RunningServer]) -> None:
    server = used_server(start)
    samples = scrape(server)
    assert value(server, "finwhale_grammar_compile_seconds_count") == 1
    assert value(server, 'finwhale_refusals_total{reason="invalid_value"}') == 1
    for title, expression in expressions():
        try:
            check(expression, samples)
        except AssertionError as error:
            pytest.fail(f"{title}: {error}")
    for wrong in (
        "finwhale_no_such_metric", "sum by (nothing) (finwhale_running)", "1 + 2",
        'finwhale_running{kind="c4"}', 'finwhale_refusals_total{reason=~"timeout|nothing"}',
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            check(wrong, samples)
    # So does the server's page.
    ends = re.compile("_(total|bucket|sum|count|created)$")
    families = {ends.sub("", name) for name in samples}
    stored = dataclasses.replace(server.engine.metrics(), store=StoreCounts())
    families |= {family.name for family in engine_families(stored)}
    for script in (ROOT / "src/finwhale/server/web").glob("*.js"):
        for name in re.findall(r"\bfinwhale_\w+", script.read_text()):
            assert ends.sub("", name) in families, f"{script.name}: {name}"
    # The docs list every metric, and no other.
    page = (ROOT / "docs/monitoring.md").read_text()
    documented = set(re.findall(r"^\| `(finwhale_\w+)", page, re.MULTILINE))
    assert documented == families


def test_the_form_of_the_dashboard_and_the_alerts() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    occupied: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])
        }  # fmt: skip
        assert not cells & occupied and at["x"] + at["w"] <= 24, panel["title"]
        occupied |= cells
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"].keys() == {"summary", "description"}


def test_refusals(start: Callable[..., RunningServer]) -> None:
    server = start()
    for path in ("/nothing", "/nothing/else"):
        assert request(server, "GET", path)[0] == 404
    assert value(server, 'finwhale_refusals_total{reason="status_404"}') == 2
    # An error within a stream counts, too.
    stream = server.openai().completions.create(
        model=MODEL, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.client._loop is not None
    server.client._loop.call_soon_threadsafe(server.client.cut_off)
    line = 'finwhale_refusals_total{reason="server_stopping"}'
    wait_until(lambda: value(server, line) == 1)
    stream.close()
    server._server.connections.on_refusal("slow_client")
    assert value(server, 'finwhale_refusals_total{reason="slow_client"}') == 1


def test_the_values_of_the_engine_s_metrics(demo_llm: LLM) -> None:
    counts = {"drafts_proposed": (9, 5), "drafts_accepted": (6, 2), "verifications": 9}
    pages = {"window": PageUse(3, 10)}
    store = StoreCounts(loads=4, loaded_tokens=1024, read_bytes=900, evicted=3)
    engine = dataclasses.replace(
        demo_llm._engine.metrics(),
        pages=pages,
        store=store,
        **counts,  # type: ignore[arg-type]
    )
    values = {
        (sample.name.removeprefix("finwhale_"), *sample.labels.values()): sample.value
        for family in engine_families(engine)
        for sample in family.samples
    }
    assert values["pages", "window", "used"] == 3 and values["pages", "window", "free"] == 7
    drafts = "spec_decode_num_{}_tokens{}_total"
    for kind, (first, second) in (("draft", (9, 5)), ("accepted", (6, 2))):
        assert values[drafts.format(kind, ""),] == first + second
        assert values[drafts.format(kind, "_per_pos"), "0"] == first
        assert values[drafts.format(kind, "_per_pos"), "1"] == second
    assert values["draft_mean_accepted_length",] == pytest.approx(1 + 8 / 9)
    assert values["prefix_tier_tokens_total", "store"] == 1024
    assert values["prefix_tier_tokens_total", "device"] == engine.cached_tokens
    assert values["prefix_tier_hits_total", "store"] == 4
    assert values["prefix_tier_evictions_total", "store"] == 3
    assert values["prefix_store_read_bytes_total",] == 900 and values["prefix_store_up",] == 1


def test_tokens_of_one_step_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    client: Any = SimpleNamespace(alive=True, metrics=None, engine_pid=None)
    metrics, log = Metrics(client, Budget(1, 1)), RequestLog("r", "/v1/completions", 1)
    for token_ids in ([1], [2, 3]):
        metrics.delta(log, Delta("e", 0, token_ids, ""))
        now += 0.5
    name = "finwhale_time_per_output_token_seconds_{}"
    found = [metrics.registry.get_sample_value(name.format(what)) for what in ("count", "sum")]
    assert found == [2, 0.5] and log.output_tokens == 3


def test_memory_and_buffered_bytes(start: Callable[..., RunningServer]) -> None:
    server = start()
    server.state.budget.resize(0, 200 << 10)
    assert value(server, "finwhale_buffered_body_bytes") == (200 - 64) << 10
    server.state.budget.resize(200 << 10, 0)
    assert value(server, "finwhale_buffered_body_bytes") == 0

    class Process:
        pid = os.getppid()

    assert list(scrape(server)["finwhale_resident_memory_bytes"]["process"]) == ["server"]
    server.client._process = Process()  # type: ignore[assignment]
    try:
        assert server.client.engine_pid == os.getppid()
        found = scrape(server)["finwhale_resident_memory_bytes"]["process"]
    finally:
        server.client._process = None
    assert found == {"server", "engine"}
    assert 1 << 20 < value(server, 'finwhale_resident_memory_bytes{process="server"}') < 1 << 40
    assert process_memory(2**22 + 1) is None, "no process has such an id"


def test_event_loop_delay(start: Callable[..., RunningServer], monkeypatch: Any) -> None:
    monkeypatch.setattr(health, "PULSE_S", 0.01)
    server = start()
    loop = server.client._loop
    assert loop is not None
    pulse = asyncio.run_coroutine_threadsafe(health.pulse(server.state), loop)
    wait_until(lambda: value(server, "finwhale_event_loop_delay_seconds_count") > 2)
    before = value(server, "finwhale_event_loop_delay_seconds_sum")
    loop.call_soon_threadsafe(time.sleep, 0.3)
    wait_until(lambda: value(server, "finwhale_event_loop_delay_seconds_sum") > before + 0.25)
    pulse.cancel()
