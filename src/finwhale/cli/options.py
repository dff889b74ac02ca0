"""Options that several commands share, and what is made of them."""

import argparse
import os
import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import finwhale
from finwhale.cli.engine_options import add_run_options, cache_directory
from finwhale.request import SamplingParams

DIM, PLAIN = "\033[2m", "\033[0m"  # what a terminal shows faintly, and as usual again


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="PATH", help="directory of a checkpoint (default: the demo model)"
    )
    add_run_options(group)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="tokens to generate at most (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="0 always takes the most likely token (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="keep the most likely tokens up to this probability (default: %(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="keep the K most likely tokens; 0 keeps all (default: %(default)s)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens less likely than P times the most likely (default: %(default)s)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="makes tokens that were seen less likely; 1 is none (default: %(default)s)",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="makes tokens of the output less likely; 0 is none (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, help="makes the same command give the same text")


def sampling_params(args: argparse.Namespace, **more: object) -> SamplingParams:
    """The parameters that `add_sampling_options` read. Raises RequestError."""
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        seed=args.seed,
        **more,  # type: ignore[arg-type]
    )


def load_model(args: argparse.Namespace) -> "finwhale.LLM":
    """The model that `add_model_options` named, with a progress bar on stderr while it loads."""
    with Progress(
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("loading", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report: Callable[[int, int], None] = progress
        return finwhale.LLM(
            args.model,
            device=args.device,
            dtype=args.dtype,
            activations=args.activations or "as-trained",
            wo_a_input=args.wo_a_input,
            max_model_len=args.max_model_len,
            max_num_seqs=1,
            compile=bool(args.compile),
            cache_dir=cache_directory(args, os.environ),
            draft_tokens=args.draft_tokens or 0,
            progress=report,
        )
