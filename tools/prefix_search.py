"""Measure the host's time to find a cached prefix: keys, lookup and adoption of blocks.

    python tools/prefix_search.py [--record bench/results/prefix.jsonl]

The benchmark uses a scheduler with the pages of DeepSeek-V4-Flash and no model. It schedules the
prefill of a prompt, then sends the same prompt again and times it until its first step is planned.
"""

import argparse
import gc
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from finwhale.bench.arguments import new_parser
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import seconds_of
from finwhale.cli.bench import run_tool
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import SequenceState
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.start.kv_cache import plan_cache
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.presets import published
from finwhale.request import SamplingParams

COMMAND = "python tools/prefix_search.py"
LENGTHS = (1024, 8192, 65536, 1048576)
STEP_TOKENS = 8192
# The limit on the time for each token of a prompt.
TOKEN_NS = 1000.0


def measure(num_tokens: int, repeats: int) -> dict[str, Any]:
    """Measure the nanoseconds per token of the keys alone, and of all work until the first step."""
    scheduler = _scheduler(num_tokens)
    assert scheduler.prefix is not None
    draw = random.Random(num_tokens)
    prompt = [draw.randrange(129280) for _ in range(num_tokens)]
    first = _sequence("first", prompt)
    scheduler.add(first)
    while first.remaining:
        scheduler.record_computed(scheduler.schedule())
    scheduler.finish(first)
    gc.collect()
    keys_ns, whole_ns = [], []
    for repeat in range(repeats):
        extend = partial(scheduler.prefix.extend_keys, [], prompt)
        keys_ns.append(1e9 * seconds_of(extend) / num_tokens)
        again = _sequence(f"again {repeat}", prompt)
        start = time.perf_counter()
        scheduler.add(again)
        scheduler.schedule()
        whole_ns.append(1e9 * (time.perf_counter() - start) / num_tokens)
        found = again.num_cached
        scheduler.finish(again)
    return {
        "tokens": num_tokens,
        "found": found,
        "keys_ns": summary(keys_ns),
        "whole_ns": summary(whole_ns),
    }


def _sequence(name: str, prompt: list[int]) -> SequenceState:
    length = len(prompt)
    return SequenceState(name, name, 0, list(prompt), length, length + 1, SamplingParams())


def _scheduler(num_tokens: int) -> Scheduler:
    groups = cache_spec(published("flash"))
    plan = plan_cache(
        groups,
        itemsize=2,
        packed=True,
        budget_bytes=10**15,
        max_num_seqs=4,
        max_step_tokens=STEP_TOKENS,
        wanted_tokens=2 * num_tokens + 1024,
        prefix_caching=True,
    )
    pages = PageManager(groups, plan.num_pages)
    return Scheduler(pages, sizes=StepSizes.given(4, STEP_TOKENS))


def main(argv: Sequence[str]) -> int:
    """Measure, and return 1 if a median exceeds its limit, otherwise 0."""
    parser = _parser()
    args = parser.parse_args(argv)
    if min(*args.tokens, args.repeats) < 1:
        parser.error("--tokens and --repeats must be at least 1")
    record = stamp("prefix", argv, (), COMMAND)
    results = [measure(count, args.repeats) | {"allowed_ns": TOKEN_NS} for count in args.tokens]
    keep_record(args.record, record | {"results": results})
    return int(any(result["whole_ns"]["median"] > TOKEN_NS for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("prefix", __doc__, "prefix.jsonl", COMMAND)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of prompts")
    add("--repeats", type=int, default=15, help="number of repetitions")
    return parser


if __name__ == "__main__":
    run_tool(main)
