"""Command-line arguments that several benchmarks share."""

import argparse
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from finwhale.bench.record import RESULTS
from finwhale.config import EngineConfig
from finwhale.models.registry import PUBLISHED
from finwhale.options import Parser, add_options, options_of
from finwhale.platform import existing_folder

RECORD_BYTES = 10 * 2**20  # The largest record of this repository has 60 kB.


def new_parser(
    name: str, doc: str | None, record: str, program: str | None = None
) -> argparse.ArgumentParser:
    """Create a benchmark's parser, which has the option --record.

    Args:
        doc: docstring of the benchmark's module. Its first paragraph becomes the description.
        record: name of a results file, as an example for the help text.
        program: how users start it; None: as `finwhale bench`.
    """
    about = (doc or "").split("\n\n", 1)[0]
    prog = program or f"finwhale bench {name}"
    parser = Parser(prog=prog, description=about, formatter_class=_Formatter)
    about = f"append the results to this JSONL file, for example {RESULTS / record}"
    parser.add_argument("--record", type=record_path, metavar="FILE", help=about)
    return parser


def record_path(text: str) -> Path:
    """The file of --record. Raises ArgumentTypeError if no record can be appended to it."""
    path = Path(text)
    folder = existing_folder(path.absolute().parent)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory, not a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is not a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: permission denied")
    if shutil.disk_usage(folder).free < RECORD_BYTES:
        raise argparse.ArgumentTypeError(f"the disk of {folder} is full")
    return path


def add_sizes(parser: argparse.ArgumentParser, layers: int | None = None) -> None:
    """Add --config and --layers; `layers` is the default number of layers."""
    add = parser.add_argument
    add("--config", choices=sorted(PUBLISHED), default="flash", help="sizes of this model")
    add("--layers", type=int, default=layers, metavar="N", help="use only the first N layers")


def add_model_arguments(
    parser: argparse.ArgumentParser, without: Collection[str], **defaults: Any
) -> None:
    """Add the arguments that `engine.source` reads, and the options of the engine.

    Args:
        without: options to leave out, because the benchmark sets them.
        defaults: default values that differ for this benchmark.
    """
    add_sizes(parser)
    parser.add_argument("--dummy", action="store_true", help="make random weights on the device")
    parser.add_argument("--model", metavar="PATH", help="directory of a checkpoint to use instead")
    without = {"load_format", "generation_config", "tool_grammar", *without}
    names = {one.name for one in options_of(EngineConfig)} - without
    add_options(parser.add_argument_group("engine"), EngineConfig, names, **defaults)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default value to a help text that does not mention it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, bool | None) or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)
