"""Measure cold and warm starts, from process start to the first token.

Each start is a separate process. A cold start has an empty cache of compiled kernels, and a warm
start has the cache that the previous process left.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from finwhale.bench.arguments import add_model_arguments, new_parser
from finwhale.bench.engine import measured, open_engine, prefill
from finwhale.bench.record import keep_record, stamp
from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import DEMO_PATH
from finwhale.engine.start.start_times import process_start, whole_start

REPORT = "finwhale-start "  # Each start's process prints its results on a line with this prefix.


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one start, in this process."""
    began = time.monotonic()
    demo = args.model is None and not args.dummy
    if demo:
        args = argparse.Namespace(**vars(args) | {"model": DEMO_PATH})
    tokenizer = Tokenizer.open(DEMO_PATH) if demo else None
    engine, _ = open_engine(args, args.max_model_len, tokenizer)
    phases = whole_start(engine.start_seconds, began)
    ready = time.monotonic()
    prefill(engine, [1, 2, 3])
    first_token = time.monotonic() - process_start()
    return {
        **measured(args, engine),
        **({"config": "demo"} if demo else {}),
        "phases": {name: round(spent, 3) for name, spent in phases.items()},
        "ready_s": round(ready - process_start(), 3),
        "first_token_s": round(first_token, 3),
        "kernels": engine.executor.description.kernels,
        "compiled": engine.executor.description.compiled_kernels,
    }


def starts(args: argparse.Namespace, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Measure a cold start, then warm starts, each in its own process."""
    results = []
    with tempfile.TemporaryDirectory(prefix="finwhale-start-") as directory:
        cache = args.cache_dir or directory
        for kind in ("warm" if args.cache_dir else "cold", *["warm"] * args.warm):
            command = [sys.executable, "-m", "finwhale", "bench", "start", *argv, "--one"]
            command += ["--cache-dir", cache]
            begin = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            wall = time.perf_counter() - begin
            lines = [x for x in done.stdout.splitlines() if x.startswith(REPORT)]
            if done.returncode or not lines:
                raise SystemExit(f"the {kind} start ended with exit code {done.returncode}")
            found = json.loads(lines[-1].removeprefix(REPORT))
            results.append({"start": kind, "process_s": round(wall, 2), **found})
    return results


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench start`."""
    args = _parser().parse_args(argv)
    if args.one:
        print(REPORT + json.dumps(measure(args)), flush=True)
        return 0
    record = stamp("start", argv, ("torch",))
    results = starts(args, argv)
    shared = ("config", "layers", "tensor_parallel_size")
    record |= {name: results[0][name] for name in shared}
    record["results"] = [{k: v for k, v in one.items() if k not in shared} for one in results]
    keep_record(args.record, record)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("start", __doc__, "start-h200.jsonl")
    parser.epilog = "With --cache-dir, the cache is not empty and every start counts as warm."
    add_model_arguments(parser, (), max_model_len=65536)
    add = parser.add_argument
    add("--warm", type=int, default=2, help="number of warm starts after the cold one")
    add("--one", action="store_true", help="start once in this process and print JSON")
    return parser
