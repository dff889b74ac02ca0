"""Compares decoding with drafts to decoding without: tokens per second, and the time of a step.

With random weights almost no draft would be accepted. So the benchmark forces an acceptance rate:
it replaces sampled tokens so that this share of the drafts is right. It does so on the device,
because a decode does not wait for the host. Nothing else differs from normal decoding.

If the engine chooses the number of drafts itself ("auto"), requests and drafts differ in how likely
a draft is right, as those of real text do. A head that gives confidences (DSpark) gives exactly
these probabilities. Their mean over all drafts is the forced rate. "auto" verifies the better ones,
so more of the verified drafts are accepted.
"""

import argparse
import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.bench.engine import (
    begin_decodes,
    call_ranks_collectively,
    draft_on_device,
    timed_steps,
)
from finwhale.bench.floors import DecodeBytes, expected_experts, read_ms
from finwhale.bench.gpu_state import watch
from finwhale.bench.record import summary
from finwhale.collection import freeze_heap
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.plan.step_plan import DraftPlan
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.engine.steps.host_transfer import send
from finwhale.models.weight_sources import Weights
from finwhale.ops.sampling import SampledTokens, SamplingBatch
from finwhale.request import RequestOutput

WARM_UP = 8
# Steps in which "auto" measures step times and acceptance, before the benchmark measures.
ADAPT_STEPS = 320
# The least speed of "auto", as a multiple of the speed of plain decoding: the draft head processes
# every token, even if no draft is ever accepted.
LEAST_SPEED = 0.95
# The fractional parts of the multiples of one of these roots are spread evenly over 0..1, and those
# of several roots evenly over all their combinations. So of any number of verifications, close to
# the wanted share of first drafts is right, and of these, close to it of second drafts, and so on.
ROOTS = tuple(math.sqrt(prime) for prime in (2, 3, 5, 7, 11, 13, 17))
GOLDEN = (math.sqrt(5) - 1) / 2
NUMBERS = 2**16  # of verifications, after which the numbers begin again


class ForcedAcceptance:
    """Samples tokens, and replaces them so that a given share of the drafts is right.

    It must not distort what it measures, so it launches few kernels: three after each sampling, and
    six if the drafts' chances vary. Everything else is looked up in tables.

    Args:
        rate: share of right drafts among those whose predecessors are right.
        varied: the drafts of some requests and at some positions are more often right than others.
            A head that gives confidences then gives these probabilities.
    """

    def __init__(self, executor: LocalExecutor, rate: float, *, varied: bool = False) -> None:
        runner = executor.runner
        assert runner.verification_steps is not None
        self._steps = runner.verification_steps
        self._sample = runner.model.sample
        self._vocab, self._device = runner.model.config.vocab_size, runner.device
        self._verified = 0
        self._spread = min(rate, 1 - rate) / 2 if varied else 0.0
        # A draft is right if this fraction, of its verification and its index among the drafts, is
        # below its chance.
        numbers = torch.arange(NUMBERS, dtype=torch.float64, device=runner.device)
        roots = torch.tensor(ROOTS, dtype=torch.float64, device=runner.device)
        fractions = (numbers[:, None] * roots).frac().flatten()
        self._fractions = fractions if varied else None
        self._wrong = (fractions >= rate).long()
        # The part of a chance that depends on the position.
        positions = torch.arange(runner.max_model_len + 2 * len(ROOTS), device=runner.device)
        self._of_position = rate + self._spread * ((positions.double() * GOLDEN).frac() - 1)
        self._layout = _DraftLayout((), runner.device)
        if varied:
            self._steps.draft = self.draft  # type: ignore[method-assign]

    def draft(self, chosen: Tensor, plan: DraftPlan) -> Tensor:
        """As VerificationSteps.draft; if the head gives confidences, they become the chances."""
        steps = self._steps
        drafts = VerificationSteps.draft(steps, chosen, plan)
        if steps.confidences:
            assert steps.step is not None
            count, num_drafts = drafts.shape
            known = steps.step.inputs.tokens.positions.index_select(0, steps.first[:count])
            # The newest token follows the accepted drafts, and its first draft follows it.
            first = (known + steps.advanced[:count, 0] + 2)[:, None]
            numbers = torch.arange(num_drafts, device=self._device)
            steps.confidences = [self.chances(first + numbers)]
        return drafts

    def chances(self, positions_BK: Tensor) -> Tensor:
        """The probability [B,K] float32 that each draft is right."""
        count = len(positions_BK)
        # Half of the spread belongs to the request, and half to the position.
        of_request = (torch.arange(count, device=positions_BK.device)[:, None] + 0.5) / count
        return (self._of_position[positions_BK] + self._spread * of_request).float()

    def __call__(self, logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
        sampled = self._sample(logits_SV, batch)
        step, lengths = self._steps.step, self._steps.lengths
        count, num_tokens = len(lengths), sum(lengths)
        if step is None or num_tokens == count or num_tokens != len(sampled.ids_S):
            return sampled
        if lengths != self._layout.lengths:
            self._layout = _DraftLayout(lengths, self._device)
        layout = self._layout
        if self._verified + count > NUMBERS:
            self._verified = 0
        numbers = slice(self._verified * len(ROOTS), (self._verified + count) * len(ROOTS))
        self._verified += count
        if self._fractions is None:
            wrong = self._wrong[numbers].index_select(0, layout.root_indices)
        else:
            chances = self._of_position.index_select(0, step.inputs.tokens.positions[1:num_tokens])
            chances.add_(layout.of_request, alpha=self._spread)
            wrong = self._fractions[numbers].index_select(0, layout.root_indices) >= chances
        # Another token than the draft has another lowest bit.
        replaced = step.inputs.token_ids[1:num_tokens] ^ wrong
        if self._vocab % 2:
            replaced.remainder_(self._vocab)
        chosen = sampled.ids_S[:-1]
        torch.where(layout.drafted, replaced, chosen, out=chosen)
        return sampled


class _DraftLayout:
    """Which tokens of a step are followed by drafts.

    Attributes:
        drafted: for each token but the step's last: whether a draft of its sequence follows it.
        root_indices: int64: its sequence's row and its index in the sequence, as an index into rows
            of one element for each root.
        of_request: float64: a number of its sequence, in 0..1.
    """

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self.lengths = lengths
        sizes = np.array(lengths, np.int64)
        rows = np.repeat(np.arange(len(sizes)), sizes)
        index = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        drafted = index + 1 < np.repeat(sizes, sizes)
        root_indices = rows * len(ROOTS) + np.minimum(index, len(ROOTS) - 1)
        of_request = (rows + 0.5) / max(1, len(sizes))
        self.root_indices, self.of_request, marks = send(
            device, root_indices[:-1], of_request[:-1], drafted[:-1].astype(np.int64)
        )
        self.drafted = marks.bool()


def _draft_on_device(config: EngineConfig, executor: LocalExecutor) -> None:
    if executor.runner.verification_steps is None:
        draft_on_device(executor, config)


def force_acceptance(rate: float | None, varied: bool, executor: LocalExecutor) -> None:
    """Make a rank sample with forced acceptance; None: as usual."""
    runner = executor.runner
    if rate is not None:
        executor.sampler.sample_logits = ForcedAcceptance(executor, rate, varied=varied)
        return
    executor.sampler.sample_logits = runner.model.sample
    if runner.verification_steps is not None:
        vars(runner.verification_steps).pop("draft", None)


def measure(
    args: argparse.Namespace, options: EngineConfig, config: Any, weights: Weights
) -> list[dict[str, Any]]:
    """Measure each batch size without drafts, then each batch size and acceptance rate with drafts.

    Args:
        args: has batches, context, steps, draft_tokens, and accept: the acceptance rates to force;
            None: the rate of the model itself.
        options: of the engines, except for the number of drafts.
        config, weights: of a model with a draft head.
    """
    context, steps = args.context, args.steps
    rows: list[dict[str, Any]] = []
    plain: dict[int, dict[str, Any]] = {}
    for drafts in (0, args.draft_tokens):
        engine = start_engine(replace(options, draft_tokens=drafts), config, weights, None)
        if drafts:
            call_ranks_collectively(engine.executor, partial(_draft_on_device, engine.config))
        freeze_heap()  # as finwhale serve does
        rank = first_rank(engine.executor).collectives.rank
        read = DecodeBytes(config, rank)
        for batch in args.batches:
            for rate in (drafts and args.accept) or (None,):
                row: dict[str, Any] = {"batch": batch, "draft_tokens": drafts, "accept": rate}
                row["tensor_parallel_size"] = rank.size
                # The engine begins anew to choose numbers of drafts.
                engine.reset()
                call_ranks_collectively(
                    engine.executor, partial(force_acceptance, rate, drafts == "auto")
                )
                if drafts == "auto":
                    row["adapt_steps"] = ADAPT_STEPS
                    with _decoding(engine, batch, max(1, context - steps // 2)):
                        for _ in range(ADAPT_STEPS):
                            engine.step()
                # The tokens of a step; "auto" is measured for as many tokens as plain decoding.
                most = 1
                if args.draft_tokens != "auto":
                    most += engine.scheduler.drafting.draft_tokens
                row |= _decode(engine, batch, max(1, context - steps * most // 2), steps)
                if drafts != "auto":  # its steps differ
                    row |= floors(read, context, batch, row["rows"])
                other = plain.setdefault(batch, row)
                step_ms, other_ms = row["step_ms"]["median"], other["step_ms"]["median"]
                row["step_over_plain"] = round(step_ms / other_ms, 3)
                row["speed_over_plain"] = round(row["tokens_per_s"] / other["tokens_per_s"], 3)
                rows.append(row)
        # The memory is too small for two engines, so free this one before the next.
        gc.unfreeze()
        engine.close()
    return rows


@contextmanager
def _decoding(engine: Engine, batch: int, length: int) -> Iterator[list[RequestOutput]]:
    """The context in which `batch` requests with random prompts decode."""
    generator = torch.Generator().manual_seed(batch)
    vocab_size = engine.model_config.vocab_size
    prompts = torch.randint(0, vocab_size, (batch, length), generator=generator).tolist()
    results = begin_decodes(engine, prompts)
    for _ in range(WARM_UP):
        engine.step()
    yield results
    assert not any(result.finished for result in results)
    for result in results:
        engine.abort(result.request_id)


def _decode(engine: Engine, batch: int, length: int, steps: int) -> dict[str, Any]:
    """Measure steps in which `batch` requests decode. A step's time ends when its tokens arrive.

    With "auto", the measurement ends when the requests have as many tokens as plain decoding gives
    in `steps` steps. So both read the same contexts.
    """
    wanted = steps * batch if engine.config.draft_tokens == "auto" else math.inf
    times: list[float] = []
    state: dict[str, Any] = {}
    with watch(engine) as gpus, _decoding(engine, batch, length) as results:
        gc.collect()

        def count() -> int:
            return sum(len(result.outputs[0].token_ids) for result in results)

        before, known = engine.metrics(), count()
        with gpus.during(state):
            for ms in timed_steps(engine):
                times.append(ms)
                if len(times) == steps or count() - known >= wanted:
                    break
        found, tokens = engine.metrics(), count() - known
    row: dict[str, Any] = {
        "tokens_per_s": round(tokens / sum(times) * 1e3, 1),
        "tokens_per_step": round(tokens / len(times) / batch, 3),
        "step_ms": summary(times) | {"mean": round(statistics.mean(times), 4)},
        **_drafts(before, found, batch * len(times)),
        **state,
    }
    for name in ("time_of_verification", "time_of_draft"):
        new, old = getattr(found, name), getattr(before, name)
        if new.count > old.count:
            mean = (new.total - old.total) / (new.count - old.count)
            row[name.replace("time_of_", "") + "_ms"] = round(1e3 * mean, 4)
    return row


def _drafts(before: EngineMetrics, found: EngineMetrics, runs: int) -> dict[str, Any]:
    """What was verified and accepted between two snapshots, in `runs` decodes of a sequence."""

    def difference(name: str) -> list[int]:
        pairs = zip(getattr(found, name), getattr(before, name), strict=True)
        return [new - old for new, old in pairs]

    proposed, accepted = difference("drafts_proposed"), difference("drafts_accepted")
    # As many verifications had exactly k drafts as had a draft k but none after it.
    exactly = [more - fewer for more, fewer in zip([runs, *proposed], [*proposed, 0], strict=True)]
    return {
        "rows": round(1 + sum(proposed) / runs, 3),
        "accepted": round(sum(accepted) / runs, 3),
        "numbers_of_drafts": {str(k): times for k, times in enumerate(exactly) if times > 0},
    }


def floors(read: DecodeBytes, context: int, batch: int, rows: float) -> dict[str, float]:
    """The least milliseconds of a step, and of its verification and drafts.

    The tokens of a step are taken to choose their experts evenly.

    Args:
        read: what the steps read.
        context: tokens that each sequence sees.
        rows: number of tokens of a sequence in each step; all but one are drafts.
    """
    experts = expected_experts(read.config, batch * rows)
    verification = read_ms(read.step(context, batch, experts))
    drafts = read_ms(read.drafts(rows - 1, batch))
    return {
        "floor_ms": round(verification + drafts, 4),
        "verification_floor_ms": verification,
        "draft_floor_ms": drafts,
    }


def show_verdict(rows: Sequence[dict[str, Any]]) -> None:
    """Say whether "auto" was fast enough, if it was measured."""
    adaptive = [row for row in rows if row["draft_tokens"] == "auto"]
    if adaptive:
        worst = min(adaptive, key=lambda row: row["speed_over_plain"])
        speed, where = worst["speed_over_plain"], f"batch {worst['batch']}"
        verdict = "as wanted" if speed >= LEAST_SPEED else "TOO SLOW"
        print(f"auto: at least {speed} of plain decoding ({where}): {verdict}")
