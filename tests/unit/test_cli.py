"""The command line without an engine: help, mistakes, options, inspect."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.official_config import config_json

import finwhale
from finwhale.cli.main import COMMANDS, main
from finwhale.cli.options import add_engine_options, engine_config
from finwhale.config import EngineConfig
from finwhale.models.deepseek_v4.presets import published

Capture = pytest.CaptureFixture[str]


# --- Help -----------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys: Capture) -> None:
    for args in ([], ["--help"], ["-h"]):
        with pytest.raises(SystemExit) as done:
            main(args)
        assert done.value.code == 0
        out = capsys.readouterr().out
        assert all(f"  {name}" in out and text in out for name, text in COMMANDS.items())
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"finwhale {finwhale.__version__}\n"


@pytest.mark.parametrize("args", [["--", "serve"], ["--"], ["--", "--", "serve"], ["nothing"]])
def test_a_first_argument_that_is_no_command_is_refused(args: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as done:
        main(args)
    assert done.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("finwhale: error: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_s_help_says_what_it_does(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"usage: finwhale {name}")
    assert captured.err == ""
    # Every option is explained.
    options = re.findall(
        r"^  (--[a-z-]+)((?: \S+)*)(?:  +(\S.*))?\n( {20,}\S)?", captured.out, re.M
    )
    assert all(text or more for _, _, text, more in options), options


@pytest.mark.parametrize("args", [["nonsense"], ["generate"], ["ops", "--platform", "tpu"]])
def test_a_mistake_in_the_command_itself(args: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as done:
        main(args)
    assert done.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error: " in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--max-num-seq", "3"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["generate", "--max-token=5", "x"], "--max-token=5; did you mean --max-tokens?"),
        (["run-batch", "--modle", "x"], "--modle; did you mean --model?"),
        (["bench", "serving", "--zzz"], "--zzz"),
        (["ops", "more"], "more"),
    ],
)
def test_an_unknown_option_is_one_line(args: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as done:
        main(args)
    assert done.value.code == 2
    captured = capsys.readouterr()
    name = " ".join(args[: 2 if args[0] == "bench" else 1])
    hint = f"(finwhale {name} --help lists the options)\n"
    assert captured.err == f"finwhale {name}: error: unrecognized arguments: {message} {hint}"
    assert captured.out == ""


# --- inspect --------------------------------------------------------------------------------------


def words(capsys: Capture) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_inspect(tiny_path: Path, capsys: Capture) -> None:
    assert main(["inspect", str(tiny_path)]) == 0
    out = words(capsys)
    assert "4: 1 window only, 2 C4, 1 C128" in out
    assert "1 layers by hash, 3 by score" in out
    assert "complete: every tensor that the model needs is there" in out
    count = len(load_file(tiny_path / "model.safetensors"))
    assert f"{count:,}" in out
    assert main(["inspect", str(tiny_path), "--tensors"]) == 0
    assert "layers.3.ffn.gate.bias" in words(capsys).replace("\u2026", "")


def test_inspect_shows_what_each_number_of_gpus_holds(capsys: Capture, tmp_path: Path) -> None:
    """Flash cut to two layers, with six experts: two ranks hold half of what they divide."""
    config = replace(published("flash").with_layers(2), n_routed_experts=6, o_groups=4)
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert main(["inspect", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    by_size = {row[0]: row[1:] for row in rows if row and row[0] in ("1", "2", "4", "8")}
    tokens = {size: [int(n.replace(",", "")) for n in by_size[size][1:3]] for size in "124"}
    assert tokens["1"] < tokens["2"] < tokens["4"]
    assert all(h100 < h200 for h100, h200 in tokens.values())
    gib = {size: float(by_size[size][0].removesuffix(" GiB")) for size in "124"}
    assert (gib["1"] - gib["2"]) / 2 == pytest.approx(gib["2"] - gib["4"], abs=0.02)
    assert by_size["8"] == ["cannot divide it", *[""] * (len(by_size["8"]) - 1)]
    assert "8 ranks cannot divide this model: o_groups 4 is not a multiple of 8." in " ".join(
        out.split()
    )


def test_inspect_shows_the_bytes_of_the_cache(capsys: Capture, tmp_path: Path) -> None:
    """Flash cut to layers of each kind: two windows, C4 and C128, and the draft head's window."""
    config = replace(published("flash").with_layers(4), n_routed_experts=6)
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert main(["inspect", str(tmp_path)]) == 1
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    packed = {row[1].strip(): row[4].strip() for row in rows if len(row) == 6}
    row, key = 448 + 2 * 64 + 8, 64 + 4  # ops/attention/layout.py, ops/indexer/layout.py
    token = (row + key) / 4 + 1280 / 256  # a page of two C128 rows begins at a multiple of 256
    states = 8 * 4 * (512 + 128) * 4 + 128 * 2 * 512 * 4
    assert packed["cache, each token"] == f"{token:.0f} B"
    assert packed["cache, each sequence"] == f"{(5 * 128 * row + states) / 2**10:.2f} KiB"
    assert packed["cache, one full context"] == f"{token:.2f} MiB"  # of 2^20 tokens


def test_inspect_of_an_incomplete_checkpoint(
    tiny_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    tensors = load_file(tiny_path / "model.safetensors")
    del tensors["layers.2.attn.attn_sink"]
    tensors["layers.9.extra"] = torch.ones(3)
    tensors["norm.weight"] = tensors["norm.weight"][1:].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_path / "config.json").read_text())
    assert main(["inspect", str(tmp_path)]) == 1
    out = words(capsys)
    assert "1 tensors missing: layers.2.attn.attn_sink" in out
    assert "1 tensors unexpected: layers.9.extra" in out
    assert "1 tensors not as config.json implies: norm.weight is F32 [63]" in out
    assert "it cannot be loaded" in out


# --- Options --------------------------------------------------------------------------------------


def test_where_compiled_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(*args: str, **environment: str) -> EngineConfig:
        parser = argparse.ArgumentParser()
        add_engine_options(parser, watchdog_seconds=60.0)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return engine_config(parser.parse_args(args))

    assert config("--cache-dir", "/somewhere").cache_dir == "/somewhere"
    assert config(XDG_CACHE_HOME="/x").cache_dir == "/x/finwhale"
    assert config().cache_dir == str(Path.home() / ".cache" / "finwhale")
    assert replace(config("--max-num-seqs", "3"), cache_dir="") == EngineConfig(
        max_num_seqs=3, cache_dir="", watchdog_seconds=60.0, wo_a_input="fp8"
    )


def test_what_no_engine_takes_is_told_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("finwhale.cli.serve.serve", lambda *args: pytest.fail("it starts"))
    assert main(["serve", "--draft-tokens", "9"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == 'finwhale: error: draft_tokens must be 0 to 7 or "auto", got 9\n'
