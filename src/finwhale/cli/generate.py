"""`finwhale generate`: continue a text and stream it."""

import argparse
import sys
from collections.abc import Sequence

from finwhale.checkpoint.location import checkpoint_directory
from finwhale.cli import options
from finwhale.cli.settings import parse_settings
from finwhale.errors import RequestError
from finwhale.options import Parser


def run(argv: Sequence[str]) -> int:
    args = parse_settings(_parser(), argv)
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    if not prompt:
        raise RequestError("the prompt is empty: give at least one character")
    directory = checkpoint_directory(args.model, args.revision)
    llm = options.load_model(directory, options.engine_config(args))
    params = options.sampling_params(args, llm)
    if sys.stdout.isatty():
        sys.stdout.write(f"{options.DIM}{prompt}{options.PLAIN}")
        sys.stdout.flush()
    shown = 0
    for result in llm.stream(prompt, params):
        output = result.outputs[0]
        sys.stdout.write(output.text[shown:])
        sys.stdout.flush()
        shown = len(output.text)
        if result.error is not None:
            sys.stdout.write("\n" if shown else "")
            raise RequestError(result.error)
    sys.stdout.write("\n")
    if args.stats:
        print(options.speed(result), file=sys.stderr)
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not text in {error.encoding}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale generate",
        description="Continue PROMPT and stream the text to stdout. A terminal shows the prompt "
        "before it.",
        epilog='example: finwhale generate "Once upon a time" --max-tokens 200 --seed 1',
    )
    parser.add_argument("prompt", metavar="PROMPT", help='the text to continue; "-" reads stdin')
    parser.add_argument("--stats", action="store_true", help="print the speed to stderr at the end")
    options.add_sampling_options(parser, "stop", "ignore_eos", max_tokens=128)
    options.add_model_options(parser)
    return parser
