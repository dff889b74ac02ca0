"""`finwhale`: run a command, and print a user's mistake as one line."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

import finwhale
from finwhale.errors import FinwhaleError
from finwhale.extras import advice
from finwhale.options import Parser

COMMANDS = {
    "generate": "continue a text",
    "chat": "talk to the model in the terminal",
    "serve": "serve the OpenAI and Anthropic protocols over HTTP",
    "connect": "print the settings with which a coding agent uses a running server",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "warmup": "compile all kernels that serving a checkpoint needs, and store them",
    "inspect": "describe a checkpoint and the memory that it needs",
    "validate": "check that a checkpoint's weights behave as those of a trained model",
    "store": "show what a prefix store holds, or remove a part of it",
    "doctor": "say what works on this machine, and what is missing",
    "ops": "list the operator implementations in use on this machine",
    "bench": "run a benchmark",
    "completion": "print the completions of bash, zsh or fish",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, 1 for a user's mistake, 130 when interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not args or args[0] not in COMMANDS:
        parser.parse_args(args or ["--help"])
        # The parser accepts "--" before a command.
        parser.error(f"the first argument must be a command, not {args[0]}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or pipe with a narrow encoding shows "?" for characters that it lacks.
        sys.stdout.reconfigure(errors="replace")
    command = f"finwhale.cli.{args[0].replace('-', '_')}"
    return exit_code(lambda: int(importlib.import_module(command).run(args[1:])))


def exit_code(work: Callable[[], int]) -> int:
    """The exit code of a command's work. Prints a user's mistake as one line."""
    try:
        return work()
    except FinwhaleError as error:
        print(f"finwhale: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        what = advice(error)
        if what is None:
            raise
        print(f"finwhale: error: {what}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe, so that a flush at exit would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="finwhale",
        description="Run DeepSeek-V4. Without the path of a checkpoint, the embedded model runs.",
        epilog=f"commands:\n{listing}\n\n`finwhale COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("--version", action="version", version=f"finwhale {finwhale.__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
