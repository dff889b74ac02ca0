"""What an engine did and holds, in numbers: counters since its start, and the present state."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Literal

from finwhale.engine.plan.scheduler import Scheduler
from finwhale.request import FinishReason

# Seconds; the last bucket has no bound.
BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
Ending = FinishReason | Literal["abort"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Times by size.

    Attributes:
        bounds: upper bounds of the buckets but the last, in seconds.
        counts: how many fell into each bucket; one more than bounds.
        total: their sum in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages of one kind of state: held by sequences or kept for later ones, and all there are."""

    used: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """A snapshot.

    Attributes:
        running, waiting: sequences that have pages, and that are in line.
        step_seconds: how long the step that runs now has taken; 0 where none runs.
        pages: by kind of state (the cache's groups: window, c4, c128, c4_state, c128_state).
        idle_blocks: blocks of prompts and outputs kept for later requests that no sequence uses.
        requests: all that were taken.
        steps: forwards.
        prompt_tokens: of admitted sequences; cached_tokens: of them, those found instead of read.
        output_tokens: generated.
        preemptions: sequences that gave their pages back to be read again.
        endings: sequences by how they ended: "stop", "length", "error", "abort".
        drafts_proposed, drafts_accepted: drafts that were verified, and those of them that became
            output, by their place after the last known token.
        verifications: how often a sequence had drafts verified.
        draft_tokens: drafts that a sequence may have now.
        time_of_verification: of steps in which all decode, forward and choice.
        time_of_draft: of the same steps, what the MTP layer took.
        time_to_first_token: from a request's arrival to the first token of each of its sequences.
        time_between_tokens: from each token to the next of the same sequence.
        time_per_output_token: of each sequence that ended, the mean of the latter.
        late_compilations: by compiler, kernels and graphs that were compiled, or loaded from the
            cache, after the engine was ready: each is a request that waited. Always 0.
    """

    running: int
    waiting: int
    step_seconds: float
    pages: Mapping[str, PageUse]
    idle_blocks: int
    requests: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    endings: Mapping[Ending, int]
    drafts_proposed: tuple[int, ...]
    drafts_accepted: tuple[int, ...]
    verifications: int
    draft_tokens: int
    time_of_verification: Histogram
    time_of_draft: Histogram
    time_to_first_token: Histogram
    time_between_tokens: Histogram
    time_per_output_token: Histogram
    late_compilations: Mapping[str, int]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a verification of drafts gave; 0 where there was none."""
        if not self.verifications:
            return 0.0
        return 1 + sum(self.drafts_accepted) / self.verifications


class Timer:
    """A histogram that is being filled."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += times
        self._total += seconds * times

    def read(self) -> Histogram:
        return Histogram(BOUNDS, tuple(self._counts), self._total)


@dataclass(slots=True)
class Clock:
    """When a sequence began, and had its first and its last token; seconds, 0: not yet."""

    began: float
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class Meter:
    """The counters of one engine. Not locked: read while a step runs, they may be a step apart.

    Args:
        max_draft_tokens: the most drafts of a sequence; each position has its own counters.
    """

    max_draft_tokens: InitVar[int] = 0
    requests: int = 0
    steps: int = 0
    output_tokens: int = 0
    endings: dict[Ending, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "error": 0, "abort": 0}
    )
    drafts_proposed: list[int] = field(init=False)
    drafts_accepted: list[int] = field(init=False)
    verifications: int = 0
    time_of_verification: Timer = field(default_factory=Timer)
    time_of_draft: Timer = field(default_factory=Timer)
    time_to_first_token: Timer = field(default_factory=Timer)
    time_between_tokens: Timer = field(default_factory=Timer)
    time_per_output_token: Timer = field(default_factory=Timer)

    def __post_init__(self, max_draft_tokens: int) -> None:
        self.drafts_proposed = [0] * max_draft_tokens
        self.drafts_accepted = [0] * max_draft_tokens

    def step(self, clocks: list[Clock], now: float) -> None:
        """A step is done: one token of each sequence came now."""
        self.steps += 1
        self.output_tokens += len(clocks)
        # Most had their last token in the same step: few different times.
        lasts = [clock.last for clock in clocks]
        for last in set(lasts):
            times = lasts.count(last)
            if last:
                self.time_between_tokens.add(now - last, times)
            else:
                self._begin([clock for clock in clocks if not clock.last], now)
        for clock in clocks:
            clock.last = now

    def run(self, clock: Clock, count: int, now: float) -> None:
        """Several tokens of one sequence came now; each took its part of the time."""
        self.output_tokens += count
        if clock.last:
            if count:
                self.time_between_tokens.add((now - clock.last) / count, count)
        elif count:
            self._begin([clock], now)
            self.time_between_tokens.add(0.0, count - 1)
        if count:
            clock.last = now

    def drafted(self, num_proposed: int, num_accepted: int) -> None:
        """A sequence's drafts were verified."""
        for position in range(num_proposed):
            self.drafts_proposed[position] += 1
            self.drafts_accepted[position] += position < num_accepted
        if num_proposed:
            self.verifications += 1

    def _begin(self, clocks: list[Clock], now: float) -> None:
        for clock in clocks:
            clock.first = now
            self.time_to_first_token.add(now - clock.began)

    def ended(self, how: Ending, clock: Clock, num_tokens: int) -> None:
        self.endings[how] += 1
        if num_tokens > 1:
            self.time_per_output_token.add((clock.last - clock.first) / (num_tokens - 1))


def read_metrics(
    scheduler: Scheduler, meter: Meter, step_seconds: float, late: Mapping[str, int]
) -> EngineMetrics:
    """The present state and the counters.

    Args:
        step_seconds: how long the present step has run.
        late: what was compiled since the engine was ready, by compiler.
    """
    prefix = scheduler.prefix
    return EngineMetrics(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        step_seconds=step_seconds,
        pages={
            name: PageUse(pool.num_pages - 1 - pool.num_free, pool.num_pages - 1)
            for name, pool in scheduler.pages.pools.items()
        },
        idle_blocks=0 if prefix is None else prefix.num_idle,
        requests=meter.requests,
        steps=meter.steps,
        prompt_tokens=scheduler.counts.prompt_tokens,
        cached_tokens=scheduler.counts.cached_tokens,
        output_tokens=meter.output_tokens,
        preemptions=scheduler.counts.preemptions,
        endings=dict(meter.endings),
        drafts_proposed=tuple(meter.drafts_proposed),
        drafts_accepted=tuple(meter.drafts_accepted),
        verifications=meter.verifications,
        draft_tokens=scheduler.drafting.draft_tokens,
        time_of_verification=meter.time_of_verification.read(),
        time_of_draft=meter.time_of_draft.read(),
        time_to_first_token=meter.time_to_first_token.read(),
        time_between_tokens=meter.time_between_tokens.read(),
        time_per_output_token=meter.time_per_output_token.read(),
        late_compilations=late,
    )
