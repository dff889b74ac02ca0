"""The load generator: what it counts, and how it tells of errors."""

import asyncio
import json
import math
from pathlib import Path

import pytest

from finwhale.bench.serving import Load, Result, main, make_bodies, run_load, summarise

from .running import MODEL, RunningServer


def test_counts_and_times(server: RunningServer) -> None:
    load = Load(
        url=server.url, model=MODEL, num_requests=10, concurrency=4, input_tokens=(310, 330),
        output_tokens=(3, 6), shared_prefix=300, request_rate=100,
    )  # fmt: skip
    results, seconds = asyncio.run(run_load(load))
    found = summarise(results, seconds)
    assert found["completed"] == 10 and not found["errors"]
    wanted = [json.loads(body) for body in make_bodies(load)]
    assert found["prompt_tokens"] == sum(len(body["prompt"]) for body in wanted)
    assert found["output_tokens"] == sum(body["max_tokens"] for body in wanted)
    assert found["cached_tokens"] > 0
    for result, body in zip(results, wanted, strict=True):
        assert len(result.pieces) == result.output_tokens == body["max_tokens"]
        assert 0 < result.ttft <= result.pieces[-1] <= result.end
    assert found["output_tokens_per_second"] == pytest.approx(
        found["output_tokens"] / seconds, rel=0.01
    )
    assert len({tuple(body["prompt"][:300]) for body in wanted}) == 1
    assert len({tuple(body["prompt"]) for body in wanted}) == 10


def test_quantiles_are_measured_values() -> None:
    results = [Result(0.0, [i / 1000, i / 1000 + 0.01], i / 100, 1, 0, 2) for i in range(1, 101)]
    results.append(Result(0.0, error="status 429"))
    found = summarise(results, 2.0)
    assert found["ttft_ms"] == {"mean": 50.5, "p50": 50.0, "p99": 99.0}
    assert found["tpot_ms"]["p99"] == pytest.approx(10)
    assert found["errors"] == {"status 429": 1} and found["completed"] == 100
    assert found["requests_per_second"] == 50
    nothing = summarise([Result(0.0, error="x")], 1.0)
    assert nothing["ttft_ms"] is None and nothing["completed"] == 0


def test_command(server: RunningServer, tmp_path: Path) -> None:
    record, picture = tmp_path / "runs.jsonl", tmp_path / "run.svg"
    args = ["--url", f"{server.url}/v1", "--model", MODEL, "--num-requests", "3", "--chat",
            "--input-tokens", "10", "--output-tokens", "4", "--record", str(record),
            "--plot", str(picture)]  # fmt: skip
    assert main(args) == 0
    (line,) = record.read_text().splitlines()
    found = json.loads(line)
    assert found["completed"] == 3 and found["output_tokens"] == 12
    assert found["load"]["request_rate"] == str(math.inf)
    assert found["itl_ms"]["p99"] > 0
    assert picture.read_text().count("<path") > 5
    assert main([*args[:3], "other", *args[4:11]]) == 1
