"""`finwhale completion`: print a script with which a shell completes finwhale's commands."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from finwhale.cli.bench import BENCHMARKS
from finwhale.cli.main import COMMANDS
from finwhale.extras import advice
from finwhale.options import Parser

SHELLS = ("bash", "zsh", "fish")
# Options and arguments whose values are directories and files, by their metavar.
_DIRECTORIES, _FILES = ("PATH", "DIRECTORY"), ("FILE", "INPUT", "OUTPUT")
_HOW = """where to put the script:
  bash: finwhale completion bash > ~/.local/share/bash-completion/completions/finwhale
  zsh:  finwhale completion zsh > DIRECTORY/_finwhale, for a DIRECTORY of $fpath
  fish: finwhale completion fish > ~/.config/fish/completions/finwhale.fish"""


def run(argv: Sequence[str]) -> int:
    shell, shtab = _parser().parse_args(argv).shell, importlib.import_module("shtab")
    print(shtab.complete(whole_parser(), shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """All commands and options in one parser; a command whose extra is missing has no options."""
    whole = Parser(prog="finwhale")
    commands = whole.add_subparsers()
    for name, text in COMMANDS.items():
        if name == "bench":
            benchmarks = commands.add_parser(name, help=text).add_subparsers()
            for one, what in BENCHMARKS.items():
                _add(benchmarks, one, what, f"finwhale.bench.{one}")
        else:
            _add(commands, name, text, f"finwhale.cli.{name.replace('-', '_')}")
    return whole


def _add(commands: Any, name: str, text: str, module: str) -> None:
    parser = parser_of(module)
    parents = [] if parser is None else [parser]
    shtab = importlib.import_module("shtab")
    for action in () if parser is None else parser._actions:
        if action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    commands.add_parser(name, help=text, parents=parents, add_help=not parents)


def parser_of(module: str) -> argparse.ArgumentParser | None:
    """The parser of a command's module; None: the command needs an extra that is missing."""
    try:
        parser: argparse.ArgumentParser = importlib.import_module(module)._parser()
    except ModuleNotFoundError as error:
        if advice(error) is None:
            raise
        return None
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale completion",
        description="Print a script with which a shell completes commands, options and paths.",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return parser
