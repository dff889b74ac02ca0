"""Measurements of engines on two ranks: each runs on all ranks, which compute the same."""

import json
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.stepping import Stepper
from tests.support.tiny import divisible_config, random_weights, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM, EngineDeadError
from finwhale.bench import drafting, load, offline
from finwhale.bench.engine import call_ranks_collectively, measured
from finwhale.config import EngineConfig
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import Ranks
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.weight_sources import Weights
from tools import accuracy

from .test_equal_ranks import sharded_config

pytestmark = pytest.mark.usefixtures("forked_ranks")
ROOT = Path(__file__).parents[2]
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("measured") / "model", divisible_config()
    write_plain_checkpoint(path, config, random_weights(config, 3))
    return path


@pytest.fixture(scope="module")
def two(path: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)  # for the functions of this module
        llm = LLM(path, activations="exact", tensor_parallel_size=2, **OPTIONS)
        yield llm
    assert isinstance(llm._engine.executor, Ranks)
    llm._engine.executor.close()


def streams(token_ids: list[int], executor: LocalExecutor) -> tuple[int, Tensor]:
    return executor.collectives.rank.index, Stepper(executor).read(token_ids, [3])


def failing(executor: LocalExecutor) -> None:
    if executor.collectives.rank.index:
        raise ValueError("a function has failed")


def test_accuracy_of_two_ranks(two: LLM, path: Path) -> None:
    """The logits of one rank, and the same bits on both."""
    text = accuracy.SampleText(list(range(5, 45)), torch.tensor([0, 7, 39]), [3, 20], 4)
    one = LLM(path, activations="exact", **OPTIONS)
    (alone,) = call_ranks_collectively(one._engine.executor, partial(accuracy.compute, text, True))
    found, other = call_ranks_collectively(
        two._engine.executor, partial(accuracy.compute, text, True)
    )
    assert found.digest == other.digest and not other.logits
    for way, logits in found.logits.items():
        assert accuracy.compare(logits, alone.logits[way])["relative_error"] < 1e-5
    assert accuracy.overlap(found.selected, alone.selected) == 1


def test_accuracy_of_a_long_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in steps, with the values of one step."""
    text = accuracy.SampleText(list(range(5, 45)), torch.tensor([0, 7, 39]), [3, 20], 4)
    executor = LLM(path, activations="exact", **OPTIONS)._engine.executor
    (whole,) = call_ranks_collectively(executor, partial(accuracy.compute, text, True))
    monkeypatch.setattr(accuracy, "STEP_TOKENS", 16)
    (found,) = call_ranks_collectively(executor, partial(accuracy.compute, text, True))
    assert len(found.selected) == 3 * len(whole.selected)
    for way, logits in whole.logits.items():
        torch.testing.assert_close(found.logits[way], logits)


def test_offline_measurements_run_on_all_ranks(two: LLM, path: Path) -> None:
    bench = offline.Bench(two._engine, 3)
    result = bench.decode(offline.Shape(3, 12))
    assert result["ms"]["median"] > 0 and result["experts_hit"] >= 1
    assert result["graph_ms"] is None  # a CPU captures nothing
    args = Namespace(model=str(path), config="flash")
    found = measured(args, two._engine)
    assert found["tensor_parallel_size"] == 2 and found["config"] == str(path)
    assert found["layers"] == 3


def test_a_function_runs_on_all_ranks_until_one_fails(two: LLM, path: Path) -> None:
    """Between requests; a failure ends the engine, so this is the last test of the engine."""
    before = two.generate([5, 6, 7])
    found = call_ranks_collectively(two._engine.executor, partial(streams, [4, 2, 9, 11]))
    assert [index for index, _ in found] == [0, 1]
    assert torch.equal(found[0][1], found[1][1])
    alone = LLM(path, activations="exact", **OPTIONS)
    (one,) = call_ranks_collectively(alone._engine.executor, partial(streams, [4, 2, 9, 11]))
    torch.testing.assert_close(found[0][1], one[1])
    after = two.generate([5, 6, 7])
    assert len(before) == len(after) == 1 and after[0].error is None
    with pytest.raises(EngineDeadError, match=r"rank 1 \(cpu\): ValueError: a function has failed"):
        call_ranks_collectively(two._engine.executor, failing)


def test_drafting_benchmark_on_two_ranks(path: Path) -> None:
    model = config_of(divisible_config())
    args = Namespace(batches=[2], context=16, steps=4, draft_tokens=1, accept=[0.0, 1.0])
    rows = drafting.measure(
        args,
        EngineConfig(
            device="cpu",
            activations="exact",
            tensor_parallel_size=2,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=128,
        ),
        model,
        Weights(model),
    )
    assert [row["tensor_parallel_size"] for row in rows] == [2, 2, 2]
    assert [row["tokens_per_step"] for row in rows] == [1, 1, 2]


def test_loading_on_two_ranks(tmp_path: Path) -> None:
    """All load at once, and read the files together."""
    model, record, config = tmp_path / "model", tmp_path / "load.jsonl", sharded_config()
    write_plain_checkpoint(model, config, random_weights(config, 3))
    options = f"--model {model} --device cpu --tensor-parallel-size 2 --repeats 2 --record {record}"
    assert load.main(options.split()) == 0
    found = json.loads(record.read_text())
    assert found["tensor_parallel_size"] == 2 and found["layers"] == 3
    assert set(found["seconds"]) == {"plain read", "load", "fold"} and found["share"] > 0


def test_loading_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(sharded_config())
    monkeypatch.setattr(load, "published", lambda name: config)
    record = tmp_path / "load.jsonl"
    options = f"--zeros --layers 2 --device cpu --repeats 1 --record {record}".split()
    assert load.main(options) == 0
    found = json.loads(record.read_text())
    assert found["layers"] == 2 and found["bytes"] > 10**4 and "--zeros" in found["command"]
    with pytest.raises(SystemExit):
        load.main([*options, "--model", str(tmp_path)])
    assert "give only one of them" in capsys.readouterr().err
