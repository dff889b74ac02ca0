"""Measure the host's work in an engine step: everything but the work of the device.

The engine runs one step ahead, as on a GPU, over a stub of the model: planning, pages, the inputs
of a captured decode, sampling parameters, tokens to text, stop strings, counters. The stub answers
with tokens at once; launching and transfers, which need a GPU, are not in it. Pages are those of
DeepSeek-V4-Flash. Nothing waits in such a step, so that the thread's processor time is what it
takes on a machine that does nothing else; the time on the clock stands beside it.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from finwhale.bench.arguments import new_parser
from finwhale.bench.record import append_record, stamp, summary
from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.rank.graphs import are_decodes
from finwhale.engine.rank.kv_cache import plan_cache
from finwhale.engine.rank.memory import MemoryUse
from finwhale.engine.rank.start_times import freeze_heap
from finwhale.engine.rank.static_inputs import StaticInputs
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.ops.builds import NothingToBuild
from finwhale.ops.sampling import SampledTokens, SamplingBatch
from finwhale.request import SamplingParams

BATCHES = (1, 64, 256)
# What a step may cost the host: so much, and so much for each running request.
STEP_US, REQUEST_US = 200.0, 2.0
WARM_UP = 40
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=None, ignore_eos=True),
    "top-p, stop strings": SamplingParams(
        temperature=0.8, top_p=0.95, seed=1, stop=["###", "\n\n\n"], max_tokens=None
    ),
}


class StubRunner:
    """Stands in for ModelRunner: inputs are filled in, nothing is computed.

    Every token is the one after the last row's, so that texts differ.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.device = torch.device("cpu")
        self.groups = cache_spec(model_config)
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        self.plan = plan_cache(
            self.groups,
            itemsize=2,
            packed=True,
            budget_bytes=2**37,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_num_batched_tokens,
            wanted_tokens=config.max_num_seqs * self.max_model_len,
            shares=config.enable_prefix_caching,
        )
        self.memory = MemoryUse(weights=0, workspace=0, cache=self.plan.total_bytes)
        self.ops = self
        self.builds = NothingToBuild()
        self.drafter = None
        self.static = StaticInputs(
            config.max_num_seqs,
            config.max_num_seqs,
            self.groups,
            self.max_model_len,
            self.device,
        )
        self._logits = torch.zeros(config.max_num_seqs, 1)
        self._ids = torch.arange(300, 300 + 4 * config.max_num_seqs)
        self._valid = torch.ones(config.max_num_seqs, dtype=torch.bool)
        self._step = 0

    def use_device(self) -> None:
        pass

    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        if are_decodes(chunks):
            self.static.fill(chunks, decode=True)
            return self._logits[: len(chunks)]
        return self._logits[: sum(chunk.completes for chunk in chunks)]

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        count = len(logits)
        self._step = (self._step + 1) % (3 * len(self._valid))
        return SampledTokens(
            ids_S=self._ids[self._step : self._step + count], valid_S=self._valid[:count]
        )

    def feed(self, ids: Tensor) -> None:
        self.static.sampled[: len(ids)].copy_(ids)


class StubEngine(Engine):
    """An engine over a StubRunner, one step ahead."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, text: Tokenizer) -> None:
        self._stub = StubRunner(config, model_config)
        super().__init__(config, model_config, None, text)  # type: ignore[arg-type]
        self.steps_ahead = 1

    def _new_runner(self, weights: Any) -> Any:
        return self._stub


def measure(batch: int, params: SamplingParams, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the host for one step in which `batch` requests decode: used, and passed."""
    model_config = ModelConfig.preset("flash")
    config = EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        max_model_len=args.context + 2 * (args.steps + WARM_UP) + 64,
    )
    engine = StubEngine(config, model_config, Tokenizer.open(DEMO_PATH))
    for number in range(batch):
        # Requests at different places: pages and blocks do not all change in the same step.
        prompt = [number + 5] * (args.context - number % 128)
        engine.add_request(str(number), prompt, params)
    while not all(stream.output.token_ids for stream in engine._streams.values()):
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
    gc.unfreeze()
    assert len(engine.scheduler.running) == batch, "a request has ended"
    for number in range(batch):
        engine.abort(str(number))
    return {"us": summary(times), "clock_us": summary(clock)}


def main(argv: Sequence[str]) -> int:
    """`finwhale bench overhead`: 0, or 1 where a median is above what a step may cost."""
    parser = new_parser("overhead", __doc__, "overhead.jsonl")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="batch sizes")
    parser.add_argument("--context", type=int, default=1024, help="length of a prompt")
    parser.add_argument("--steps", type=int, default=400, help="number of steps to time")
    args = parser.parse_args(argv)
    console = Console()
    table = Table(title="host time of a decode step, microseconds", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("running", "median", "p10", "p90", "max", "clock", "allowed"):
        table.add_column(column, justify="right")
    record = stamp("overhead", argv, ("torch",))
    record |= {"benchmark": "overhead", "context": args.context, "results": []}
    too_slow = False
    for name, params in PARAMS.items():
        for batch in args.batches:
            result = measure(batch, params, args)
            micros, allowed = result["us"], STEP_US + REQUEST_US * batch
            too_slow |= micros["median"] > allowed
            record["results"].append(
                {"what": name, "running": batch, **result, "allowed_us": allowed}
            )
            shown = [micros[key] for key in ("median", "p10", "p90", "max")]
            shown.append(result["clock_us"]["median"])
            table.add_row(name, str(batch), *(f"{us:,.0f}" for us in shown), f"{allowed:,.0f}")
    console.print(table)
    if args.record:
        append_record(args.record, record)
        console.print(f"recorded in {args.record}")
    return int(too_slow)
