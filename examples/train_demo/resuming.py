"""Options that both trainings have, and the file that resumes an interrupted one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch


def add_run_options(parser: argparse.ArgumentParser, state: Path, batch_tokens: int) -> None:
    """Adds the options; `state` and `batch_tokens` are defaults."""
    parser.add_argument("--data", type=Path, required=True, help="the folder with corpus.xz")
    parser.add_argument("--out", type=Path, required=True, help="for the checkpoint and the log")
    parser.add_argument("--state", type=Path, default=state, help="resumes an interrupted run")
    parser.add_argument("--seconds", type=float, default=480.0, help="time of the whole run")
    parser.add_argument("--max-steps", type=int, default=0, help="end after this many; 0: no limit")
    parser.add_argument("--save-seconds", type=float, default=90.0)
    parser.add_argument("--batch-tokens", type=int, default=batch_tokens)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--log-steps", type=int, default=25)
    parser.add_argument("--muon-rate", type=float, default=4e-3)
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--device", default="cuda")


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """Creates the folders. Returns the state of an interrupted run; empty: there is none.

    Beside a GPU, the CPU only packs rows and writes checkpoints, and does so in one thread. With
    all threads, and other programs on the cores, writing took 11 to 32 s on an H200's machine.
    """
    if args.device != "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    args.state.mkdir(parents=True, exist_ok=True)
    file = args.state / "state.pt"
    return torch.load(file, map_location=args.device) if file.exists() else {}


def save_state(values: dict[str, Any], state: Path) -> None:
    """Replaces the file as a whole, so that an interruption leaves the old one."""
    torch.save(values, state / "state.pt.new")
    (state / "state.pt.new").replace(state / "state.pt")
