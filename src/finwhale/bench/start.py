"""Measure cold and warm starts, from process start to the first token, and the first requests.

Each start is a separate process. A cold start has an empty cache of compiled kernels, and a warm
start has the cache that the previous process left. After the first token, the benchmark sends
requests of every kind and length, and compares the time to first token right after "ready" with
the time later. It also counts the kernels that were compiled or loaded after "ready"; there should
be none.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from finwhale.bench.arguments import add_model_arguments, new_parser
from finwhale.bench.engine import measured, open_engine
from finwhale.bench.printing import new_console, new_table
from finwhale.bench.record import keep_record, percentile, stamp, summary
from finwhale.bench.timing import seconds_of
from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop.engine import Engine
from finwhale.engine.rank.start_times import process_start, whole_start
from finwhale.request import SamplingParams

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
    first = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engine.add_request("first", [1, 2, 3], first)
    run_all(engine)
    first_token = time.monotonic() - process_start()
    mixed = MixedRequests(engine, args)
    early = mixed.run(args.requests)
    later = mixed.run(args.requests)
    return {
        **measured(args, engine),
        **({"config": "demo"} if demo else {}),
        "phases": {name: round(spent, 3) for name, spent in phases.items()},
        "ready_s": round(ready - process_start(), 3),
        "first_token_s": round(first_token, 3),
        "kernels": engine.executor.description.kernels,
        "compiled": engine.executor.description.compiled_kernels,
        "early_ttft_ms": summary(early) | {"p99": percentile(early, 0.99)},
        # The positions of the slowest requests. Low ones would be a sign of lazy initialisation.
        "early_slowest": sorted(range(len(early)), key=lambda i: -early[i])[:5],
        "later_ttft_ms": summary(later) | {"p99": percentile(later, 0.99)},
        "p99_over_later_median": round(
            percentile(early, 0.99) / max(summary(later)["median"], 1e-9), 3
        ),
        "late_compilations": dict(engine.metrics().late_compilations),
    }


def run_all(engine: Engine) -> None:
    """Step until no request is left."""
    while engine.has_work:
        engine.step()


class MixedRequests:
    """Runs random requests with all sampling options, and times some of them.

    The timed requests all have the same prompt length and run alone, so that their times to first
    token can be compared. Between them, groups of requests with prompts of any length run together.
    """

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine = engine
        self.random = random.Random(0)
        self.longest = min(engine.max_model_len - 40, args.longest_prompt)
        self.length = min(args.prompt_tokens, self.longest)
        self.count = 0

    def run(self, requests: int) -> list[float]:
        """Run `requests` timed requests; returns their milliseconds to the first token."""
        times: list[float] = []
        for _ in range(requests):
            self._other()
            times.append(self._timed())
        run_all(self.engine)
        return times

    def _timed(self) -> float:
        """Finish all other requests, then time one request alone."""
        run_all(self.engine)
        name = self._name()
        prompt, params = self._prompt(self.length), self._params(max_tokens=1, n=1)

        def run() -> None:
            self.engine.add_request(name, prompt, params)
            run_all(self.engine)

        return 1e3 * seconds_of(run)

    def _other(self) -> None:
        """Add several requests of random lengths, and run some of their steps."""
        for _ in range(self.random.randint(1, 6)):
            length = int(self.longest ** self.random.random())
            params = self._params(max_tokens=self.random.randint(1, 8), n=self.random.randint(1, 2))
            self.engine.add_request(self._name(), self._prompt(max(1, length)), params)
            for _ in range(self.random.randint(0, 3)):
                self.engine.step()

    def _name(self) -> str:
        self.count += 1
        return f"mixed-{self.count}"

    def _prompt(self, length: int) -> list[int]:
        return self.random.choices(range(self.engine.model_config.vocab_size), k=length)

    def _params(self, **fixed: Any) -> SamplingParams:
        choice = self.random.choice
        options: dict[str, Any] = {
            "temperature": choice((0, 0.7, 1.0)),
            "top_k": choice((0, 1, 40)),
            "top_p": choice((1.0, 0.9)),
            "min_p": choice((0.0, 0.05)),
            "repetition_penalty": choice((1.0, 1.1)),
            "presence_penalty": choice((0.0, 0.5)),
            "frequency_penalty": choice((0.0, 0.5)),
            "logprobs": choice((None, None, 0, 5, 20)),
            "logit_bias": choice((None, None, {3: -5.0})),
            "seed": choice((None, 1)),
            "ignore_eos": True,
        }
        return SamplingParams(**options | fixed)


def starts(args: argparse.Namespace, argv: Sequence[str], console: Console) -> list[dict[str, Any]]:
    """Measure a cold start, then warm starts, each in its own process."""
    results = []
    with tempfile.TemporaryDirectory(prefix="finwhale-start-") as directory:
        cache = args.cache_dir or directory
        for kind in ("warm" if args.cache_dir else "cold", *["warm"] * args.warm):
            command = [sys.executable, "-m", "finwhale", "bench", "start", *argv]
            begin = time.perf_counter()
            done = subprocess.run(
                [*command, "--one", "--cache-dir", cache],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            wall = time.perf_counter() - begin
            lines = [x for x in done.stdout.splitlines() if x.startswith(REPORT)]
            if done.returncode or not lines:
                raise SystemExit(f"the {kind} start ended with exit code {done.returncode}")
            found = json.loads(lines[-1].removeprefix(REPORT))
            results.append({"start": kind, "process_s": round(wall, 2), **found})
            if args.verbose:
                console.print(results[-1])
    return results


def show(console: Console, results: Sequence[dict[str, Any]]) -> None:
    phases = list(results[0]["phases"])
    columns = ("start", *phases, "first token", "kernels", "compiled", "early p99/later", "late")
    table = new_table("seconds of each start", *columns, no_wrap=True)
    for result in results:
        table.add_row(
            result["start"],
            *(f"{result['phases'][name]:.2f}" for name in phases),
            f"{result['first_token_s']:.2f}",
            str(result["kernels"]),
            str(result["compiled"]),
            f"{result['p99_over_later_median']:.2f}",
            str(sum(result["late_compilations"].values())),
        )
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench start`."""
    args = _parser().parse_args(argv)
    if args.one:
        print(REPORT + json.dumps(measure(args)), flush=True)
        return 0
    console = new_console(160)
    record = stamp("start", argv, ("torch",))
    results = starts(args, [a for a in argv if a != "--verbose"], console)
    show(console, results)
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
    add("--requests", type=int, default=100, help="number of timed requests, first and later")
    add("--prompt-tokens", type=int, default=200, help="length of a timed prompt")
    add("--longest-prompt", type=int, default=8192, help="length of the longest other prompt")
    add("--warm", type=int, default=2, help="number of warm starts after the cold one")
    add("--one", action="store_true", help="start once in this process and print JSON")
    add("--verbose", action="store_true", help="print each result as soon as it is known")
    return parser
