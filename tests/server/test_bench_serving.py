"""The load generator: what it counts, and how it tells of errors."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from finwhale.bench import compare, serving
from finwhale.bench.latency import Limits, best_goodput, knee, summarise
from finwhale.bench.load_client import Endpoint, Result, run_load
from finwhale.bench.serving import main
from finwhale.bench.workload import Load, make_sessions
from finwhale.errors import FinwhaleError

from .running import MODEL, RunningServer


def bodies(load: Load) -> list[dict[str, Any]]:
    return [json.loads(body) for session in make_sessions(load, MODEL) for body in session]


def test_counts_and_times(server: RunningServer) -> None:
    load = Load(
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


def test_agents_find_their_prefixes(server: RunningServer) -> None:
    load = Load(dataset="agents", num_requests=7, input_tokens=(40, 60), output_tokens=(4, 8),
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


def num_words(body: dict[str, Any]) -> int:
    return sum(len(one["content"].split()) for one in body["messages"])


def test_lengths_of_the_data_sets() -> None:
    chat = bodies(Load(dataset="chat", chat=True, num_requests=1000))
    prompts = sorted(num_words(body) for body in chat)
    outputs = sorted(body["max_tokens"] for body in chat)
    assert 680 < prompts[500] < 850 and 135 < outputs[500] < 170
    assert 4 < prompts[841] / prompts[159] < 11  # exp(2 sigma) is 7.2
    cut = bodies(Load(dataset="chat", num_requests=100, max_length=300))
    assert max(len(body["prompt"]) + body["max_tokens"] for body in cut) == 300
    load = Load(dataset="agents", chat=True, num_requests=200, input_tokens=(429, 1288),
                output_tokens=(91, 273), shared_prefix=4096)  # fmt: skip
    agents = [num_words(body) for body in bodies(load)]
    assert sum(agents) / 200 == pytest.approx(8596, rel=0.03)
    talk = bodies(Load(dataset="agents", chat=True, num_requests=2, shared_prefix=9,
                       input_tokens=(5, 5), output_tokens=(3, 3)))  # fmt: skip
    roles = [[one["role"] for one in body["messages"]] for body in talk]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    with pytest.raises(FinwhaleError, match="first turn has up to"):
        Load(dataset="agents", shared_prefix=90, max_length=100).check()


def point(rate: float, e2e: float, share: float) -> dict[str, Any]:
    goodput = {"share": share, "requests_per_second": rate * share}
    return {"output_tokens_per_second": rate, "e2e_ms": {"mean": e2e}, "goodput": goodput}


def test_knee_and_goodput() -> None:
    # Throughput doubles until it saturates at the third load; then only latency grows.
    points = [point(1, 10, 1.0), point(2, 11, 0.99), point(3.9, 12, 0.95), point(4.1, 24, 0.5)]
    assert knee(points) == 2 and best_goodput(points) == 2
    assert best_goodput(points[3:]) is None
    assert knee([{"output_tokens_per_second": 0, "e2e_ms": None}]) is None
    fast, slow = Result(0.0, [0.1, 0.12], 0.12, 1, 0, 2), Result(0.0, [0.1, 0.3], 0.3, 1, 0, 2)
    late, failed = Result(0.0, [0.9], 0.9, 1, 0, 1), Result(0.0, error="x")
    found = summarise([fast, slow, late, failed], 2.0, Limits(ttft_ms=500, itl_ms=50))
    assert found["goodput"]["share"] == 0.25 and found["goodput"]["requests_per_second"] == 0.5


def command(server: RunningServer, *more: str) -> list[str]:
    return ["--model", MODEL, "--input-tokens", "10", "--output-tokens", "3", *more]


def test_sweep_is_recorded_by_point_and_resumed(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "sweep.jsonl"
    measured: list[Load] = []

    async def stopping(endpoint: Endpoint, load: Load) -> Any:
        if load.concurrency == 2 and len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(load)
        return await run_load(endpoint, load)

    monkeypatch.setattr(serving, "run_load", stopping)
    args = command(server, "--url", server.url, "--sweep", "concurrency=2,1,3", "--num-requests",
                   "4", "--ttft-limit", "60000", "--record", str(path))  # fmt: skip
    assert main(args) == 130
    assert "stopped after 1 of 3 loads" in capsys.readouterr().err
    assert len(path.read_text().splitlines()) == 1
    measured.append(measured[0])
    assert main([*args, "--resume"]) == 0
    told = capsys.readouterr().out
    assert "knee (most throughput for its latency)" in told and "100% of the requests" in told
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["sweep"]["value"] for record in records] == [1, 2, 3]
    assert len({record["load"]["seed"] for record in records}) == 3
    assert all(record["goodput"]["share"] == 1 for record in records)


def test_an_endpoint_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(FinwhaleError, match=r"no server answers at http://127\.0\.0\.1:1: "):
        main(["--model", "m", "--url", "http://127.0.0.1:1"])


def test_paired_differences() -> None:
    """Rounds that differ by the same factor have an interval of width zero."""
    a = [1.0, 7.0, 3.0]
    assert compare.difference(a, [2 * x for x in a]) == {"difference": 1, "low": 1, "high": 1}
    found = compare.difference([1, 1, 1, 1], [1.1, 1.2, 0.9, 1.0])
    # exp(0.04307 + t * 0.06192) - 1 with t = 0 and -+3.182, the mean and error of the logarithms.
    wanted = {"difference": 0.0440, "low": -0.1427, "high": 0.2714}
    assert found == pytest.approx(wanted, abs=2e-4)
    assert [compare.order(i) for i in range(3)] == [(0, 1), (1, 0), (0, 1)]


def test_compare_sends_both_servers_the_same(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sent: list[tuple[str, Sequence[list[bytes]]]] = []

    async def watched(endpoint: Endpoint, load: Load) -> Any:
        sent.append((endpoint.url, make_sessions(load, endpoint.model)))
        return await run_load(endpoint, load)

    monkeypatch.setattr(compare, "run_load", watched)
    path, other = tmp_path / "compare.jsonl", server.url.replace("127.0.0.1", "localhost")
    args = command(server, "--url", server.url, "--url", f"{other}/v1", "--num-requests", "2",
                   "--rounds", "2", "--record", str(path))  # fmt: skip
    assert compare.main(args) == 0
    assert "95% interval" in capsys.readouterr().out
    a, b = server.url, other
    assert [url for url, _ in sent] == [b, a, a, b, b, a]
    requests = [sessions for _, sessions in sent]
    assert requests[0] == requests[1] != requests[2] == requests[3] != requests[4] == requests[5]
    found = json.loads(path.read_text())
    assert found["results"]["TTFT, mean"]["low"] <= found["results"]["TTFT, mean"]["high"]
    assert len(found["rounds"]) == 2


def test_the_bench_needs_no_matplotlib_without_a_plot() -> None:
    code = "import sys, finwhale.bench.serving; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
