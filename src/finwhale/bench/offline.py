"""Measure whole engine steps on one or several GPUs, decode and prefill, and their floors.

Decode: the benchmark prefills `batch` random prompts up to `context` tokens. While all of them
decode, it times whole engine steps (schedule, inputs, forward, sampling, ids on the host), from the
tokens of one step to those of the next. It also times the captured graph alone. A prompt that is
longer than a step is prefilled alone first, and its request then resumes from the prefix cache.
Prefill: the benchmark times a request from its arrival to its first token.

The floor of a decode is the bytes that it reads, divided by the device's read bandwidth: the
weights, with the experts that the step really uses, and the cached rows. The floor of a prefill is
its operations, divided by the device's rate in the precision of each. That is FP8 for weights
stored in FP8 or FP4 and for the indexer, and bfloat16 for the rest.
"""

import argparse
import logging
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

from finwhale.bench import drafting
from finwhale.bench.arguments import add_model_arguments, new_parser
from finwhale.bench.engine import (
    begin_decodes,
    call_ranks_collectively,
    measured,
    memory,
    open_engine,
    prefill,
    source,
    timed_steps,
)
from finwhale.bench.floors import DecodeBytes, PrefillOperations, expected_experts, read_ms
from finwhale.bench.gpu_state import GpuWatch, watch
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import replay_ms, seconds_of
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.plan.step_planner import StepPlanner
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import first_rank
from finwhale.options import read_options, word_or_number

WARM_UP = 5
# The default numbers of timed steps. "auto" changes the number of drafts from time to time, and one
# such probe takes as long as about ten plain steps.
STEPS, ADAPTIVE_STEPS = 30, 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """One measurement: a decode of `batch` sequences, or a prefill (batch 0) of `tokens`."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        if self.batch:
            return f"decode, batch {self.batch}, context {self.tokens}"
        return f"prefill, {self.tokens} tokens"


class Bench:
    """Measures one engine."""

    def __init__(self, engine: Engine, steps: int, gpus: GpuWatch | None = None) -> None:
        self.engine, self.gpus = engine, gpus or GpuWatch()
        rank = first_rank(engine.executor).collectives.rank
        self.steps = steps
        self.config: Any = engine.model_config
        self.bytes = DecodeBytes(self.config, rank)
        self.operations = PrefillOperations(self.config, rank)
        self.random = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return self.random.choices(range(self.config.vocab_size), k=length)

    def decode(self, shape: Shape) -> dict[str, Any]:
        """Measure decode steps: milliseconds of whole steps and of the graph, and the floor."""
        engine, length = self.engine, max(1, shape.tokens - self.steps // 2)
        room = _room(shape, self.steps, engine.sizes.num_tokens)
        prompts = [self.prompt(length) for _ in range(shape.batch)]
        begin_decodes(engine, prompts, room - length)
        for _ in range(WARM_UP):
            engine.step()
        # Greedy text begins to repeat itself, so the number of experts and the graph's time change.
        # Report the mean of the values before and after the timed steps.
        graph_ms, hit = self._graph_ms(), self._experts_hit(shape.batch)
        for _ in range(WARM_UP):
            engine.step()
        result: dict[str, Any] = {}
        with self.gpus.during(result):
            result["ms"] = summary(list(islice(timed_steps(engine), self.steps)))
        assert sum(len(lane.scheduler.running) for lane in engine.lanes) == shape.batch
        after_ms = self._graph_ms()
        result["graph_ms"] = (
            None if graph_ms is None or after_ms is None else round((graph_ms + after_ms) / 2, 4)
        )
        hit = (hit + self._experts_hit(shape.batch)) / 2
        result["experts_hit"] = round(hit, 1)
        own = shape.batch / len(engine.lanes)
        result["floor_ms"] = read_ms(self.bytes.step(shape.tokens, own, hit))
        for lane in engine.lanes:
            for name in list(lane.outputs.requests):
                engine.abort(name)
        return result

    def prefill(self, shape: Shape) -> dict[str, Any]:
        """Measure a prefill: milliseconds from a request to its first token, and the floor."""
        repeats = max(3, min(self.steps, 4 * self.steps * 2048 // max(shape.tokens, 1)))
        calls = [partial(prefill, self.engine, self.prompt(shape.tokens)) for _ in range(repeats)]
        prefill(self.engine, self.prompt(shape.tokens))
        result: dict[str, Any] = {}
        with self.gpus.during(result):
            result["ms"] = summary([1e3 * seconds_of(call) for call in calls])
        result["tokens_per_s"] = round(shape.tokens / result["ms"]["median"] * 1e3)
        result["floor_ms"] = self.operations.ms(shape.tokens)
        return result

    def _plan(self) -> StepPlan:
        """Plan the next step without the engine, which later plans the same step itself."""
        scheduler = self.engine.scheduler
        chunks: list[Any] = []
        for sequence in scheduler.running:
            scheduler._prefill(sequence, 1, chunks)
        return StepPlanner(self.config.vocab_size).plan(chunks)

    def _graph_ms(self) -> float | None:
        """Median milliseconds of the captured graph of this batch, which all ranks replay at once,
        on the slowest rank; None: the step has no graph, or data-parallel ranks share it.
        """
        if len(self.engine.lanes) > 1:
            return None
        medians = call_ranks_collectively(
            self.engine.executor, partial(graph_ms, self._plan(), self.steps)
        )
        return max((median for median in medians if median is not None), default=None)

    def _experts_hit(self, tokens: int) -> float:
        """Mean number of different experts that a layer uses in the next step, which runs eagerly.
        Calculated for data-parallel ranks.
        """
        if len(self.engine.lanes) > 1:
            return expected_experts(self.config, tokens)
        return call_ranks_collectively(self.engine.executor, partial(experts_hit, self._plan()))[0]


def graph_ms(plan: StepPlan, repeats: int, executor: LocalExecutor) -> float | None:
    """Median milliseconds of the captured graph of a decode; None: it has no graph."""
    runner = executor.runner
    runner.tables.apply(plan)
    graphs = runner.graphs
    if graphs is None or graphs.size(plan) is None:
        return None
    graphs.run(plan)
    times = replay_ms(graphs.captured(plan.num_tokens).replay, repeats)
    return round(sorted(times)[len(times) // 2], 4)


def experts_hit(plan: StepPlan, executor: LocalExecutor) -> float:
    """Mean number of different experts that a layer uses in a step; runs it eagerly."""
    hits: list[int] = []
    model: Any = executor.runner.model

    def counting(run: Any) -> Any:
        def dispatch(ids: Any, num_experts: int) -> Any:
            hits.append(len(set(ids.flatten().tolist()) - {-1}))
            return run(ids, num_experts)

        return dispatch

    with ExitStack() as stack:
        for layer in model.layers:
            ffn: Any = layer.ffn
            stack.enter_context(patch.object(ffn, "dispatch", counting(ffn.dispatch)))
        # Decodes of this size are captured, so no kernel is built for the eager step. Do not log
        # that.
        warnings = logging.getLogger("finwhale.ops.builds.launches")
        stack.enter_context(patch.object(warnings, "disabled", True))
        executor.runner.tables.apply(plan)
        executor.runner.forward(plan)
    return sum(hits) / len(hits)


def _room(shape: Shape, steps: int, step_tokens: int) -> int:
    """Maximum length of a sequence.

    The first sequences decode while the others are prefilled; prefill gets at least a quarter of
    each step. Prompts that are longer than a step are in the prefix cache by then.
    """
    prefill_steps = 4 * shape.batch * min(shape.tokens, step_tokens) // step_tokens
    return shape.tokens + prefill_steps + 2 * WARM_UP + steps + 8


# Options of the engine that the benchmark derives from the measured shapes.
SET_HERE = ("max_model_len", "max_num_seqs", "graph_sizes", "draft_tokens")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; returns the record without its stamp."""
    shapes = [Shape(batch, args.context) for batch in args.batches]
    shapes += [Shape(1, context) for context in args.long_contexts]
    shapes += [Shape(0, tokens) for tokens in args.prefill]
    longest = max(_room(shape, args.steps, args.max_num_batched_tokens) for shape in shapes) + 8
    num_seqs = max(1, *(shape.batch for shape in shapes))
    engine, load_s = open_engine(args, longest, max_num_seqs=num_seqs)
    if args.verbose:
        print(f"loaded and captured in {load_s} s")
    rows: list[tuple[Shape, dict[str, Any]]] = []
    with watch(engine) as gpus:
        bench = Bench(engine, args.steps, gpus)
        for shape in shapes:
            rows.append((shape, bench.decode(shape) if shape.batch else bench.prefill(shape)))
            if args.verbose:
                print(f"{shape}: {rows[-1][1]}")
    return {
        **measured(args, engine),
        "load_s": load_s,
        "memory": memory(engine),
        "results": [
            {"what": str(shape), "batch": shape.batch, "tokens": shape.tokens, **result}
            for shape, result in rows
        ],
    }


def run_drafting(args: argparse.Namespace) -> dict[str, Any]:
    """Compare decoding with drafts to plain decoding; returns the record without its stamp."""
    config, weights = source(args, draft_head=True)
    adaptive = args.draft_tokens == "auto"
    most = config.max_draft_tokens if adaptive else args.draft_tokens
    # All drafts of every step may be right, and the next drafts need rows too.
    steps = 2 * (args.steps + drafting.WARM_UP) + drafting.ADAPT_STEPS * adaptive
    # The first sequences decode while the last ones are prefilled.
    steps += 4 * max(args.batches) * args.context // args.max_num_batched_tokens
    longest = args.context + steps * (1 + most) + 16
    options = read_options(
        args,
        EngineConfig,
        max_model_len=min(longest, config.max_position_embeddings),
        max_num_seqs=max(args.batches),
        graph_sizes=tuple(sorted(set(args.batches))),
    )
    rows = drafting.measure(args, options, config, weights)
    return {
        "benchmark": "offline with drafts",
        "config": args.model or args.config,
        "layers": config.num_hidden_layers,
        "tensor_parallel_size": rows[0]["tensor_parallel_size"],
        "context": args.context,
        "results": rows,
    }


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"must be a fraction from 0 to 1, got {text!r}")
    return rate


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench offline`."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.accept and not args.draft_tokens:
        parser.error("--accept needs drafts: give --draft-tokens too")
    if args.steps is None:
        args.steps = ADAPTIVE_STEPS if args.draft_tokens == "auto" else STEPS
    record = stamp("offline", argv, ("torch",))
    record |= (run_drafting if args.draft_tokens else run)(args)
    keep_record(args.record, record)
    if args.draft_tokens:
        drafting.show_verdict(record["results"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("offline", __doc__, "offline-h200.jsonl")
    add_model_arguments(parser, SET_HERE, max_num_batched_tokens=8192)
    add = parser.add_argument
    add("--batches", type=int, nargs="*", default=[1, 8, 32, 128], help="batch sizes")
    add("--context", type=int, default=1024, help="number of tokens before a decode step")
    about = "contexts of further decodes with batch size 1"
    add("--long-contexts", type=int, nargs="*", default=[65536], help=about)
    prompts = [2048, 8192, 32768]
    add("--prefill", type=int, nargs="*", default=prompts, help="lengths of prompts to prefill")
    add(
        "--steps",
        type=int,
        help=f"number of steps to time (default: {STEPS}, and {ADAPTIVE_STEPS} with --draft-tokens "
        "auto, which ends when each request has as many tokens)",
    )
    add(
        "--draft-tokens",
        type=partial(word_or_number, ("auto",)),
        default=0,
        metavar="N|auto",
        help="compare decoding with this many drafts, or with as many as the engine chooses, with "
        "plain decoding, and measure nothing else",
    )
    add(
        "--accept",
        type=_rate,
        nargs="*",
        metavar="R",
        help="force these fractions of the drafts to be right; with auto, they are the means of "
        "probabilities that differ between requests and positions (default: the model's own)",
    )
    add("--verbose", action="store_true", help="print each result as soon as it is known")
    return parser
