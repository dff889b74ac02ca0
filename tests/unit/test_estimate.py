"""Calculated times and memory, beside the records in bench/results.

Machines of one kind differ by up to 9% in large batches and 17% in prefill (docs/speed.md), so a
single record may differ by 17%. Most records must be closer, and together they must not lean to one
side. H100s, one GPU, drafts and loads of many requests did not take part in the fit.
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from finwhale.bench.estimate import GPUS, StepTimes
from finwhale.cli.inspect import RankMemory
from finwhale.cli.main import main
from finwhale.config import EngineConfig
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.weights import weight_specs

step_times = cache(StepTimes)
RESULTS = Path(__file__).parents[2] / "bench/results"
PAGE = Path(__file__).parents[2] / "docs/production.md"
FITTED = "2026-11-26T10"  # the first records of today's kernels
Capture = pytest.CaptureFixture[str]


def records(file: str, since: str = FITTED, layers: int | None = None) -> list[dict[str, Any]]:
    """Records since a date, of whole models or of so many layers."""
    found = map(json.loads, (RESULTS / file).read_text().splitlines())
    return [
        one
        for one in found
        if one["date"] >= since
        and (layers or published(one["config"]).num_hidden_layers) == one["layers"]
    ]


def config_of(record: dict[str, Any]) -> DeepseekV4Config:
    return published(record["config"]).with_layers(record["layers"])


def times_of(record: dict[str, Any]) -> StepTimes:
    (gpu,) = (gpu for name, gpu in GPUS.items() if name.split()[0] in record["hardware"]["gpu"])
    return step_times(config_of(record), record["tensor_parallel_size"], gpu)


def step_tokens(record: dict[str, Any]) -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--max-num-batched-tokens", type=int, default=8192)
    return int(options.parse_known_args(record["command"].split())[0].max_num_batched_tokens)


def errors(found: list[dict[str, Any]]) -> Iterator[float]:
    """Relative errors of the calculated decode steps and prefills."""
    for record in found:
        times = times_of(record)
        for row in record["results"]:
            if row["batch"]:
                calculated = times.decode(row["tokens"], row["batch"])
            else:
                calculated = times.prefill(row["tokens"], step_tokens(record))
            yield calculated / row["ms"]["median"] - 1


def test_whole_models_on_several_h200s() -> None:
    found = records("offline-h200.jsonl")
    assert {record["tensor_parallel_size"] for record in found} == {2, 4, 8}
    all_errors = list(errors(found))
    assert len(all_errors) > 60
    assert max(map(abs, all_errors)) < 0.17
    assert median(map(abs, all_errors)) < 0.05
    assert abs(mean(all_errors)) < 0.02


def test_h100s_and_one_h200() -> None:
    """The memory of an H100 is slower by its data sheet; nothing else is known of it."""
    found = [one for n in (8, 24, 40) for one in records("offline-h100.jsonl", "2026", n)]
    assert len(found) == 4
    assert max(map(abs, errors(found))) < 0.14
    found = [one for n in (8, 32) for one in records("offline-h200.jsonl", "2026-11-26T01", n)]
    assert found and max(map(abs, errors(found))) < 0.1


def test_drafts() -> None:
    found = records("drafting-h200.jsonl", "2026-11-26T17")
    assert {record["tensor_parallel_size"] for record in found} == {2, 4}
    for record in found:
        times = times_of(record)
        for row in record["results"]:
            if row["draft_tokens"] != "auto":
                calculated = times.decode(1024, row["batch"], row["draft_tokens"])
                assert calculated == pytest.approx(row["step_ms"]["median"], rel=0.07), row


def test_loads_of_many_requests() -> None:
    """Two GPUs. The records begin and end with fewer requests, so they are slower.

    docs/notes/2026-11-28-sizes-of-steps.md has the other figures.
    """
    found = records("throughput-h200.jsonl", "2026-11-26")
    found += records("throughput-h100.jsonl", "2026-11-26", 40)
    assert len(found) == 4
    for record in found:
        mixed = record["max_num_batched_tokens"] * 3 // 4
        calculated = times_of(record).tokens_per_s(1024, 256, 128, mixed)
        assert 1 < calculated / record["results"]["alone"]["output_tokens_per_s"] < 1.16
    times = StepTimes(published("flash"), 2, GPUS["H200 141 GB"])
    assert 33 * times.tokens_per_s(8192, 256, 64, 6144) == pytest.approx(26_186, rel=0.05)
    assert 5 * times.tokens_per_s(1024, 256, 128, 6144) == pytest.approx(16_106, rel=0.05)
    for tokens, ms in (2560, 98), (3072, 107), (6144, 185):
        assert times.prefill(tokens, tokens) == pytest.approx(ms, rel=0.08)


def test_the_memory_of_the_cache() -> None:
    """Workspace is assumed to take 8 GiB, and took 3 to 5, so the cache was a little larger."""
    found = [one for one in records("offline-h200.jsonl") if step_tokens(one) == 8192]
    by_size = {(one["config"], one["tensor_parallel_size"]): one for one in found}
    assert len(by_size) == 4
    for record in by_size.values():
        config = config_of(record).without_draft_head()
        storages = {name: one.storage for name, one in weight_specs(config).items()}
        rank = RankMemory(config, storages, record["tensor_parallel_size"])
        room = rank.room(GPUS["H200 141 GB"].num_bytes) / 2**30
        assert 0 < record["memory"]["cache_gib"] - room < 4


def shown(capsys: Capture, *words: str) -> dict[str, str]:
    assert main(["inspect", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = ([cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line)
    return dict(rows)


def test_inspect_plans(capsys: Capture) -> None:
    """A published model, the embedded one, drafts, and what does not fit."""
    found = shown(capsys, "--config", "flash", "--gpus", "4", "--context", "32768", "--gpu", "H200")
    assert found["sequences of 32,768 tokens that fit at once"] == "256 of 256"
    step = StepTimes(published("flash"), 4, GPUS["H200 141 GB"]).decode(32768, 256)
    assert found["decode step of 256 sequences at that context"] == f"{step:.1f} ms"
    assert found["output tokens/s while no prompt is read"] == f"{256e3 / step:,.0f}"
    found = shown(capsys, "--config", "flash", "--gpus", "2", "--gpu", "H100")
    assert found["sequences of 8,192 tokens that fit at once"] == "0 of 64"
    words = "--config flash-0731 --gpus 4 --gpu H100 --draft-tokens 5"
    assert words in PAGE.read_text()
    found = shown(capsys, *words.split())
    assert "all drafts accepted" in found["output tokens/s while no prompt is read"]
    assert "windows and states of 64 sequences" in shown(
        capsys, "--gpus", "2", "--sequences", "64", "--context", "1024", "--output", "16"
    )


def test_the_production_page_has_these_figures() -> None:
    """Its tables of what fits, what to expect, and of one server beside replicas."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    for key, model, size, kind in (
        ("2 H200, Flash", "flash", 2, "H200"),
        ("4 H200, Flash", "flash", 4, "H200"),
        ("4 H100, Flash", "flash", 4, "H100"),
        ("8 H200, Flash", "flash", 8, "H200"),
        ("8 H200, Pro", "pro", 8, "H200"),
    ):
        (gpu,) = (gpu for name, gpu in GPUS.items() if kind in name)
        config = published(model).without_draft_head()
        storages = {name: one.storage for name, one in weight_specs(config).items()}
        rank, times = RankMemory(config, storages, size), step_times(config, size, gpu)
        tokens, _, sizes = rank.cache(gpu.num_bytes, EngineConfig())
        fits, expected = [row[1:] for row in cells if row[0] == key][-2:]
        assert fits == [f"{rank.weights / 2**30:.1f}", str(sizes.num_seqs), f"{tokens:,}"]
        rate = 1e3 * sizes.num_seqs / times.decode(1280, sizes.num_seqs)
        load = times.tokens_per_s(1024, 256, sizes.num_seqs, sizes.mixed_tokens)
        assert expected[-2:] == [f"{rate:,.0f}", f"{load:,.0f}"]
        long = times.tokens_per_s(7936, 256, sizes.num_seqs, sizes.mixed_tokens)
        first = times.prefill(7936, sizes.num_tokens) / 1e3
        for name, *found in cells:
            if model == "flash" and kind == "H200" and name.endswith(f" of {size}"):
                replicas = int(name[0]) // size
                assert found == [
                    *(f"{replicas * float(f'{one:.0f}'):,.0f}" for one in (load, long)),
                    f"{first:.2f}",
                ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--context 9", "these options need --gpus too"),
        ("--gpus 2 --tensors", "either --tensors or --gpus"),
        ("--gpus 2 --config flash x", "either PATH or --config"),
        ("--gpus 2 --config gpt", "unknown configuration 'gpt'"),
        ("--gpus 2 --context 40000", "at most 32768: got 256 and 40000"),
        ("--gpus 2 --output 0", "--output must be"),
        ("--gpus 2 --sequences 0", "max_num_seqs must be at least 1"),
        ("--gpus 2 --draft-tokens 7", "draft_tokens must be 0 to 3"),
    ],
)
def test_bad_plans(words: str, message: str, capsys: Capture) -> None:
    try:
        assert main(["inspect", *words.split()]) == 1
    except SystemExit as end:
        assert end.code == 2
    assert message in capsys.readouterr().err
