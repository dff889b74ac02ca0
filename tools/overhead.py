"""Measure the host's work in an engine step: everything but the work of the device.

    python -m tools.overhead --batches 1 64

The engine runs one step ahead, as on a GPU, but a stub replaces the model and returns tokens at
once. A step includes planning, pages, the inputs of a captured decode, sampling parameters,
detokenisation, stop strings and counters. It does not include kernel launches and transfers, which
need a GPU. The pages are those of DeepSeek-V4-Flash. The step never waits, so its CPU time is the
time that it takes on an idle machine; the table also shows its wall-clock time.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from finwhale.bench.arguments import new_parser
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.chat.tokenizer import Tokenizer
from finwhale.cli.bench import run_tool
from finwhale.collection import freeze_heap
from finwhale.config import EngineConfig
from finwhale.demo import DEMO_PATH
from finwhale.distributed.peers import Peers
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.executor import MemoryUse, RankDescription
from finwhale.engine.plan.step_plan import LargestLane, StepPlan
from finwhale.engine.plan.step_sizes import choose_step_sizes
from finwhale.engine.ranks.lane_ranks import LaneRanks
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.rank_processes import spawn
from finwhale.engine.ranks.ranks import Ranks, open_ranks
from finwhale.engine.start.kv_cache import plan_cache
from finwhale.engine.steps.inputs import StaticInputs
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.engine.steps.stopwatch import StepTimes
from finwhale.models.cache import CacheGroup
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.tensor_parallel import NoCollectives
from finwhale.ops.builds import Builds
from finwhale.ops.sampling import SampledTokens, SamplingBatch
from finwhale.options import add_options
from finwhale.request import SamplingParams

COMMAND = "python -m tools.overhead"
BATCHES = (1, 64, 256)
# The limit on the host's time for a step: STEP_US, plus REQUEST_US for each running request, plus
# RANKS_US with several ranks.
STEP_US, REQUEST_US = 200.0, 2.0
RANKS_US = 100.0
WARM_UP = 40
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
    "top-p, stop strings": SamplingParams(
        temperature=0.8, top_p=0.95, seed=1, stop=["###", "\n\n\n"], max_tokens=None
    ),
}


class StubRunner:
    """Replaces ModelRunner: it fills in the inputs of a step of at most `most` sequences, but
    computes nothing. Neighbouring rows get different tokens, so that the texts of the requests
    differ.
    """

    def __init__(
        self, config: DeepseekV4Config, groups: tuple[CacheGroup, ...], max_len: int, most: int
    ) -> None:
        self.device = torch.device("cpu")
        self.model, self.config = self, config  # this is the stub of the model too
        self.verification_steps = None
        self.times, self.routed = StepTimes(self.device), None
        self.tables = SlotTables([group.name for group in groups])
        self.static = StaticInputs(most, most, groups, self.tables, max_len, self.device)
        self._logits = torch.zeros(most, 1)
        self._ids = torch.arange(300, 300 + 4 * most)
        self._valid = torch.ones(most, dtype=torch.bool)
        self._step = 0

    def use_device(self) -> None:
        pass

    def serve_others(self, largest: LargestLane) -> None:
        pass

    def logits(self, plan: StepPlan) -> Tensor:
        if plan.decodes:
            self.static.fill(plan, decode=True)
        return self._logits[: sum(plan.num_logits)]

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        count = len(logits)
        self._step = (self._step + 1) % (3 * len(self._valid))
        return SampledTokens(
            ids_S=self._ids[self._step : self._step + count], valid_S=self._valid[:count]
        )

    def feed(self, ids: Tensor) -> None:
        self.static.sampled[: len(ids)].copy_(ids)


def stub_engine(config: EngineConfig, model_config: DeepseekV4Config) -> Engine:
    """An engine over StubRunners, one step ahead. Every rank has a runner in its own process."""
    open_stub = partial(stub_executor, config, model_config)
    executor: LocalExecutor | Ranks = open_stub(Peers())
    if config.num_ranks not in (None, 1):
        kind = LaneRanks if config.data_parallel_size > 1 else None
        processes = spawn(["cpu"] * config.num_ranks)
        executor = open_ranks(open_stub, open_stub, processes, kind)
    return Engine(config, model_config, executor, Tokenizer.open(DEMO_PATH))


def stub_executor(
    config: EngineConfig, model_config: DeepseekV4Config, peers: Peers
) -> LocalExecutor:
    """An executor of a StubRunner."""
    groups = cache_spec(model_config)
    max_len = config.max_model_len or model_config.max_position_embeddings
    sizes = choose_step_sizes(config.of_lane(), num_ranks=1, room=None)
    plan = plan_cache(
        groups,
        itemsize=2,
        packed=True,
        budget_bytes=2**37,
        max_num_seqs=sizes.num_seqs,
        max_step_tokens=sizes.num_tokens,
        # Sequences take whole pages, and admission keeps some free: no sequence may wait for pages.
        wanted_tokens=2 * sizes.num_seqs * max_len,
        prefix_caching=config.enable_prefix_caching,
    )
    description = RankDescription(
        device="cpu",
        asynchronous=True,
        groups=groups,
        num_pages=plan.num_pages,
        max_model_len=max_len,
        sizes=sizes,
        memory=MemoryUse(weights=0, workspace=0, cache=plan.total_bytes),
    )
    runner: Any = StubRunner(model_config, groups, max_len, sizes.num_seqs)
    executor = LocalExecutor(runner, Builds(), description)
    if config.data_parallel_size > 1:
        executor.collectives = NoCollectives(replace(peers.rank, data_parallel=True))
    return executor


def measure(batch: int, params: SamplingParams, args: argparse.Namespace) -> dict[str, Any]:
    """Measure steps in which `batch` requests decode: microseconds of CPU and wall-clock time."""
    model_config = published("flash")
    config = EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        max_model_len=args.context + 2 * (args.steps + WARM_UP) + 64,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )
    engine = stub_engine(config, model_config)
    for number in range(batch):
        # The prompts differ in length, so that pages and blocks do not all end in the same step.
        prompt = [number + 5] * (args.context - number % 128)
        engine.add_request(str(number), prompt, params)
    streams = [stream for lane in engine.lanes for stream in lane.outputs.streams.values()]
    while not all(stream.output.token_ids for stream in streams):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    freeze_heap()
    times, clock = [], []
    for _ in range(args.steps):
        start, used = time.perf_counter(), time.thread_time()
        engine.step()
        times.append(1e6 * (time.thread_time() - used))
        clock.append(1e6 * (time.perf_counter() - start))
    assert engine.metrics().running == batch, "a request has ended"
    for number in range(batch):
        engine.abort(str(number))
    if isinstance(engine.executor, Ranks):
        engine.executor.close()
    return {"us": summary(times), "clock_us": summary(clock)}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Returns 1 if a median exceeds its limit, otherwise 0."""
    args = _parser().parse_args(argv)
    ranks = (args.tensor_parallel_size or 1) * args.data_parallel_size
    record = stamp("overhead", argv, ("torch",), COMMAND)
    record |= {"context": args.context, "tensor_parallel_size": args.tensor_parallel_size or 1}
    record |= {"data_parallel_size": args.data_parallel_size}
    results = []
    for (name, params), batch in product(PARAMS.items(), args.batches):
        allowed = STEP_US + REQUEST_US * batch + (RANKS_US if ranks > 1 else 0)
        result = {"what": name, "running": batch, **measure(batch, params, args)}
        results.append(result | {"allowed_us": allowed})
    keep_record(args.record, record | {"results": results})
    return int(any(result["us"]["median"] > result["allowed_us"] for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("overhead", __doc__, "overhead.jsonl", COMMAND)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=list(BATCHES), help="batch sizes")
    add("--context", type=int, default=1024, help="length of a prompt")
    add("--steps", type=int, default=400, help="number of steps to time")
    add_options(parser, EngineConfig, ["tensor_parallel_size", "data_parallel_size"])
    return parser


if __name__ == "__main__":
    # Ranks find a function by the name of its module, and could not import `__main__`.
    from tools import overhead

    run_tool(overhead.main)
