"""`finwhale warmup`: compile the kernels that serving needs, so that the next start finds them."""

import argparse
import time
from collections.abc import Sequence

from rich.console import Console

from finwhale.checkpoint.location import checkpoint_directory
from finwhale.cli.options import add_engine_options, add_path, engine_config
from finwhale.cli.settings import parse_settings
from finwhale.engine.start.start_times import table, whole_start
from finwhale.loaded_model import open_engine
from finwhale.options import Parser


def run(argv: Sequence[str]) -> int:
    args = parse_settings(_parser(), argv)
    config = engine_config(args)
    began = time.monotonic()
    engine = open_engine(config, checkpoint_directory(args.path, args.revision))
    console, rank = Console(soft_wrap=True, highlight=False), engine.executor.description
    console.print(table(whole_start(engine.start_seconds, began)))
    if rank.kernels:
        counts = f"{rank.kernels} kernels, {rank.compiled_kernels} of them compiled now"
        console.print(f"{counts}, are in {config.cache_dir}")
    elif not args.compile:
        console.print(f"{rank.device} needs no compiled kernels")
    if args.compile:
        graphs = f"{rank.compiled_layers} graphs compiled now, the others loaded"
        console.print(f"layers: {graphs}, in {config.cache_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale warmup",
        description="Compile every kernel that serving a checkpoint needs, and store it for the "
        "next start. Run this on the kind of GPU that will serve the checkpoint, for example while "
        "you build an image. Options that change kernels (lengths, numbers of "
        "sequences and tokens) must be the same as for `finwhale serve`. --load-format dummy needs "
        "only config.json.",
    )
    add_path(parser)
    add_engine_options(parser, ("generation_config",), watchdog_seconds=60.0)
    return parser
