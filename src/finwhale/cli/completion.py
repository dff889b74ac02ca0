"""`finwhale completion`: print a script with which a shell completes finwhale's commands."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from finwhale.cli.bench import BENCHMARKS
from finwhale.cli.main import COMMANDS
from finwhale.errors import FinwhaleError

try:
    import shtab
except ModuleNotFoundError as error:
    raise FinwhaleError(
        "shell completion needs shtab: install finwhale with the completion extra, "
        "pip install 'finwhale[completion]'"
    ) from error

SHELLS = ("bash", "zsh", "fish")
# Options and arguments whose values are directories and files, by their metavar.
_COMPLETED_AS = {
    "PATH": shtab.DIRECTORY,
    "DIRECTORY": shtab.DIRECTORY,
    "FILE": shtab.FILE,
    "INPUT": shtab.FILE,
    "OUTPUT": shtab.FILE,
}
_HOW = """where to put the script:
  bash: finwhale completion bash > ~/.local/share/bash-completion/completions/finwhale
  zsh:  finwhale completion zsh > DIRECTORY/_finwhale, for a DIRECTORY of $fpath
  fish: finwhale completion fish > ~/.config/fish/completions/finwhale.fish"""


def run(argv: Sequence[str]) -> int:
    shell = _parser().parse_args(argv).shell
    print(shtab.complete(whole_parser(), shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """All commands and options in one parser; a command whose extra is missing has no options."""
    whole = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="finwhale",
    )
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
    parser = _parser_of(module)
    parents = [] if parser is None else [parser]
    commands.add_parser(name, help=text, parents=parents, add_help=not parents)


def _parser_of(module: str) -> argparse.ArgumentParser | None:
    try:
        parser: argparse.ArgumentParser = importlib.import_module(module)._parser()
    except FinwhaleError:
        return None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("finwhale"):
            raise
        return None
    for action in parser._actions:
        if isinstance(action.metavar, str) and action.metavar in _COMPLETED_AS:
            action.complete = _COMPLETED_AS[action.metavar]  # type: ignore[attr-defined]
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="finwhale completion",
        description="Print a script with which a shell completes commands, options and paths.",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return parser
