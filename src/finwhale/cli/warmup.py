"""`finwhale warmup`: fill the cache of compiled kernels, so that the next start finds them."""

import argparse
import os
import time
from collections.abc import Sequence

from rich.console import Console

import finwhale
from finwhale.cli.engine_options import add_engine_options, engine_options
from finwhale.engine.rank.start_times import table, whole_start


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    options = engine_options(args, os.environ)
    make = finwhale.LLM
    began = time.monotonic()
    engine = make(args.path, **options).engine
    console, built = Console(soft_wrap=True), engine.runner.built
    console.print(table(whole_start(engine.runner.phases.seconds, began)), highlight=False)
    if built.kernels:
        console.print(
            f"{built.kernels} kernels, {built.compiled} of them compiled now, are in "
            f"{options['cache_dir']}",
            highlight=False,
        )
    elif not args.compile:
        console.print(f"{engine.runner.device} needs no compiled kernels", highlight=False)
    if args.compile:
        console.print(
            f"layers: {engine.runner.num_compiled} graphs compiled now, the others loaded, from "
            f"{options['cache_dir']}",
            highlight=False,
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finwhale warmup",
        description="Build every kernel that serving a checkpoint needs, on the GPU that is to "
        "serve it, and keep them for the next start: for an image, run it once while building. "
        "Options that change kernels (lengths, sizes of steps) must be those of `finwhale serve`; "
        "--load-format dummy needs config.json alone.",
    )
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="a checkpoint's directory (default: the demo model)"
    )
    add_engine_options(parser)
    return parser
