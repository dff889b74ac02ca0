"""The load generator: what it counts, and how it tells of errors."""

import asyncio
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from finwhale.bench.serving import Endpoint, Result, main, run_load, summarise
from finwhale.bench.workload import DATASETS, ServerLoad, make_sessions
from finwhale.errors import FinwhaleError

from .running import MODEL, RunningServer


def bodies(load: ServerLoad) -> list[dict[str, Any]]:
    return [json.loads(body) for session in make_sessions(load, MODEL) for body in session]


def test_counts_and_times(server: RunningServer) -> None:
    load = ServerLoad(
        num_requests=10, concurrency=4, input_tokens=(310, 330),
        output_tokens=(3, 6), shared_prefix=300, request_rate=100,
    )  # fmt: skip
    results, seconds = asyncio.run(run_load(Endpoint(url=server.url, model=MODEL), load))
    found = summarise(results, seconds)
    assert found["completed"] == 10 and not found["errors"]
    wanted = bodies(load)
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


def test_command(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "runs.jsonl"
    args = ["--url", f"{server.url}/v1", "--model", MODEL, "--num-requests", "3",
            "--input-tokens", "10", "--output-tokens", "4", "--record", str(record)]  # fmt: skip
    assert main(args) == 0
    assert "output tokens per second" in capsys.readouterr().out
    (line,) = record.read_text().splitlines()
    found = json.loads(line)
    assert found["completed"] == 3 and found["output_tokens"] == 12
    assert found["load"]["request_rate"] == str(math.inf)
    assert found["itl_ms"]["p99"] > 0
    assert main([*args[:3], "other", *args[4:10]]) == 1


def test_agents_find_their_prefixes(server: RunningServer) -> None:
    load = ServerLoad(dataset="agents", num_requests=7, input_tokens=(40, 60), output_tokens=(4, 8),
                shared_prefix=300, turns=3, seed=5)  # fmt: skip
    results, seconds = asyncio.run(run_load(Endpoint(url=server.url, model=MODEL), load))
    found = summarise(results, seconds)
    assert not found["errors"] and found["completed"] == 7
    # Each prompt but the first ones finds the block of 256 tokens of the system prompt.
    assert found["cached_tokens"] >= 4 * 256
    sessions = make_sessions(load, MODEL)
    assert [len(session) for session in sessions] == [3, 3, 1]
    for session in sessions:
        prompts = [json.loads(body)["prompt"] for body in session]
        assert all(b[: len(a)] == a for a, b in pairwise(prompts))
    first, second, _ = results[:3]
    assert second.begin >= first.begin + first.end  # A turn waits for the answer before it.


def test_lengths_of_agents() -> None:
    load = ServerLoad(dataset="agents", num_requests=200, **DATASETS["agents"])
    lengths = [len(body["prompt"]) for body in bodies(load)]
    assert sum(lengths) / 200 == pytest.approx(8596, rel=0.03)
    small = ServerLoad(dataset="agents", num_requests=2, shared_prefix=9,
                       input_tokens=(5, 5), output_tokens=(3, 3))  # fmt: skip
    assert [len(body["prompt"]) for body in bodies(small)] == [9 + 5, 9 + 5 + 3 + 5]
    with pytest.raises(FinwhaleError, match="--shared-prefix must be below --input-tokens"):
        ServerLoad(input_tokens=(5, 9), output_tokens=(3, 3), shared_prefix=5)


def test_an_endpoint_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(FinwhaleError, match=r"no server answers at http://127\.0\.0\.1:1: "):
        main(["--model", "m", "--url", "http://127.0.0.1:1"])
