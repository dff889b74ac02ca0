"""The checks of benchmarks before they begin, and their end when they are stopped."""

import argparse
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.op_case import CONFIGS, ModelDraw

from finwhale.bench import arguments
from finwhale.bench.arguments import new_parser
from finwhale.cli import bench
from finwhale.errors import ResourceError
from finwhale.models.deepseek_v4.presets import published
from tools import compare_transformers, operators

GB = 10**9


def test_a_record_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arguments.record_path(f"{tmp_path}/a/b/runs.jsonl").name == "runs.jsonl"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    for wrong, reason in (
        (f"{tmp_path}", "is a directory"),
        (f"{tmp_path}/file/x", "not a direct"),
    ):
        with pytest.raises(SystemExit):
            new_parser("x", "X", "x.jsonl").parse_args(["--record", wrong])
        assert reason in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: permission denied"):
        arguments.record_path(f"{tmp_path}/file")
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(argparse.ArgumentTypeError, match=r"the disk of .* is full"):
        arguments.record_path(f"{tmp_path}/file")


def test_the_comparison_with_transformers_checks_memory_and_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = published("flash").without_draft_head().with_layers(1)
    memory = "finwhale.engine.ranks.memory_checks.available_memory"
    monkeypatch.setattr(memory, lambda: 50 * GB)
    with pytest.raises(ResourceError, match=r"take [\d.]+ GB, and 50.0 GB of memory are free"):
        compare_transformers._check_room(config, num_engines=2)
    monkeypatch.setattr(memory, lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GB))
    with pytest.raises(ResourceError, match=r"in float32 take 3\d.\d GB, and 1.0 GB of "):
        compare_transformers._check_room(config, num_engines=2)


def test_the_bytes_that_bench_ops_needs() -> None:
    args = argparse.Namespace(operators=[], batches=[1, 8192], context=8192)
    needed = operators.least_bytes(CONFIGS["flash"], ModelDraw("cpu"), args)
    assert 2 * GB < needed < 20 * GB
    args.operators = ["rms_norm"]
    assert operators.least_bytes(CONFIGS["flash"], ModelDraw("cpu"), args) < GB


@pytest.mark.parametrize("ignored", [False, True], ids=["foreground", "background"])
def test_sigterm_cleans_up_as_an_interrupt_does(
    ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = []

    def run(argv: object) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
        return 0

    module = SimpleNamespace(main=run)
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            bench.run(["offline"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleaned and signal.getsignal(signal.SIGTERM) is terminated
