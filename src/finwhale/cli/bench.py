"""`finwhale bench`: measurements."""

import argparse
import importlib
from collections.abc import Sequence

BENCHMARKS = {
    "cpu": "decode and prefill beside transformers, same weights, same run (needs the test extra)",
    "accuracy": "a platform's table beside the references: logits and choices",
    "overhead": "what the host does in a step, over a stub of the model",
    "offline": "whole steps of the engine, decode and prefill, beside their floors",
    "throughput": "requests through the engine: tokens a second, and what others do to the wait",
    "start": "from a process's beginning to its first token, cold and warm; the first requests",
    "load": "a checkpoint's files to weights in place, beside a plain read of them",
    "serving": "load on an OpenAI endpoint: waiting and throughput (needs the bench extra)",
    "prefix": "finding the beginning of a prompt that was read before: host time a token",
    "ops": "Triton kernels beside their references, on a GPU",
}


def run(argv: Sequence[str]) -> int:
    listing = "\n".join(f"  {name}  {text}" for name, text in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="finwhale bench",
        description="Measure and print a table; with the option for it, append a record.",
        epilog=f"what:\n{listing}\n\n`finwhale bench WHAT --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=BENCHMARKS, metavar="WHAT")
    args = parser.parse_args(argv[:1])
    return int(importlib.import_module(f"finwhale.bench.{args.what}").main(argv[1:]))
