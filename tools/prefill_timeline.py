"""Shows what the GPU of rank 0 runs while a prompt is read.

    python -m tools.prefill_timeline --config flash --layers 12 --dummy --tensor-parallel-size 2

First, the tool prints the memory of rank 0, and how long a prefill takes. Then it prints a table
of kernels: the time and the number of launches of each, divided by the number of layers. At last,
it prints the kernels and copies from one layer's attention to the next one's, in order. The indent
shows the CUDA stream.

Each data-parallel rank has a prompt. The table counts all steps of a prompt. The profile adds some
time of its own. With --decodes, the profile shows a step in which so many sequences decode.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from finwhale.bench.arguments import add_model_arguments
from finwhale.bench.engine import begin, begin_decodes, open_engine, timed_steps
from finwhale.cli.bench import run_tool
from finwhale.engine.loop.engine import Engine
from finwhale.errors import FinwhaleError
from finwhale.options import Parser

ATTENTION = "_attend_kernel"
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or a copy in a profile; times in microseconds."""

    start: float
    duration: float
    stream: int
    name: str


def launches(trace: Path) -> list[Launch]:
    """The launches of a GPU in a trace that torch's profiler has written, in order."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [
        Launch(each["ts"], each["dur"], each["args"].get("stream", 0), each["name"])
        for each in events
        if each.get("cat") in KINDS
    ]
    return sorted(found, key=lambda launch: launch.start)


def by_kernel(found: Sequence[Launch], layers: int) -> Iterator[str]:
    """A line for each kernel, of which the one that takes longest comes first."""
    times = defaultdict[str, list[float]](list)
    for launch in found:
        times[launch.name].append(launch.duration)
    for name, each in sorted(times.items(), key=lambda pair: -sum(pair[1])):
        yield f"{sum(each) / layers:9.1f} us {len(each) / layers:6.2f} times  {name[:60]}"


def of_layer(found: Sequence[Launch], number: int) -> Iterator[str]:
    """A line for each launch from attention of layer `number` to that of the next layer."""
    attention = [i for i, launch in enumerate(found) if ATTENTION in launch.name]
    if not 0 <= number < len(attention) - 1:
        raise FinwhaleError(f"the profile has no layer {number} with another one after it")
    first, last = attention[number : number + 2]
    streams: dict[int, int] = {}
    for launch in found[first : last + 1]:
        indent = "    " * streams.setdefault(launch.stream, len(streams))
        after = launch.start - found[first].start
        yield f"{after:9.1f} {launch.duration:8.1f}  {indent}{launch.name[:60]}"


def prompts_of(engine: Engine, draw: random.Random, count: int, length: int) -> list[list[int]]:
    """Prompts of random tokens."""
    ids = range(engine.model_config.vocab_size)
    return [draw.choices(ids, k=length) for _ in range(count)]


def run_prefill(engine: Engine, draw: random.Random, num_tokens: int) -> float:
    """Prefill a prompt for each data-parallel rank; returns milliseconds."""
    prompts = prompts_of(engine, draw, len(engine.lanes), num_tokens)
    before = time.perf_counter()
    for prompt in prompts:
        begin(engine, prompt, 1)
    while engine.has_work:
        engine.step()
    return 1e3 * (time.perf_counter() - before)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m tools.prefill_timeline", description=__doc__)
    add_model_arguments(parser, {"max_model_len"}, max_num_batched_tokens=8192, max_num_seqs=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="lengths of prompts")
    parser.add_argument("--layer", type=int, default=6, help="the layer that is printed in order")
    about = "profile a decode of so many sequences of the first length instead"
    parser.add_argument("--decodes", type=int, default=0, help=about)
    args = parser.parse_args(argv)
    if not 0 <= args.decodes <= args.max_num_seqs:
        parser.error(f"--decodes must be from 0 to --max-num-seqs, which is {args.max_num_seqs}")
    if not torch.cuda.is_available():
        raise FinwhaleError("only a GPU has a timeline, and torch finds none")
    # While the first sequences decode, a prompt of the others takes up to four steps.
    engine, _ = open_engine(args, max(args.tokens) + 4 * args.decodes + 100)
    print(engine.memory)
    draw = random.Random(0)
    for tokens in args.tokens:
        run_prefill(engine, draw, tokens)
        times = [run_prefill(engine, draw, tokens) for _ in range(8)]
        print(f"{tokens} tokens: {statistics.median(times):.2f} ms, at least {min(times):.2f}")
    run = partial(run_prefill, engine, draw, args.tokens[0])
    if args.decodes:
        begin_decodes(engine, prompts_of(engine, draw, args.decodes, args.tokens[0]))
        steps = timed_steps(engine)
        times = [next(steps) for _ in range(20)]
        print(f"decode of {args.decodes}: {statistics.median(times):.2f} ms")
        run = partial(next, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        found = launches(trace)
    config: Any = engine.model_config
    print(*by_kernel(found, config.num_hidden_layers), sep="\n")
    print(*of_layer(found, args.layer), sep="\n")
    return 0


if __name__ == "__main__":
    run_tool(main)
