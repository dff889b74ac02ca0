"""Measure tokens per second of many requests, and the time between tokens.

The benchmark first runs a load alone: all requests arrive at once, and the engine runs as many as
it can. Then it runs the same load while other requests arrive: long prompts, prompts with a cached
prefix, and requests that are aborted while they run. It reports the times between tokens of the
load's own requests only.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np

from finwhale.bench.arguments import add_model_arguments, new_parser
from finwhale.bench.engine import begin, measured, memory, open_engine
from finwhale.bench.gpu_state import watch
from finwhale.bench.record import keep_record, percentile, stamp, summary
from finwhale.engine.loop.engine import Engine
from finwhale.request import RequestOutput

# Number of steps between two other requests of each kind, and the tokens that each one generates.
LONG_EVERY, PREFIX_EVERY, ABORT_EVERY = 64, 16, 32
OTHER_TOKENS = 16


class OtherRequests:
    """Adds other requests to the engine while a load runs.

    Args:
        long: number of tokens of a long prompt.
        seen: a prompt of the load. The prompts with a cached prefix begin with it.
    """

    def __init__(
        self, engine: Engine, draw: np.random.Generator, long: int, seen: list[int]
    ) -> None:
        self._engine, self._draw, self._long, self._seen = engine, draw, long, seen
        self._steps = 0
        self.results: dict[str, list[RequestOutput]] = {"long": [], "prefix": [], "aborted": []}

    def step(self) -> None:
        """Add and abort the requests that are due. Call this after each step of the load."""
        self._steps += 1
        if self._steps % LONG_EVERY == 1:
            self._add("long", self._prompt(self._long))
        if self._steps % PREFIX_EVERY == 2:
            self._add("prefix", [*self._seen, *self._prompt(OTHER_TOKENS)])
        if self._steps % ABORT_EVERY == 3:
            self._add("aborted", self._prompt(len(self._seen)))
        if self._steps % ABORT_EVERY == 9:
            self._engine.abort(self.results["aborted"][-1].request_id)

    def _prompt(self, length: int) -> list[int]:
        # numpy is fast: the time of this call counts as time between two steps.
        ids = self._draw.integers(self._engine.model_config.vocab_size, size=length)
        return cast(list[int], ids.tolist())

    def _add(self, kind: str, prompt: list[int]) -> None:
        self.results[kind].append(begin(self._engine, prompt, OTHER_TOKENS))

    def summary(self) -> dict[str, Any]:
        found = [result.num_cached_tokens for result in self.results["prefix"]]
        return {
            "count": {kind: len(results) for kind, results in self.results.items()},
            "long_prompt": self._long,
            "prefix_tokens_found": round(statistics.mean(found)) if found else 0,
        }


def serve(
    engine: Engine,
    draw: np.random.Generator,
    shape: tuple[int, int],
    output_tokens: int,
    long_prompt: int | None = None,
) -> dict[str, Any]:
    """Run requests that arrive together to their ends, and measure them.

    Args:
        shape: number of requests, and of tokens of each prompt.
        long_prompt: number of tokens of other requests' long prompts; None: there are no others.
    """
    prompts = draw.integers(engine.model_config.vocab_size, size=shape).tolist()
    results = [begin(engine, prompt, output_tokens) for prompt in prompts]
    others = None if long_prompt is None else OtherRequests(engine, draw, long_prompt, prompts[0])
    last: dict[str, float] = {}
    between: list[float] = []
    done = [time.perf_counter()]
    mine = {result.request_id for result in results}
    while not all(result.finished for result in results):
        touched = engine.step()
        now = time.perf_counter()
        done.append(now)
        for name in (result.request_id for result in touched if result.request_id in mine):
            if name in last:
                between.append(1e3 * (now - last[name]))
            last[name] = now
        if others is not None:
            others.step()
    seconds = done[-1] - done[0]
    while engine.has_work:
        engine.step()
    times = [1e3 * (after - before) for before, after in pairwise(done)]
    per_gpu = len(prompts) * (shape[1] + output_tokens) / engine.executor.description.num_ranks
    found: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(len(prompts) * output_tokens / seconds),
        "total_tokens_per_s_per_gpu": round(per_gpu / seconds),
        "step_ms": summary(times),
        "between_tokens_ms": {
            name: percentile(between, part)
            for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        },
    }
    return found | ({} if others is None else {"others": others.summary()})


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench throughput`."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.output_tokens < 2:
        parser.error("--output-tokens must be at least 2: the time between tokens is measured")
    shape, made = (args.requests, args.prompt_tokens), args.output_tokens
    longest = max(args.long_prompt, args.prompt_tokens + made) + 2 * OTHER_TOKENS
    engine, start_s = open_engine(args, longest)
    draw = np.random.default_rng(0)
    # The first load has slow steps. An eighth of 1,024 prompts of 8,192 tokens takes half a minute.
    serve(engine, draw, (-(-args.requests // 8), args.prompt_tokens), max(2, made // 8))
    rows: dict[str, dict[str, Any]] = {"alone": {}}
    if args.long_prompt:
        rows["among others"] = {}
    with watch(engine) as gpus:
        for name, row in rows.items():
            with gpus.during(row):
                long_prompt = None if name == "alone" else args.long_prompt
                row.update(serve(engine, draw, shape, made, long_prompt))
    late = dict(engine.metrics().late_compilations)
    print(f"started in {start_s} s; kernels compiled since then: {late}")
    found = {
        **measured(args, engine),
        "load": f"{args.requests} requests of {args.prompt_tokens} in, {made} out",
        "at_once": engine.max_num_seqs,
        "max_num_batched_tokens": engine.sizes.num_tokens,
        "wo_a_input": args.wo_a_input,
        "start_s": start_s,
        "memory": memory(engine),
        "late_compilations": late,
        "results": rows,
    }
    keep_record(args.record, stamp("throughput", argv, ("torch",)) | found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("throughput", __doc__, "throughput-h200.jsonl")
    add_model_arguments(parser, ["max_model_len"], max_num_seqs=128)
    add = parser.add_argument
    add("--requests", type=int, default=256, help="number of requests")
    add("--prompt-tokens", type=int, default=1024, help="length of each prompt")
    add("--output-tokens", type=int, default=256, help="length of each output")
    about = "length of the long prompts among the others; 0 runs no other requests"
    add("--long-prompt", type=int, default=65536, help=about)
    return parser
