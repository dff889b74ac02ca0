"""How many drafts pay: from what was accepted and how long steps took. Pure Python."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

# What is remembered: of drafts, fading, so many; of steps the last ones, whose median counts.
DRAFTS = 512
STEPS = 9
# Steps of a number of drafts that are timed before it is judged, and steps that may pass before
# it has been (the first after a change is not timed: its drafts are those of before).
SAMPLES = STEPS // 2 + 1
PATIENCE = 4 * SAMPLES
# A number that did not pay is tried again after so many steps: a text may have become predictable.
RETRY_STEPS = 512
# Of the drafts that were wanted, what a step must have had for its time to count.
MOSTLY = 0.75
# What another number must be better by, as a part.
MARGIN = 0.02


@dataclass(slots=True)
class _Mean:
    """A mean that forgets."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, DRAFTS)


@dataclass(slots=True)
class _Size:
    """Batches of about one size.

    Attributes:
        seconds: of the last steps, by number of drafts.
        chosen: the number that is best as far as is known.
        trying: the number that is being timed; None: the best one is used.
        tried: steps since it is; timed: those of them whose time counts.
        since: steps since a number was last tried.
        turn: which number is tried next.
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
    """Chooses the number of drafts that gives the most tokens a second.

    Expected tokens of a step with k drafts: 1 + sum over i <= k of the probability that the first i
    are right. Divided by the measured time of such a step at about this batch size.

    Args:
        most: the largest number of drafts.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # That draft i is right if those before it are.
        self._right = [_Mean() for _ in range(most)]
        self._sizes: dict[int, _Size] = {}

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """A sequence's drafts were verified."""
        for position in range(min(num_proposed, num_accepted + 1)):
            self._right[position].add(float(position < num_accepted))

    def took(self, drafts: Sequence[int], wanted: int, seconds: float) -> None:
        """A step took so long in which all decode.

        Args:
            drafts: of each sequence; some have fewer than wanted, at the ends of states and texts.
            wanted: what was chosen.
        """
        if max(drafts) != wanted or sum(drafts) < MOSTLY * wanted * len(drafts):
            return
        size = self._of(len(drafts))
        size.seconds[wanted].append(seconds)
        size.timed += wanted == size.trying

    def choose(self, batch: int) -> int:
        """How many drafts the next step of `batch` sequences may have, and make."""
        size = self._of(batch)
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

    def _of(self, batch: int) -> _Size:
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
        """Of one sequence in a step with so many drafts."""
        total = so_far = 1.0
        for mean in self._right[:drafts]:
            so_far *= mean.value
            total += so_far
        return total
