"""The comparison with transformers on a tiny model: it measures, compares tokens and records."""

import json
from pathlib import Path

import pytest
from tests.support.tiny import random_weights, tiny_config, write_quantised_checkpoint

from finwhale.bench.record import keep_record
from finwhale.errors import FinwhaleError
from tools import compare_transformers as compare

SMALL = ["--context", "12", "--steps", "8", "--rounds", "1", "--prefill", "16", "--batches", "2"]
SMALL += ["--threads", "1"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = tiny_config(2, quantised=True)
    write_quantised_checkpoint(tmp_path / "model", config, random_weights(config, 2))
    return tmp_path / "model"


def test_record(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "results" / "cpu.jsonl"
    arguments = [str(checkpoint), *SMALL, "--record", str(record)]
    assert compare.main(arguments) == 0
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 1
    keep_record(record, lines[0])
    assert record.read_text(encoding="utf-8").splitlines() == [json.dumps(lines[0])] * 2
    assert lines[0]["command"].startswith("python tools/compare_transformers.py ")
    assert lines[0]["hardware"]["cpu"] and lines[0]["versions"]["transformers"]
    decode, prefill = lines[0]["results"]
    assert decode["what"] == "decode, batch 2, context 12" and decode["same_tokens"] == 1
    assert prefill["what"] == "prefill, 16 tokens"
    for result in (decode, prefill):
        names = [engine["engine"].split()[0] for engine in result["engines"]]
        assert names == ["transformers", "finwhale", "finwhale"]
        assert all(engine["ms"]["min"] > 0 for engine in result["engines"])
        assert result["engines"][0]["speedup"] == {"median": 1.0, "p10": 1.0}
    assert "finwhale as-trained" in capsys.readouterr().out


def test_different_tokens_fail(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = compare.Finwhale.finish

    def other(self: compare.Finwhale) -> list[list[int]]:
        tokens = finish(self)
        return [[*tokens[0][:-1], tokens[0][-1] + 1], *tokens[1:]]

    monkeypatch.setattr(compare.Finwhale, "finish", other)
    assert compare.main([str(checkpoint), *SMALL]) == 1


def test_more_tokens_than_the_model_has(checkpoint: Path) -> None:
    with pytest.raises(FinwhaleError, match="lower --context"):
        compare.main([str(checkpoint), *SMALL, "--prefill", "100000"])
