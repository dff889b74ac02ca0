"""Compares decoding with drafts to decoding without: tokens per second, and the time of a step.

With random weights almost no draft would be accepted. So the benchmark forces an acceptance rate:
it replaces sampled tokens so that this share of the drafts is right. It does so on the device,
because a decode does not wait for the host. Nothing else differs from normal decoding.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from finwhale.bench.record import summary
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.rank.call_ranks import call_ranks
from finwhale.engine.rank.executor import LocalExecutor
from finwhale.engine.rank.ranks import first_rank
from finwhale.engine.rank.startup import draft_on_device
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.weight_sources import Weights
from finwhale.ops.sampling import SampledTokens, SamplingBatch
from finwhale.request import SamplingParams

WARM_UP = 8
# The fractional parts of the multiples of the golden ratio are spread evenly over 0..1. So of any
# number of successive drafts, close to the wanted share is right.
GOLDEN = 0.6180339887498949


class ForcedAcceptance:
    """Samples tokens, and replaces them so that a given share of the drafts is right.

    Args:
        rate: share of right drafts among those whose predecessors are right.
    """

    def __init__(self, executor: LocalExecutor, rate: float) -> None:
        runner = executor.runner
        assert runner.verifications is not None
        self._steps, self.rate = runner.verifications, rate
        self._sample = runner.model.sample
        self._vocab = runner.model.config.vocab_size
        self._drawn = torch.zeros((), dtype=torch.float64, device=runner.device)

    def __call__(self, logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
        sampled = self._sample(logits_SV, batch)
        ids = self._steps.ids
        if ids is None or ids.numel() != len(sampled.ids_S) or ids.shape[1] == 1:
            return sampled
        chosen = sampled.ids_S.view(ids.shape).clone()
        drafts = ids[:, 1:]
        if self.rate == 1:
            chosen[:, :-1] = drafts
        else:
            wrong = (drafts + 1).remainder_(self._vocab)
            if self.rate == 0:
                chosen[:, :-1] = wrong
            else:
                places = self._drawn + torch.arange(drafts.numel(), device=ids.device)
                right = (places * GOLDEN).frac_().view(drafts.shape) < self.rate
                chosen[:, :-1] = torch.where(right, drafts, wrong)
                self._drawn += drafts.numel()
        return replace(sampled, ids_S=chosen.flatten())


def _draft_on_device(config: EngineConfig, executor: LocalExecutor) -> None:
    if executor.runner.verifications is None:
        draft_on_device(executor, config)


def _choose(rate: float | None, executor: LocalExecutor) -> None:
    """Make a rank sample with forced acceptance; None: as usual."""
    sample = executor.runner.model.sample if rate is None else ForcedAcceptance(executor, rate)
    executor.sampler.choose_with(sample)


def measure(
    config: EngineConfig,
    model: tuple[ModelConfig, Weights],
    *,
    batches: Sequence[int],
    context: int,
    steps: int,
    draft_tokens: int,
    rates: Sequence[float | None],
) -> list[dict[str, Any]]:
    """Measure each batch size without drafts, then each batch size and acceptance rate with drafts.

    Args:
        config: options of the engines; `draft_tokens` replaces their number of drafts.
        model: the configuration and the weights of a model with an MTP layer.
        rates: acceptance rates to force; None: the rate of the model itself.
    """
    rows: list[dict[str, Any]] = []
    plain: dict[int, float] = {}
    for drafts in (0, draft_tokens):
        engine = start_engine(replace(config, draft_tokens=drafts), *model, None)
        if drafts:
            call_ranks(engine.executor, partial(_draft_on_device, engine.config))
        size = first_rank(engine.executor).collectives.rank.size
        for batch in batches:
            for rate in rates if drafts else (None,):
                row: dict[str, Any] = {"batch": batch, "draft_tokens": drafts, "accept": rate}
                row["tensor_parallel_size"] = size
                row |= _decode(engine, batch, context, steps, rate)
                step_ms = row["step_ms"]["median"]
                row["step_over_plain"] = round(step_ms / plain.setdefault(batch, step_ms), 3)
                rows.append(row)
        # The memory is too small for two engines, so free this one before the next.
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def _decode(
    engine: Engine, batch: int, context: int, steps: int, rate: float | None
) -> dict[str, Any]:
    """Measure steps in which `batch` requests decode. A step's time ends when its tokens arrive."""
    call_ranks(engine.executor, partial(_choose, rate))
    most = 1 + engine.scheduler.drafting.draft_tokens
    params = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
    generator = torch.Generator().manual_seed(batch)
    results = []
    for number in range(batch):
        length = max(1, context - steps * most // 2)
        ids = torch.randint(0, engine.model_config.vocab_size, (length,), generator=generator)
        results.append(engine.add_request(f"{number}", ids.tolist(), params))
    while not all(result.outputs[0].token_ids for result in results):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    gc.collect()
    before, count = engine.metrics(), sum(len(r.outputs[0].token_ids) for r in results)
    times, begin = [], time.perf_counter()
    last = begin
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    found = engine.metrics()
    tokens = sum(len(result.outputs[0].token_ids) for result in results) - count
    for result in results:
        engine.abort(result.request_id)
    row: dict[str, Any] = {
        "tokens_per_s": round(tokens / (last - begin), 1),
        "tokens_per_step": round(tokens / steps / batch, 3),
        "step_ms": summary(times),
    }
    for name in ("time_of_verification", "time_of_draft"):
        new, old = getattr(found, name), getattr(before, name)
        if new.count > old.count:
            mean = (new.total - old.total) / (new.count - old.count)
            row[name.replace("time_of_", "") + "_ms"] = round(1e3 * mean, 4)
    return row


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of `measure` as a table."""
    table = Table(title="decoding with drafts; medians", title_justify="left")
    names = ("batch", "drafts", "accept", "tokens/s", "a step", "step ms", "over plain")
    for name in (*names, "verify ms", "draft ms"):
        table.add_column(name, justify="right")
    for row in rows:
        forced = "" if not row["draft_tokens"] else "model's" if row["accept"] is None else None
        table.add_row(
            str(row["batch"]),
            str(row["draft_tokens"]),
            f"{row['accept']:g}" if forced is None else forced,
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['step_ms']['median']:,.3f}",
            f"{row['step_over_plain']:.2f}",
            f"{row.get('verification_ms', '')}",
            f"{row.get('draft_ms', '')}",
        )
    console.print(table)
