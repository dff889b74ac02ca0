"""Data-parallel lanes read prompts in the same steps."""

import random
from collections.abc import Sequence

from finwhale.engine.plan.prefill_turns import MOST_STEPS, PrefillTurns
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk

from .test_scheduler import make_scheduler, make_sequence

PROMPT, OUTPUT = 1024, 128


def run(at_once: int, *, turns: bool, lanes: int = 4) -> tuple[int, int, int]:
    """Serve 3 * at_once requests.

    Returns:
        Number of steps, the sum of the largest lanes' tokens, and the most steps in a row in which
        prompts were held.
    """
    draw, number = random.Random(at_once), 0
    blocks = at_once * (PROMPT + OUTPUT) // 128
    schedulers = [make_scheduler(3, at_once, 2048, blocks) for _ in range(lanes)]
    together = PrefillTurns(schedulers)

    def add(scheduler: Scheduler) -> None:
        nonlocal number
        number += 1
        output = draw.randint(OUTPUT // 2, OUTPUT)
        scheduler.add(make_sequence(f"{number:06d}", PROMPT, output))

    for index in range(at_once):
        add(schedulers[index % lanes])
    steps = largest = held = most_held = 0
    while any(scheduler.has_work for scheduler in schedulers):
        if turns:
            together.decide()
        counts = [len_of_step(scheduler) for scheduler in schedulers]
        for scheduler in schedulers:
            for sequence in [s for s in scheduler.running if len(s.token_ids) >= s.max_len]:
                scheduler.finish(sequence)
                if number < 3 * at_once:
                    add(scheduler)
        held = held + 1 if schedulers[0].holds_prompts else 0
        steps, largest, most_held = steps + 1, largest + max(counts), max(most_held, held)
    assert number == 3 * at_once
    return steps, largest, most_held


def len_of_step(scheduler: Scheduler) -> int:
    chunks: Sequence[Chunk] = scheduler.schedule()
    complete = [chunk.sequence for chunk in chunks if chunk.completes]
    scheduler.record_computed(chunks)
    for sequence in complete:
        sequence.token_ids.append(7)
    return sum(chunk.end - chunk.start for chunk in chunks)


def test_steps_wait_less_for_one_lane() -> None:
    steps, largest, held = run(128, turns=True)
    plain_steps, plain_largest, none = run(128, turns=False)
    assert largest < 0.8 * plain_largest and steps < 1.2 * plain_steps
    assert 0 < held <= MOST_STEPS and not none


def test_few_requests_do_not_wait() -> None:
    assert run(12, turns=True) == run(12, turns=False)


def test_a_lane_s_prompts_leave_time_for_the_others_decodes() -> None:
    schedulers = [make_scheduler(3, 4, 2048, 64) for _ in range(2)]
    turns = PrefillTurns(schedulers)
    schedulers[0].add(make_sequence("0", 64, 20))
    for scheduler in schedulers:
        len_of_step(scheduler)
    schedulers[1].add(make_sequence("1", 2048, 20))
    turns.decide()
    assert len_of_step(schedulers[0]) == 1
    assert len_of_step(schedulers[1]) == schedulers[1].sizes.mixed_tokens < 2048
    schedulers[0].finish(schedulers[0].running[0])
    schedulers[1].add(make_sequence("2", 2048, 20))
    turns.decide()
    assert not schedulers[1].others_decode
