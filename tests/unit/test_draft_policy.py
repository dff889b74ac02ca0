"""How many drafts "auto" chooses, over made-up texts and machines."""

import random
from collections.abc import Callable

import pytest

from finwhale.engine.plan.draft_policy import DraftPolicy

Seconds = Callable[[int, int], float]


def play(
    policy: DraftPolicy, right: float, seconds: Seconds, batch: int = 4, steps: int = 2000
) -> list[int]:
    """What it chose in each step; drafts are right with one probability."""
    draw = random.Random(f"{right} {batch}")
    chosen = []
    before = 0
    for _ in range(steps):
        drafts = policy.choose(batch)
        chosen.append(drafts)
        verified = min(before, drafts)
        for _ in range(batch):
            accepted = 0
            while accepted < verified and draw.random() < right:
                accepted += 1
            policy.verified(verified, accepted)
        noise = draw.uniform(0.97, 1.03) * (20 if draw.random() < 0.01 else 1)
        policy.record_time([verified] * batch, drafts, seconds(batch, drafts) * noise)
        before = drafts
    return chosen


def dear(batch: int, drafts: int) -> float:
    """Each token costs as much as the first."""
    return 0.01 * (1 + drafts)


def cheap(batch: int, drafts: int) -> float:
    return 0.01 * (1 + 0.02 * drafts)


def fair(batch: int, drafts: int) -> float:
    return 0.01 * (1 + 0.25 * drafts)


@pytest.mark.parametrize(
    "right, seconds, wanted",
    [
        (0.9, dear, 0),
        (0.02, fair, 0),
        (0.0, cheap, 0),
        (0.9, cheap, 3),
        (0.45, fair, 1),
        (1.0, fair, 3),
    ],
)
def test_the_policy_finds_the_best_number_of_drafts(
    right: float, seconds: Seconds, wanted: int
) -> None:
    chosen = play(DraftPolicy(3), right, seconds)
    assert chosen[200:].count(wanted) > 0.95 * len(chosen[200:])


def test_every_batch_size_has_its_own_number_of_drafts() -> None:
    """A large batch computes, a single one waits for weights."""

    def seconds(batch: int, drafts: int) -> float:
        return 0.01 + 0.001 * batch * (1 + drafts)

    policy = DraftPolicy(3)
    assert play(policy, 0.5, seconds, batch=1)[-1] > 0
    assert play(policy, 0.5, seconds, batch=64)[-1] == 0


def test_the_policy_adapts_to_the_text() -> None:
    policy = DraftPolicy(3)
    for right, steps, wanted in ((0.95, 2000, 3), (0.0, 1000, 0), (0.95, 4000, 3)):
        assert play(policy, right, fair, steps=steps)[-100:].count(wanted) > 70


def test_trials_are_a_small_part_of_the_steps() -> None:
    chosen = play(DraftPolicy(3), 0.9, dear, steps=10_000)
    assert sum(drafts > 0 for drafts in chosen[200:]) < 0.03 * len(chosen)
