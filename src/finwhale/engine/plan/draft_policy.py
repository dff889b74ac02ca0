"""Chooses the number of drafts of each sequence in each step. Pure Python.

The rule is that of the DSpark paper (arXiv 2607.05147): verify the drafts with the highest survival
(plan/draft_estimates.py) as long as the expected number of tokens per second grows. Step times are
measured while the engine runs. The choice depends only on measured times, accepted drafts and
confidences.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from statistics import median
from typing import NamedTuple

from finwhale.engine.plan.draft_estimates import DraftEstimates
from finwhale.engine.plan.sequences import SequenceState

# The time of a kind of step is the median of its last TIMES measurements.
TIMES = 9
# A probe of a kind of step ends after SAMPLES measured steps, or after PATIENCE steps in all. (The
# first step after a change may have fewer drafts than wanted.)
SAMPLES, PATIENCE = 3, 8
# Choose the best kind again after this many steps.
CHOOSE_STEPS = 16
# A probe may begin PROBE_STEPS steps after the last one. A probe of a kind that was never measured
# may begin at once.
PROBE_STEPS = 256
# Change to another kind only if its token rate is higher by at least this fraction.
MARGIN = 0.01
# Probes may cost this fraction of all time. Probes of kinds without a measured time may cost
# GRANT_SECONDS more in total.
PROBE_SHARE, GRANT_SECONDS = 0.01, 1.0


class StepKind(NamedTuple):
    """A kind of decode step. In every kind, the draft head processes the step's tokens.

    Attributes:
        width: the step's tokens for each sequence, on average and rounded up: the known token and
            the drafts that it verifies.
        drafts: number of drafts that each sequence gets after the step.
    """

    width: int
    drafts: int


NO_DRAFTS = StepKind(1, 0)


def step_kinds(max_drafts: int, *, block: bool) -> tuple[StepKind, ...]:
    """The kinds of steps among which "auto" chooses.

    Args:
        block: one pass of the head makes all drafts, so fewer drafts would cost as much.
    """
    if block:
        return (NO_DRAFTS, *[StepKind(width, max_drafts) for width in range(2, max_drafts + 2)])
    return (
        NO_DRAFTS,
        *[
            StepKind(width, drafts)
            for drafts in range(1, max_drafts + 1)
            for width in (drafts, drafts + 1)
            if width > 1
        ],
    )


class DraftChooser:
    """Chooses the drafts of a step's decodes: the same number in every step.

    Attributes:
        kind: the kind of the last step.
    """

    def __init__(self, drafts: int) -> None:
        self.kind = StepKind(1 + drafts, drafts)

    def begin_step(self) -> None:
        """Begin a step, in which each lane calls `choose` at most once. All get the same kind."""

    def choose(
        self, sequences: Sequence[SequenceState], limits: Sequence[int], *, unresolved: bool
    ) -> Sequence[int]:
        """Choose the `kind` of a step, and the drafts of one lane's sequences.

        Args:
            limits: the most drafts that each sequence can verify.
            unresolved: the result of the previous step is not known yet.

        Returns:
            The number of drafts that each sequence verifies.
        """
        return [min(limit, self.kind.drafts) for limit in limits]


@dataclass(slots=True)
class _SizeMeasurements:
    """Measurements for batches of about one size.

    Attributes:
        seconds: times of the last steps.
        best: the best kind according to the measurements.
        steps: steps since the last choice of a kind.
        unprobed: steps since the last probe.
        turn: index of the kind that was probed last.
    """

    seconds: dict[StepKind, deque[float]] = field(default_factory=dict)
    best: StepKind = NO_DRAFTS
    steps: int = CHOOSE_STEPS
    unprobed: int = PROBE_STEPS
    turn: int = 0

    def time(self, kind: StepKind) -> float | None:
        times = self.seconds.get(kind)
        return median(times) if times else None


@dataclass(slots=True)
class _Probe:
    """A kind of step that is tried to measure its time and the acceptance of its drafts."""

    kind: StepKind
    steps: int = 0
    timed: int = 0


class DraftPolicy(DraftChooser):
    """Chooses the drafts that give the most tokens per second.

    Args:
        block: one pass of the head makes all drafts.
        sizes: batch sizes to which steps are padded, ascending; empty: steps are not padded.

    Attributes:
        estimates: must be told of all verified drafts.
    """

    def __init__(self, max_drafts: int, *, block: bool = False, sizes: Sequence[int] = ()) -> None:
        super().__init__(NO_DRAFTS.drafts)
        self.estimates = DraftEstimates(max_drafts)
        self.kinds = step_kinds(max_drafts, block=block)
        self._sizes = tuple(sizes)
        self._measured: dict[int, _SizeMeasurements] = {}
        self._probe: _Probe | None = None
        self._grant, self._credit = GRANT_SECONDS, 0.0
        self._has_kind = False

    def begin_step(self) -> None:
        self._has_kind = False

    def choose(
        self, sequences: Sequence[SequenceState], limits: Sequence[int], *, unresolved: bool
    ) -> Sequence[int]:
        batch = len(sequences)

        @cache
        def survivals() -> list[list[float]]:
            return [self.estimates.survivals(one, unresolved=unresolved) for one in sequences]

        if not self._has_kind:
            self._has_kind = True
            self._take_turn(self._size_of(batch), survivals)
        rows = self._tokens(batch, self.kind) - batch
        if not self.kind.drafts:
            return [0] * batch
        most = [min(limit, self.kind.drafts) for limit in limits]
        return most if sum(most) <= rows else select_drafts(survivals(), most, rows)

    def _take_turn(
        self, size: _SizeMeasurements, survivals: Callable[[], Sequence[Sequence[float]]]
    ) -> None:
        """Choose the kind of a step with a batch of this size."""
        size.steps += 1
        size.unprobed += 1
        if self._probe is not None and not self._continues(self._probe):
            self._probe = None
            size.steps, size.unprobed = CHOOSE_STEPS, 0
        if self._probe is None and size.steps >= CHOOSE_STEPS:
            size.steps = 0
            self._choose_kind(size, survivals())
        self.kind = size.best if self._probe is None else self._probe.kind

    def record_time(self, batch: int, num_drafts: int, proposed: StepKind, seconds: float) -> None:
        """Record the time of a step in which every sequence decodes.

        Args:
            num_drafts: number of drafts that the step verified, of all sequences together.
            proposed: the kind that `choose` chose for the step.
        """
        size = self._size_of(batch)
        self._credit = min(GRANT_SECONDS, self._credit + PROBE_SHARE * seconds)
        probe = self._probe
        width = -(-(batch + num_drafts) // self.padded(batch))
        if width != proposed.width:
            return
        size.seconds.setdefault(proposed, deque(maxlen=TIMES)).append(seconds)
        if probe is not None and probe.kind == proposed:
            probe.timed += 1

    def padded(self, batch: int) -> int:
        """The number of sequences to which a step of `batch` sequences is padded."""
        return next((size for size in self._sizes if size >= batch), batch)

    def _tokens(self, batch: int, kind: StepKind) -> int:
        """The most tokens of a step."""
        padded = self.padded(batch)
        # Padding sequences need a padding token.
        return padded * kind.width - (batch < padded)

    def _size_of(self, batch: int) -> _SizeMeasurements:
        key = self.padded(batch) if self._sizes else batch.bit_length()
        size = self._measured.get(key)
        if size is None:
            size = self._measured[key] = _SizeMeasurements()
            nearest = min(
                (other for other in self._measured if other != key),
                key=lambda other: abs(other - key),
                default=None,
            )
            if nearest is not None:
                size.best = self._measured[nearest].best
        return size

    def _continues(self, probe: _Probe) -> bool:
        if self.kind == probe.kind:
            probe.steps += 1
        return probe.timed < SAMPLES and probe.steps < PATIENCE

    def _choose_kind(self, size: _SizeMeasurements, survivals: Sequence[Sequence[float]]) -> None:
        batch = len(survivals)
        tokens = expected_tokens(
            survivals, {kind: self._tokens(batch, kind) - batch for kind in self.kinds}
        )
        rates: dict[StepKind, float] = {}
        for kind in self.kinds:
            time = size.time(kind)
            if time is not None:
                rates[kind] = tokens[kind] / time
        if not rates:
            # This size has no measurements yet: first measure the best kind of the nearest size.
            return
        best = max(rates, key=lambda kind: rates[kind])
        if size.best not in rates or rates[best] > (1 + MARGIN) * rates[size.best]:
            size.best = best
        self._begin_probe(size, rates, tokens, batch)

    def _begin_probe(
        self,
        size: _SizeMeasurements,
        rates: Mapping[StepKind, float],
        tokens: Mapping[StepKind, float],
        batch: int,
    ) -> None:
        """Probe the next kind that could be the best, unless the probe may cost too much time."""
        if size.best not in rates:
            return
        rate = rates[size.best]
        soon = size.unprobed < PROBE_STEPS
        for _ in self.kinds:
            size.turn = (size.turn + 1) % len(self.kinds)
            kind = self.kinds[size.turn]
            if kind == size.best or (soon and kind in rates):
                continue
            fastest, slowest = self._time_bounds(size, kind)
            # The kind would be slower even if the model accepted all drafts.
            if min(self._tokens(batch, kind), batch * (1 + kind.drafts)) <= rate * fastest:
                continue
            lost = (SAMPLES + 1) * max(0.0, slowest - tokens[kind] / rate)
            if kind not in rates and lost <= self._grant:
                self._grant -= lost
            elif lost <= self._credit:
                self._credit -= lost
            else:
                return
            self._probe = _Probe(kind)
            return

    def _time_bounds(self, size: _SizeMeasurements, kind: StepKind) -> tuple[float, float]:
        """The measured time, or bounds of it: the longest time of kinds that compute no more, and
        the longest time scaled up by the width.
        """
        time = size.time(kind)
        if time is not None:
            return time, time
        known = [(other, t) for other in self.kinds if (t := size.time(other))]
        less = [t for (width, drafts), t in known if width <= kind.width and drafts <= kind.drafts]
        scaled = [t * max(1.0, kind.width / other.width) for other, t in known]
        return max(less, default=0.0), max(scaled, default=0.0)


def expected_tokens(
    survivals: Sequence[Sequence[float]], rows: Mapping[StepKind, int]
) -> dict[StepKind, float]:
    """For each kind of step, compute how many tokens all sequences together gain on average.

    Args:
        survivals: the survival of each draft of each sequence.
        rows: the most drafts that a step of each kind verifies.
    """
    ordered: dict[int, list[float]] = {}
    found = {}
    for kind, most in rows.items():
        if kind.drafts not in ordered:
            each = [a for one in survivals for a in one[: kind.drafts]]
            ordered[kind.drafts] = sorted(each, reverse=True)
        found[kind] = len(survivals) + sum(ordered[kind.drafts][:most])
    return found


def select_drafts(
    survivals: Sequence[Sequence[float]], limits: Sequence[int], rows: int
) -> list[int]:
    """Choose the `rows` drafts with the highest survival; returns each sequence's number of drafts.

    Survivals do not increase along a sequence, so its admitted drafts are its first ones. Of equal
    survivals, earlier drafts and earlier sequences come first.
    """
    counts = [0] * len(survivals)
    candidates = (
        (one[k], -k, -index)
        for index, (one, limit) in enumerate(zip(survivals, limits, strict=True))
        for k in range(limit)
    )
    for _, _, index in nlargest(rows, candidates):
        counts[-index] += 1
    return counts
