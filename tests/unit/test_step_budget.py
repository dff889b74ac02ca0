"""Budgets of prompts beside decodes, with a stub of the device's clock."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_budget import DOUBLE_CONTEXT, LEAST_TOKENS, StepBudget, growth
from finwhale.engine.plan.step_sizes import StepSizes

from .test_scheduler import make_scheduler, make_sequence

Clock = Callable[[list[Chunk]], float]


def gpu(decode: float, token: float, double: float, noise: float = 0.0, seed: int = 0) -> Clock:
    """The clock of a device.

    Args:
        decode: seconds of a step without prompts.
        token: seconds of the first token of a prompt.
        double: the number of tokens after which a token takes twice as long.
        noise: the largest share by which a step takes longer.
    """
    draw = random.Random(seed)

    def seconds(chunks: list[Chunk]) -> float:
        found = decode
        for chunk in chunks:
            if chunk.num_known > 1:
                middle = (chunk.start + chunk.end) / 2
                found += token * (chunk.end - chunk.start) * (1 + middle / double)
        return found * (1 + noise * draw.random())

    return seconds


def run(scheduler: Scheduler, clock: Clock, steps: int) -> list[tuple[float, dict[str, int]]]:
    """Run steps.

    Returns:
        For each step, its time and a dict. The dict maps the name of a prompt to the number of its
        tokens that the step read. It has the key "" if prompts were left to read.
    """
    found = []
    for _ in range(steps):
        chunks = scheduler.schedule()
        if not chunks:
            break
        seconds = clock(chunks)
        read = {c.sequence.key: c.end - c.start for c in chunks if c.end - c.start > 1}
        complete = [chunk.sequence for chunk in chunks if chunk.completes]
        scheduler.record_computed(chunks)
        for sequence in complete:
            sequence.token_ids.append(7)
            if len(sequence.token_ids) >= sequence.max_len:
                scheduler.finish(sequence)
        scheduler.record_step(chunks, seconds)
        if read and scheduler.has_prompts:
            read[""] = 0
        found.append((seconds, read))
    return found


def with_streams(streams: int, target: float | None, blocks: int = 5000) -> Scheduler:
    scheduler = make_scheduler(3, streams + 4, 8192, blocks, target_seconds=target)
    for index in range(streams):
        scheduler.add(make_sequence(f"stream{index:03d}", 4, 5000))
    return scheduler


@settings(max_examples=settings().max_examples * 2 // 5)
@given(
    st.floats(0.005, 0.03),
    st.floats(2e-5, 1e-4),
    st.floats(1e5, 1e6),
    st.floats(0.0, 0.1),
    st.integers(0, 9),
)
def test_steps_take_the_target(
    decode: float, token: float, double: float, noise: float, seed: int
) -> None:
    """Prompts of all lengths arrive beside four streams: 95% of the steps take no more than 1.12
    times the target, and the steps of a long prompt use most of it.
    """
    target, draw = 0.04, random.Random(seed)
    scheduler = with_streams(4, target)
    clock = gpu(decode, token, double, noise, seed)
    run(scheduler, clock, 30)
    scheduler.add(make_sequence("long", 400_000, 2))
    run(scheduler, clock, 100)  # until the times are known
    times = []
    for number in range(6):
        scheduler.add(make_sequence(f"short{number}", draw.randint(2, 9000), 2))
        times += run(scheduler, clock, 40)
    busy = sorted(seconds for seconds, read in times if read)
    full = sorted(seconds for seconds, read in times if "" in read)
    assert len(busy) >= 20
    assert busy[int(0.95 * len(busy))] <= 1.12 * target
    assert len(full) < 20 or full[len(full) // 2] >= 0.7 * target


def test_a_long_prompt_gets_the_same_share_of_time_to_its_end() -> None:
    scheduler = with_streams(4, None)
    run(scheduler, gpu(0.01, 2e-5, DOUBLE_CONTEXT), 1)
    scheduler.add(make_sequence("long", 1_000_000, 2))
    times = run(scheduler, gpu(0.01, 2e-5, DOUBLE_CONTEXT), 2000)
    reads = [seconds for seconds, read in times if "long" in read][:-8]
    assert scheduler.sizes.mixed_tokens == 6144
    assert sum(reads) == pytest.approx(len(reads) * (0.01 + 3072 * 2e-5), rel=0.03)
    assert max(reads) < 1.05 * min(reads)


@pytest.mark.parametrize("decode", [0.03, 0.05, 0.5])
def test_prompts_go_on_if_decodes_alone_take_the_target(decode: float) -> None:
    scheduler = with_streams(16, 0.03)
    run(scheduler, gpu(decode, 2e-5, 1e5), 20)
    scheduler.add(make_sequence("long", 9000, 2))
    scheduler.add(make_sequence("short", 4000, 2))
    times = run(scheduler, gpu(decode, 2e-5, 1e5), 600)
    reads = [sum(read.values()) for _, read in times if read]
    assert not scheduler.num_waiting and len(scheduler.running) == 16
    assert sum(reads) > 12_900 and max(reads[20:]) <= 2 * LEAST_TOKENS


def test_a_slow_step_is_forgotten() -> None:
    """The first steps may compile kernels, and a step may wait for another process."""
    scheduler = with_streams(16, 0.04)
    clock = gpu(0.01, 2e-5, 1e6)
    run(scheduler, lambda chunks: 5.0, 1)
    run(scheduler, clock, 10)
    scheduler.add(make_sequence("long", 300_000, 2))
    run(scheduler, lambda chunks: 9.0, 1)
    run(scheduler, clock, 12)
    times = run(scheduler, clock, 20)
    assert all(0.035 < seconds < 0.042 for seconds, _ in times), times


def test_without_a_target_steps_have_their_size() -> None:
    budget = StepBudget(StepSizes(64, 8192, 2560))
    budget.record([], 1.0)
    assert budget.beside(0, 10) == 2550 and budget.beside(0, 2500) == 853
    assert budget.of_long_prompt(2000) == 1000 and growth(DOUBLE_CONTEXT) == 2.0
