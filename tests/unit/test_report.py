"""`finwhale bench report`: the records of this repository, comparisons, and broken records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finwhale.bench.record import Record, read_records
from finwhale.bench.report import groups_of, main, page
from finwhale.errors import FinwhaleError

RESULTS = sorted((Path(__file__).parents[2] / "bench/results").glob("*.jsonl"))


def records(*found: dict[str, Any]) -> list[Record]:
    return [Record(Path("runs.jsonl"), i, data) for i, data in enumerate(found, 1)]


def offline(ms: float, **more: Any) -> dict[str, Any]:
    result = {"what": "decode, batch 8", "batch": 8, "tokens": 1024, "ms": {"median": ms}}
    return {"benchmark": "offline", "config": "flash", "layers": 8, "date": "2026-01-02",
            "results": [{**result, "floor_ms": 1.0}], **more}  # fmt: skip


def serving(value: int, speed: float, **more: Any) -> dict[str, Any]:
    load = {"url": "http://a", "model": "m", "concurrency": value, "request_rate": "inf",
            "input_tokens": [9, 9], "output_tokens": [3, 3], "seed": value}  # fmt: skip
    times = {"mean": 2.0, "p50": 2.0, "p99": 4.0}
    return {"benchmark": "serving", "load": load,
            "output_tokens_per_second": speed, "requests_per_second": speed / 3, "errors": {},
            "ttft_ms": times, "tpot_ms": times, "itl_ms": times, "e2e_ms": times,
            "cached_tokens": 1, "prompt_tokens": 4, "command": "bench", **more}  # fmt: skip


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_record_of_the_repository_is_read(path: Path) -> None:
    found = read_records([path])
    groups = groups_of(found)
    shown = [run.record for group in groups for run in group.runs]
    assert sorted(record.line for record in shown) == [record.line for record in found]
    for group in groups:
        for run in group.runs:
            assert run.values
            units = {value.unit for value in run.values.values()}
            # Results have units, except errors; the demo's quality has none.
            assert any(units) or group.kind in ("accuracy", "other")
    text = page("Results", groups)
    for record in found:
        assert f"{path.name}:{record.line}<" in text


def test_runs_are_compared_in_per_cent() -> None:
    found = records(offline(4.0), offline(3.0), offline(5.0), offline(2.0, layers=9))
    groups = groups_of(found)
    assert [[run.name for run in group.runs] for group in groups] == [["R1", "R2", "R3"], ["R4"]]
    text = page("t", groups)
    assert '3 <span class="floor">33% of floor</span> <span class="delta good">-25.0%' in text
    assert '<span class="delta bad">+25.0%' in text
    assert text.count("of floor</span>") == 4


def test_loads_are_compared_by_requests_at_once() -> None:
    other = serving(1, 45.0)
    other["load"]["output_tokens"] = [4, 4]
    groups = groups_of(records(serving(1, 30.0), serving(8, 90.0), serving(1, 45.0), other))
    assert [[run.name for run in group.runs] for group in groups] == [["R1", "R3"], ["R2"], ["R4"]]
    assert "concurrency 1" in groups[0].work and "http" not in groups[0].work
    values = groups[0].runs[1].values
    assert values["", "output tokens per second"].value == 45.0
    assert values["ttft", "p99"].unit == "ms" and not values["ttft", "p99"].more_is_better
    assert '<span class="delta good">+50.0%' in page("t", groups)


def test_results_of_a_list_have_names() -> None:
    rows = [{"batch": 8, "draft_tokens": 5, "accept": 0.5, "step_ms": {"median": 2.0}, "rows": 2.5}]
    starts = [{"start": "warm", "phases": {"import": 1.5}}] * 2
    found = groups_of(records({"benchmark": "a", "results": rows + starts}))[0].runs[0].values
    assert list(found) == [
        ("batch 8, draft_tokens 5, 50% right", "step"),
        ("warm, phases", "import"),
        ("warm 2, phases", "import"),
    ]


def test_unknown_kinds_and_fields_are_listed() -> None:
    odd = {"benchmark": "offline", "results": [{"what": "x", "ms": "fast", "bad": float("nan")}]}
    new = {"benchmark": "tides", "deep": {"levels": [1, 2]}, "moons": [{"name": "Io", "g": 1.8}]}
    groups = groups_of(records(odd, new, {"answer": 42}))
    assert [group.kind for group in groups] == ["offline", "tides", "other"]
    text = page("t", groups)
    for shown in ("fast", "nan", "levels", "[1, 2]", "Io", "1.8", "answer", ">42 "):
        assert shown in text


def test_the_page_is_one_file_and_runs_no_script() -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    found = serving(1, 30.0, command=evil, commit=evil, hardware={"gpu": evil})
    found["load"]["url"] = found["load"]["dataset"] = evil
    text = page(evil, groups_of(records(found, {evil: evil}, {"benchmark": evil, "x": [evil]})))
    assert "<script" not in text and "<img" not in text
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(""", text)
    assert "default-src 'none'; style-src" in text


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(offline(1.0)) + "\n\n{broken\n")
    with pytest.raises(FinwhaleError, match=r"runs\.jsonl:3: expected a JSON object: "):
        main([str(path)])
    path.write_text("[1]\n")
    with pytest.raises(FinwhaleError, match=r"runs\.jsonl:1: expected a JSON object, got list"):
        main([str(path)])
    path.write_text("\n")
    with pytest.raises(FinwhaleError, match="no record in"):
        main([str(path)])
    with pytest.raises(FinwhaleError, match=r"cannot read .*: No such file"):
        main([str(tmp_path / "none.jsonl")])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "runs.jsonl", tmp_path / "new" / "report.html"
    path.write_text(json.dumps(offline(1.0)) + "\n")
    assert main([str(path), "--out", str(out), "--title", "A & B"]) == 0
    assert "1 records in" in capsys.readouterr().err
    assert "<h1>A &amp; B</h1>" in out.read_text()
