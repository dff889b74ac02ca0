"""The numbers of drafts that "auto" chooses, with synthetic texts and step times."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from finwhale.engine.plan.draft_estimates import (
    INITIAL_ACCEPTANCE,
    Calibration,
    DraftEstimates,
)
from finwhale.engine.plan.draft_policy import (
    GRANT_SECONDS,
    NO_DRAFTS,
    DraftPolicy,
    StepKind,
    expected_tokens,
    select_drafts,
    step_kinds,
)
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.request import SamplingParams

Seconds = Callable[[int, StepKind], float]


def new_sequence(name: int) -> SequenceState:
    return SequenceState(str(name), str(name), 0, [1, 2], 1, 10**9, SamplingParams())


class Play:
    """Run steps of a batch; the draft of each sequence is right with its own probability.

    Attributes:
        seconds, tokens: of the steps so far.
        kinds: the kinds of all steps.
        counts: number of verified drafts by sequence.
    """

    def __init__(self, policy: DraftPolicy, seconds_of: Seconds, batch: int, seed: int = 0) -> None:
        self.policy, self.seconds_of = policy, seconds_of
        self.sequences = [new_sequence(i) for i in range(batch)]
        self.draw = random.Random(seed)
        self.seconds = self.tokens = 0.0
        self.kinds: list[StepKind] = []
        self.counts = [0] * batch
        self.drafts = 0

    def run(self, steps: int, right: Sequence[float], noise: float = 0.03) -> "Play":
        for _ in range(steps):
            batch = len(self.sequences)
            self.policy.begin_step()
            counts = self.policy.choose(self.sequences, [self.drafts] * batch, unresolved=False)
            kind = self.policy.kind
            for index, count in enumerate(counts):
                accepted = 0
                while accepted < count and self.draw.random() < right[index]:
                    accepted += 1
                chunk = Chunk(self.sequences[index], 1, 2 + count, (0,) * count)
                self.policy.estimates.record_verified(chunk, accepted)
                self.tokens += 1 + accepted
                self.counts[index] += count
            seconds = self.seconds_of(batch, kind) * self.draw.uniform(1 - noise, 1 + noise)
            self.policy.record_time(batch, sum(counts), kind, seconds)
            self.seconds += seconds
            self.drafts = kind.drafts
            self.kinds.append(kind)
        return self

    def share(self, kind: StepKind, last: int) -> float:
        return self.kinds[-last:].count(kind) / last


def step_seconds(per_token: float, per_draft: float = 0.0) -> Seconds:
    """A step of the weights' bytes, with a cost for each further token and each draft."""

    def seconds(batch: int, kind: StepKind) -> float:
        base = 0.01 * (1 + per_draft * kind.drafts)
        return base + 0.01 * per_token * (kind.width - 1)

    return seconds


CHEAP, FAIR, DEAR = step_seconds(0.02), step_seconds(0.25), step_seconds(1.0, 0.1)


@pytest.mark.parametrize(
    "right, seconds, wanted",
    [
        (0.9, DEAR, NO_DRAFTS),
        (0.02, FAIR, NO_DRAFTS),
        (0.0, step_seconds(0.04), NO_DRAFTS),
        (0.9, CHEAP, StepKind(4, 3)),
        (0.6, step_seconds(0.25, 0.2), StepKind(2, 1)),
        (1.0, FAIR, StepKind(4, 3)),
    ],
)
def test_the_policy_finds_the_best_kind(right: float, seconds: Seconds, wanted: StepKind) -> None:
    play = Play(DraftPolicy(3), seconds, 4).run(1000, [right] * 4)
    found = play.kinds[-500:]
    assert found.count(wanted) > 0.9 * len(found)


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("per_token, right", [(1.0, 0.5), (1.0, 0.98), (0.6, 0.5), (0.3, 0.2)])
def test_probes_cost_little(batch: int, block: bool, per_token: float, right: float) -> None:
    """At most 2% of steps without drafts, once the grant for the first measurements is spent."""
    seconds = step_seconds(per_token, 0.08)
    play = Play(DraftPolicy(5 if block else 3, block=block), seconds, batch)
    play.run(4000, [right] * batch)
    plain = seconds(batch, NO_DRAFTS)
    assert play.tokens / (play.seconds - GRANT_SECONDS) > 0.98 * batch / plain


@pytest.mark.parametrize("seed", range(3))
def test_auto_loses_little_with_the_times_of_two_gpus(seed: int) -> None:
    """All of Flash-0731 on two H200s, where no draft is accepted. A step without drafts takes 3.3%
    longer than in an engine without a draft head.
    """
    plain = 3.205e-3
    drafting = {2: 4.6e-3, 3: 5.1e-3, 4: 5.5e-3, 5: 5.8e-3, 6: 6.1e-3}

    def seconds(batch: int, kind: StepKind) -> float:
        return drafting.get(kind.width, 1.033 * plain)

    play = Play(DraftPolicy(5, block=True, sizes=(1,)), seconds, 1, seed).run(320, [0.0])
    before = play.seconds
    play.run(4096, [0.0])
    assert 4096 * plain > 0.95 * (play.seconds - before)


def test_every_batch_size_has_its_own_kind() -> None:
    """A large batch computes, a single sequence waits for weights."""

    def seconds(batch: int, kind: StepKind) -> float:
        return 0.01 + 0.001 * batch * kind.width

    policy = DraftPolicy(3)
    assert Play(policy, seconds, 1).run(500, [0.5]).kinds[-1].drafts
    assert not Play(policy, seconds, 64).run(500, [0.5] * 64).kinds[-1].drafts


def test_the_policy_returns_to_drafting() -> None:
    """After a text without right drafts it comes back, although it verifies drafts rarely then."""
    play = Play(DraftPolicy(3), FAIR, 2).run(500, [0.95] * 2)
    assert play.kinds[-1].drafts
    play.run(1000, [0.0] * 2)
    assert play.share(NO_DRAFTS, 500) > 0.98
    play.run(4000, [0.95] * 2)
    assert play.share(StepKind(4, 3), 500) > 0.8


def test_the_same_inputs_give_the_same_choices() -> None:
    first, second = (Play(DraftPolicy(3), FAIR, 3).run(1000, [0.9, 0.5, 0.1]) for _ in range(2))
    assert first.kinds == second.kinds and first.counts == second.counts


def test_requests_differ() -> None:
    """Where two rows a sequence pay, they go to the sequence whose drafts are right."""

    def seconds(batch: int, kind: StepKind) -> float:
        return 0.01 * (1 + 0.02 * kind.drafts + 0.1 * (kind.width > 1) + 2.0 * (kind.width > 2))

    play = Play(DraftPolicy(3), seconds, 2).run(2000, [0.95, 0.05])
    assert play.kinds[-1] == StepKind(2, 2)
    assert play.counts[0] > 10 * play.counts[1] > 0


def test_padded_steps_fill_their_rows() -> None:
    """A batch of 5 is padded to 8: two rows a sequence are 16, one of which is padding."""
    policy = DraftPolicy(3, sizes=(1, 2, 4, 8))
    play = Play(policy, CHEAP, 5).run(300, [0.9] * 5)
    policy.begin_step()
    counts = policy.choose(play.sequences, [3] * 5, unresolved=False)
    assert policy.kind == StepKind(3, 3) or sum(counts) == 15
    assert 5 + sum(counts) <= 8 * policy.kind.width - 1


def test_the_lanes_of_a_step_get_one_kind() -> None:
    """Whatever each of them would choose: a large batch drafts less."""

    def seconds(batch: int, kind: StepKind) -> float:
        return 0.01 + 0.001 * batch * kind.width

    policy = DraftPolicy(3)
    small, large = Play(policy, seconds, 1), Play(policy, seconds, 64)
    small.run(500, [0.5])
    large.run(500, [0.5] * 64)
    for first, second in ((small, large), (large, small)):
        policy.begin_step()
        policy.choose(first.sequences, [3] * len(first.sequences), unresolved=False)
        kind = policy.kind
        assert bool(kind.drafts) == (first is small)
        counts = policy.choose(second.sequences, [3] * len(second.sequences), unresolved=False)
        assert policy.kind == kind and max(counts) <= kind.drafts


def survivals_of(draw: random.Random, batch: int, most: int) -> list[list[float]]:
    return [
        list(itertools.accumulate((draw.random() for _ in range(most)), lambda a, b: a * b))
        for _ in range(batch)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_admission_is_optimal(seed: int) -> None:
    """No other choice of kind and of each sequence's drafts gives more tokens per second."""
    draw = random.Random(seed)
    batch, most = draw.randint(1, 4), 3
    survivals = survivals_of(draw, batch, most)
    kinds = step_kinds(most, block=False)
    seconds = {kind: draw.uniform(1, 2) for kind in kinds}
    rows = {kind: batch * (kind.width - 1) for kind in kinds}
    tokens = expected_tokens(survivals, rows)
    kind = max(kinds, key=lambda kind: tokens[kind] / seconds[kind])
    counts = select_drafts(survivals, [kind.drafts] * batch, rows[kind])

    def rate(kind: StepKind, counts: Sequence[int]) -> float:
        given = sum(sum(one[:count]) for one, count in zip(survivals, counts, strict=True))
        return (batch + given) / seconds[kind]

    best = max(
        rate(kind, each)
        for kind in kinds
        for each in itertools.product(range(kind.drafts + 1), repeat=batch)
        if sum(each) <= rows[kind]
    )
    assert rate(kind, counts) == pytest.approx(best)
    assert rate(kind, counts) == pytest.approx(tokens[kind] / seconds[kind])


def test_admission_keeps_limits() -> None:
    assert select_drafts([[0.9, 0.8], [0.7, 0.6]], [1, 2], 2) == [1, 1]
    assert select_drafts([[0.5, 0.5], [0.5, 0.5]], [2, 2], 2) == [1, 1]
    assert select_drafts([[0.9, 0.8], [0.7, 0.6]], [2, 2], 9) == [2, 2]


def test_calibration() -> None:
    """Overconfident by a temperature of 2.5; and confidences that say nothing at all."""
    draw = random.Random(0)
    hot, useless = Calibration(), Calibration()
    for _ in range(4000):
        x = draw.gauss(0.5, 1)
        confidence = 1 / (1 + 2.718281828 ** (-2.5 * x))
        hot.add(confidence, draw.random() < 1 / (1 + 2.718281828**-x))
        useless.add(confidence, draw.random() < 0.85)
    assert hot.scale == pytest.approx(0.4, abs=0.06) and abs(hot.shift) < 0.15
    assert useless(0.1) == pytest.approx(0.85, abs=0.05) == useless(0.99)


def test_drafts_beyond_the_confidences_have_the_mean_acceptance() -> None:
    """A head that made one draft may make three next time."""
    estimates, sequence = DraftEstimates(3), new_sequence(0)
    sequence.confidences = [0.9]
    found = estimates.survivals(sequence, unresolved=False)
    mean = INITIAL_ACCEPTANCE
    assert found == pytest.approx([0.9, 0.9 * mean, 0.9 * mean**2], abs=1e-3)


def test_confidences_of_the_drafts_before_are_calibrated_apart() -> None:
    """Two steps old, they say less than those of the drafts themselves."""
    estimates, sequence = DraftEstimates(1), new_sequence(0)
    draw = random.Random(1)
    for _ in range(2000):
        confidence = draw.choice([0.1, 0.9])
        for old in (False, True):
            chunk = Chunk(sequence, 1, 3, (0,), confidences=[confidence], stale_confidences=old)
            estimates.record_verified(chunk, draw.random() < (0.5 if old else confidence))
    sequence.confidences = [0.9]
    assert estimates.survivals(sequence, unresolved=False)[0] == pytest.approx(0.9, abs=0.05)
    assert estimates.survivals(sequence, unresolved=True)[0] == pytest.approx(0.5, abs=0.05)
