"""An engine's metrics: counters since its start, and its current state."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from finwhale.engine.plan.executor import RankState
from finwhale.engine.plan.prefix_store import StoreCounts
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.request import FinishReason

T = TypeVar("T")
# Seconds; the last bucket has no bound.
BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


@dataclass(slots=True)
class Histogram:
    """A histogram of times.

    Attributes:
        counts: number of times in each bucket, of which all but the last end at one of BOUNDS.
        total: sum of all times in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages of one kind of state: the number used or cached, and the total number."""

    used: int
    total: int


@dataclass(slots=True, kw_only=True)
class Counters:
    """The counters of an engine, which begin at its start.

    Attributes:
        requests: number of accepted requests.
        ordinary_requests: how many of them a prefill server (`role`) answered although no decode
            server continues them.
        steps: number of forwards.
        output_tokens: generated tokens.
        endings: sequences by how they ended: "stop", "length", "error", "abort".
        drafts_proposed: number of verified drafts, by position after the last known token.
        drafts_accepted: how many of them became output.
        verifications: number of times that the model verified a sequence's drafts.
        time_of_verification: time of forward and sampling, in steps in which all sequences decode.
        time_of_draft: time of the draft head in the same steps.
        time_to_first_token: from a request's arrival to the first token of each of its sequences.
        time_between_tokens: from each token to the next of the same sequence.
        time_per_output_token: mean time between tokens of each sequence that ended.
    """

    requests: int = 0
    ordinary_requests: int = 0
    steps: int = 0
    output_tokens: int = 0
    endings: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "error": 0, "abort": 0}
    )
    drafts_proposed: list[int]
    drafts_accepted: list[int]
    verifications: int = 0
    time_of_verification: Histogram = field(default_factory=Histogram)
    time_of_draft: Histogram = field(default_factory=Histogram)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    time_between_tokens: Histogram = field(default_factory=Histogram)
    time_per_output_token: Histogram = field(default_factory=Histogram)


@dataclass(slots=True, kw_only=True)
class EngineMetrics(Counters):
    """A snapshot of an engine's metrics.

    Attributes:
        running: number of sequences that have pages.
        waiting: number of sequences that wait for admission.
        step_seconds: time that the current step has taken so far; 0 if no step runs.
        pages: page use by cache group (window, c4, c128, c4_state, c128_state).
        idle_blocks: cached blocks of prompts and outputs that no sequence uses.
        prompt_tokens: prompt tokens of admitted sequences.
        cached_tokens: how many of the prompt tokens were in the prefix cache.
        cache_hits: sequences that resumed after a cached prefix.
        evicted_blocks: blocks that the prefix cache has evicted.
        preemptions: number of preempted sequences, which are prefilled again.
        draft_tokens: the current maximum number of drafts of a sequence.
        late_compilations: number of kernels and graphs, by compiler, that were compiled or loaded
            from the cache after the engine was ready. Each one delays a request. Should be 0.
        ranks: the state of each rank.
        store: what the prefix store has done; None: there is none.
        dropped_events: KV events that were lost, because too many were waiting.
        store_off: why the store was switched off; empty: it is used.
    """

    running: int
    waiting: int
    step_seconds: float
    pages: Mapping[str, PageUse]
    idle_blocks: int
    prompt_tokens: int
    cached_tokens: int
    cache_hits: int
    evicted_blocks: int
    preemptions: int
    draft_tokens: int
    late_compilations: Mapping[str, int]
    ranks: tuple[RankState, ...] = ()
    store: StoreCounts | None = None
    store_off: str = ""
    dropped_events: int = 0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the verified drafts that were accepted, by position; 0 where none was."""
        pairs = zip(self.drafts_accepted, self.drafts_proposed, strict=True)
        return tuple([accepted / proposed if proposed else 0.0 for accepted, proposed in pairs])

    @property
    def mean_accepted_length(self) -> float:
        """Mean number of tokens that a sequence gains per verification; 0 before the first one."""
        if not self.verifications:
            return 0.0
        return 1 + sum(self.drafts_accepted) / self.verifications


@dataclass(slots=True)
class Clock:
    """The times (time.monotonic()) of a request's arrival and of a sequence's first and last token.
    0: the sequence has no token yet.

    Attributes:
        previous: `last` before the last tick. Only engines that draft use it.
    """

    began: float
    first: float = 0.0
    last: float = 0.0
    previous: float = 0.0

    def tick(self, now: float) -> None:
        """Record the time of new tokens."""
        self.previous, self.last = self.last, now
        self.first = self.first or now


class Meter(Counters):
    """The counters of one engine, without a lock: a reader may see some of a step's changes."""

    __slots__ = ()

    def __init__(self, max_draft_tokens: int = 0) -> None:
        """max_draft_tokens: the most drafts of a sequence; each position has its own counters."""
        drafts = [0] * max_draft_tokens
        super().__init__(drafts_proposed=drafts, drafts_accepted=drafts.copy())

    def record_step(self, clocks: list[Clock], now: float) -> None:
        """Record a step that gave each sequence one token now."""
        self.steps += 1
        self.output_tokens += len(clocks)
        # Most sequences got their last token in the same step, so there are few different times.
        lasts = [clock.last for clock in clocks]
        for last in set(lasts):
            times = lasts.count(last)
            if last:
                self.time_between_tokens.add(now - last, times)
                continue
            for clock in clocks:
                if not clock.last:
                    clock.first = now
                    self.time_to_first_token.add(now - clock.began)
        for clock in clocks:
            clock.last = now

    def record_tokens(self, clock: Clock, count: int) -> None:
        """Record `count` tokens that one sequence got at clock.last (Clock.tick).

        They share the time since the token before them.
        """
        if not count:
            return
        self.output_tokens += count
        if clock.previous:
            self.time_between_tokens.add((clock.last - clock.previous) / count, count)
        else:
            self.time_to_first_token.add(clock.first - clock.began)
            self.time_between_tokens.add(0.0, count - 1)

    def record_drafts(self, num_proposed: int, num_accepted: int) -> None:
        """Record the verification of a sequence's drafts."""
        for position in range(num_proposed):
            self.drafts_proposed[position] += 1
            self.drafts_accepted[position] += position < num_accepted
        if num_proposed:
            self.verifications += 1

    def record_end(self, how: FinishReason, clock: Clock, num_tokens: int) -> None:
        """Record the end of a sequence that got `num_tokens` tokens."""
        self.endings[how] += 1
        if num_tokens > 1:
            self.time_per_output_token.add((clock.last - clock.first) / (num_tokens - 1))


def _total(counts: Sequence[T]) -> T:
    """The sum of counters of one class, field by field."""
    first: Any = counts[0]
    sums = {each.name: sum(getattr(one, each.name) for one in counts) for each in fields(first)}
    found: T = replace(first, **sums)
    return found


def read_metrics(
    schedulers: Sequence[Scheduler], meter: Meter, step_seconds: float, ranks: tuple[RankState, ...]
) -> EngineMetrics:
    """Read the current state and the counters, added over the lanes' schedulers."""
    late, used, total = Counter[str](), Counter[str](), Counter[str]()
    for scheduler in schedulers:
        for name, pool in scheduler.pages.pools.items():
            used[name] += pool.num_pages - 1 - pool.num_free
            total[name] += pool.num_pages - 1
    prefixes = [one.prefix for one in schedulers if one.prefix is not None]
    stores = [s.admission.stored for s in schedulers if s.admission.stored is not None]
    for rank in ranks:
        late.update(rank.late_compilations)
    return EngineMetrics(
        running=sum(len(one.running) for one in schedulers),
        waiting=sum(one.num_waiting for one in schedulers),
        step_seconds=step_seconds,
        pages={name: PageUse(used[name], total[name]) for name in total},
        idle_blocks=sum(one.num_idle for one in prefixes),
        evicted_blocks=sum(one.num_evicted for one in prefixes),
        store=_total([one.counts for one in stores]) if stores else None,
        store_off=next((one.off for one in stores if one.off), ""),
        dropped_events=sum(one.events.dropped for one in prefixes if one.events is not None),
        draft_tokens=max(one.drafting.draft_tokens for one in schedulers),
        late_compilations=late,
        ranks=ranks,
        **asdict(_total([one.counts for one in schedulers])),
        **{one.name: deepcopy(getattr(meter, one.name)) for one in fields(meter)},
    )
