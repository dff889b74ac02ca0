"""Chooses the number of drafts from measured acceptance and step times. Pure Python."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

# Acceptance is a running mean over about DRAFTS drafts. The time of a step is the median of the
# last STEPS measurements.
DRAFTS = 512
STEPS = 9
# A trial of a number of drafts ends after SAMPLES timed steps, or after PATIENCE steps in all. (The
# first step after a change is not timed: its drafts were made for the previous number.)
SAMPLES = STEPS // 2 + 1
PATIENCE = 4 * SAMPLES
# Try another number again after this many steps: the text may have become more predictable.
RETRY_STEPS = 512
# A step's time counts if the step had at least this fraction of the wanted drafts.
MIN_DRAFT_SHARE = 0.75
# Change to another number only if its token rate is higher by at least this fraction.
MARGIN = 0.02


@dataclass(slots=True)
class _Mean:
    """A running mean in which the weight of old values decays."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, DRAFTS)


@dataclass(slots=True)
class _Size:
    """Measurements for batches of about one size.

    Attributes:
        seconds: times of the last steps, by number of drafts.
        chosen: the best number of drafts according to the measurements.
        trying: the number of drafts on trial; None: no trial is running.
        tried: steps since the trial began.
        timed: steps of the trial whose time counts.
        since: steps since the last trial ended.
        turn: the number of drafts tried last in the regular rotation.
        untried: numbers of drafts that have had no trial yet.
    """

    seconds: list[deque[float]]
    chosen: int = 0
    trying: int | None = None
    tried: int = 0
    timed: int = 0
    since: int = 0
    turn: int = 0
    untried: list[int] = field(default_factory=list)


class DraftPolicy:
    """Chooses the number of drafts that gives the most tokens per second.

    A step with k drafts is expected to give 1 + sum over i <= k of the probability that the first i
    drafts are accepted. The policy divides this by the measured time of such a step at about the
    same batch size.

    Args:
        most: the largest number of drafts.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Probability that draft i is accepted if all drafts before it are.
        self._acceptance = [_Mean() for _ in range(most)]
        self._sizes: dict[int, _Size] = {}

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """Record the verification of a sequence's drafts."""
        for position in range(min(num_proposed, num_accepted + 1)):
            self._acceptance[position].add(float(position < num_accepted))

    def record_time(self, drafts: Sequence[int], wanted: int, seconds: float) -> None:
        """Record the time of a step in which every sequence decodes.

        Args:
            drafts: number of drafts of each sequence. It may be less than wanted, for example near
                the end of a text.
            wanted: the number that `choose` returned.
        """
        if max(drafts) != wanted or sum(drafts) < MIN_DRAFT_SHARE * wanted * len(drafts):
            return
        size = self._size_of(len(drafts))
        size.seconds[wanted].append(seconds)
        size.timed += wanted == size.trying

    def choose(self, batch: int) -> int:
        """Choose the number of drafts that each of `batch` sequences verifies and gets in a step.

        A sequence may have fewer.
        """
        size = self._size_of(batch)
        if size.trying is not None:
            size.tried += 1
            if size.tried <= PATIENCE and size.timed < SAMPLES:
                return size.trying
            size.trying = None
            size.since = 0
            size.chosen = self._best(size)
        if size.untried:
            return self._try(size, size.untried.pop(0))
        size.since += 1
        if size.since >= RETRY_STEPS:
            size.turn = (size.turn + 1) % (self.most + 1)
            return self._try(size, size.turn)
        if size.since % SAMPLES == 0:
            size.chosen = self._best(size)
        return size.chosen

    def _try(self, size: _Size, drafts: int) -> int:
        size.trying, size.tried, size.timed = drafts, 0, 0
        return drafts

    def _size_of(self, batch: int) -> _Size:
        key = batch.bit_length()
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size([deque(maxlen=STEPS) for _ in range(self.most + 1)])
            size.untried = list(range(self.most, -1, -1))
        return size

    def _best(self, size: _Size) -> int:
        def rate(drafts: int) -> float:
            times = size.seconds[drafts]
            return self.expected_tokens(drafts) / median(times) if times else 0.0

        best = max(range(self.most + 1), key=rate)
        return best if rate(best) > (1 + MARGIN) * rate(size.chosen) else size.chosen

    def expected_tokens(self, drafts: int) -> float:
        """Expected number of tokens that a step with `drafts` drafts gives one sequence."""
        total = so_far = 1.0
        for mean in self._acceptance[:drafts]:
            so_far *= mean.value
            total += so_far
        return total
