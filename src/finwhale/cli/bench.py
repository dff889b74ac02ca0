"""`finwhale bench`: run a benchmark."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from finwhale.cli.main import exit_code
from finwhale.interrupts import terminated_as_interrupted
from finwhale.options import Parser

BENCHMARKS = {
    "offline": "measure whole engine steps, decode and prefill, and their floors",
    "throughput": "measure tokens per second of many requests, and the effect of other requests",
    "start": "measure cold and warm starts: from process start to the first token",
    "load": "measure loading a checkpoint, and compare it with a plain read of its files",
    "serving": "load-test an OpenAI-compatible endpoint: throughput and latencies (bench extra)",
    "report": "turn records into one HTML file of tables that compare them",
}


def run(argv: Sequence[str]) -> int:
    width = max(map(len, BENCHMARKS))
    listing = "\n".join(f"  {name:{width}}  {text}" for name, text in BENCHMARKS.items())
    parser = Parser(
        prog="finwhale bench",
        description="Run a benchmark and print its results; --record appends them to a file.",
        epilog=f"benchmarks:\n{listing}\n\n`finwhale bench NAME --help` lists its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    args = parser.parse_args(argv[:1])
    benchmark = importlib.import_module(f"finwhale.bench.{args.name}")
    return _measure(benchmark.main, argv[1:])


def run_tool(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a benchmark outside of the package, as `finwhale bench` runs its own, and exit."""
    sys.exit(exit_code(lambda: _measure(main, sys.argv[1:])))


def _measure(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    with terminated_as_interrupted():
        return int(main(argv))
