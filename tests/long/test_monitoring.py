"""Prometheus' own tool accepts the rules and the dashboard's expressions, and the alerts fire."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yml"
# For each alert, samples from which it fires, one a minute for an hour. All are of one instance.
FIRES = {
    "FinwhaleDown": {'up{job="finwhale"}': "0x60"},
    "FinwhaleEngineDown": {"finwhale_engine_up": "0x60"},
    "FinwhaleErrors": {
        'finwhale_requests_total{endpoint="/v1/completions", status="200"}': "0+600x60",
        'finwhale_refusals_total{reason="engine_dead"}': "0+7x60",
    },
    "FinwhaleOverloaded": {'finwhale_refusals_total{reason="queue_full"}': "0+1x60"},
    "FinwhaleSlowFirstToken": {
        'finwhale_time_to_first_token_seconds_bucket{le="10"}': "0+90x60",
        'finwhale_time_to_first_token_seconds_bucket{le="30"}': "0+100x60",
        'finwhale_time_to_first_token_seconds_bucket{le="+Inf"}': "0+100x60",
    },
    "FinwhaleEventLoopBlocked": {
        'finwhale_event_loop_delay_seconds_bucket{le="0.25"}': "0+580x60",
        'finwhale_event_loop_delay_seconds_bucket{le="0.5"}': "0+600x60",
        'finwhale_event_loop_delay_seconds_bucket{le="+Inf"}': "0+600x60",
    },
    "FinwhalePreemptions": {"finwhale_preemptions_total": "0+12x60"},
    "FinwhaleLateCompilation": {'finwhale_late_compilations_total{compiler="triton"}': "0+1x60"},
}
# The same metrics of a server that does well.
QUIET = {
    'up{job="finwhale"}': "1x60",
    "finwhale_engine_up": "0x10 1x49",
    'finwhale_requests_total{endpoint="/v1/completions", status="200"}': "0+600x60",
    'finwhale_refusals_total{reason="engine_dead"}': "0+5x60",
    'finwhale_refusals_total{reason="queue_full"}': "0x60",
    'finwhale_refusals_total{reason="invalid_value"}': "0+100x60",
    'finwhale_time_to_first_token_seconds_bucket{le="10"}': "0+100x60",
    'finwhale_time_to_first_token_seconds_bucket{le="+Inf"}': "0+100x60",
    'finwhale_event_loop_delay_seconds_bucket{le="0.25"}': "0+600x60",
    'finwhale_event_loop_delay_seconds_bucket{le="+Inf"}': "0+600x60",
    "finwhale_preemptions_total": "0+1x60",
    'finwhale_late_compilations_total{compiler="triton"}': "0x60",
}


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """promtool from this machine, or from Debian's package, which is not installed."""
    here = shutil.which("promtool")
    if here is not None:
        return here
    if shutil.which("apt-get") is None:
        pytest.skip("needs promtool, or Debian's package prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    subprocess.run(["apt-get", "download", "prometheus"], cwd=directory, check=True, timeout=300)
    (package,) = directory.glob("prometheus*.deb")
    subprocess.run(["dpkg-deb", "-x", package, directory], check=True, timeout=60)
    return str(directory / "usr/bin/promtool")


def run(*words: object) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_files(promtool: str) -> None:
    run(promtool, "check", "rules", ALERTS)
    run(promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml")


def test_prometheus_accepts_the_dashboard(promtool: str, tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/finwhale.json").read_text())
    expressions = [
        target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    rules = [{"record": f"panel_{i}", "expr": text} for i, text in enumerate(expressions)]
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(promtool, "check", "rules", path)


def case(series: dict[str, str], firing: list[str]) -> dict[str, Any]:
    def with_instance(name: str) -> str:
        return name[:-1] + ', instance="a:8001"}' if "{" in name else name + '{instance="a:8001"}'

    return {
        "interval": "1m",
        "input_series": [
            {"series": with_instance(name), "values": values} for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "50m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing
                ],
            }
        ],
    }


def test_the_alerts_fire_when_they_should(promtool: str, tmp_path: Path) -> None:
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
    }
    assert alerts == set(FIRES)
    cases = [case(series, [name]) for name, series in FIRES.items()]
    cases.append(case(QUIET, []))
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": cases}))
    run(promtool, "test", "rules", path)
