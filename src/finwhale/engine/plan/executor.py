"""The executor: the engine's interface to the ranks that execute its step plans. No torch.

An executor runs plans in this process (ranks/local_executor.py), or in this process and others
(ranks/ranks.py). Plans, results and descriptions are plain data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from finwhale.engine.plan.step_plan import PageCopy, SamplingPlan, StepPlan
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.request import ExpertIds

if TYPE_CHECKING:  # it imports torch
    from finwhale.models.cache import CacheGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a rank holds on its device.

    Attributes:
        weights: the model's weights and tables.
        workspace: temporary tensors of the largest steps, logits, sampling, captured graphs. 0 on a
            CPU, where each step allocates and frees its temporary tensors.
        cache: the pages of the cache.
    """

    weights: int
    workspace: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.cache

    def __str__(self) -> str:
        return (
            f"{self.total:,} bytes: weights {self.weights:,}, workspace {self.workspace:,}, "
            f"cache {self.cache:,}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDrafts:
    """Decode steps with drafts that run on the device without the host (steps/draft_decode.py).

    Attributes:
        max_seqs: the most sequences of such a step.
        sizes: the numbers of sequences to which steps that verify drafts are padded, ascending;
            empty: no step is padded.
        plain_sizes: the same for steps with one token of each sequence.
        kinds: pairs (width, number of drafts). The width is the number of tokens of each padded
            sequence; each sequence gets that number of drafts after the step.
    """

    max_seqs: int
    sizes: tuple[int, ...]
    plain_sizes: tuple[int, ...]
    kinds: tuple[tuple[int, int], ...]

    def padded(self, num_seqs: int, width: int) -> int:
        """The number of sequences to which a step of a width is padded."""
        sizes = self.plain_sizes if width == 1 else self.sizes
        return next((size for size in sizes if size >= num_seqs), num_seqs)

    def captured(self) -> list[tuple[int, int]]:
        """The sizes and widths to capture. The largest is first, because the smaller ones then fit
        into the memory that it leaves.
        """
        widths = {width for width, _ in self.kinds}
        pairs = [(size, 1) for size in self.plain_sizes if 1 in widths]
        pairs += [(size, width) for size in self.sizes for width in widths if width > 1]
        return sorted(pairs, key=lambda pair: pair[0] * pair[1], reverse=True)

    def width(self, num_seqs: int, num_tokens: int, drafts: int) -> int | None:
        """How many tokens each padded sequence has in a step that makes `drafts` drafts; None: no
        step does.
        """
        if num_seqs > self.max_seqs:
            return None
        for width in sorted(width for width, count in self.kinds if count == drafts):
            size = self.padded(num_seqs, width)
            # Padding sequences need a padding token.
            if size * width >= num_tokens + (num_seqs < size):
                return width
        return None


@dataclass(frozen=True, slots=True)
class RoutedExpertsForm:
    """Shape and dtype of the routed experts of one token.

    Attributes:
        shape: number of layers, and of experts that each of them chooses.
        dtype: numpy's name of the ids' dtype.
    """

    shape: tuple[int, int]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDescription:
    """The properties of an opened rank that the engine needs.

    Attributes:
        device: torch's name of the device, such as "cuda:0".
        num_ranks: number of ranks of the model.
        asynchronous: the host need not wait for the device, so the engine runs a step ahead.
        needs_warm_up: some initialisation is lazy, and warm-up requests must trigger it.
        groups: the model's cache groups.
        num_pages: number of pages of each group, including page 0.
        max_model_len: the most tokens of a sequence.
        sizes: of the largest steps.
        can_draft: the rank has a draft head and uses it.
        device_drafts: decodes with drafts that need no host; None: every step needs the host.
        kernels: number of kernels that were built ahead of time.
        compiled_kernels: how many of them were compiled because no cache had them.
        compiled_layers: in the compiled mode, the number of graphs that were compiled, not loaded.
        start_seconds: duration of each phase of the start.
        routed_experts: the form in which steps return routed experts; None: they return none.
    """

    device: str
    num_ranks: int = 1
    asynchronous: bool
    needs_warm_up: bool = False
    groups: "tuple[CacheGroup, ...]"
    num_pages: Mapping[str, int]
    max_model_len: int
    sizes: StepSizes
    can_draft: bool = False
    device_drafts: DeviceDrafts | None = None
    memory: MemoryUse
    kernels: int = 0
    compiled_kernels: int = 0
    compiled_layers: int = 0
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    routed_experts: RoutedExpertsForm | None = None


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The mean times of a rank's last measured steps (steps/stopwatch.py). None: nothing was
    measured yet.

    On a GPU these are times of the device, on a CPU the processor time of the rank's process.

    Attributes:
        step_seconds: of a whole step, with its waits for other ranks on GPUs.
        head_seconds: of the LM head in steps with prefill, which waits for no other rank.
    """

    step_seconds: float | None = None
    head_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """What the engine knows of a rank without asking its device.

    Attributes:
        device: torch's name of the device, such as "cuda:1".
        memory: None: the rank has not reported it.
        late_compilations: number of kernels and graphs compiled or loaded since `mark_ready`, by
            compiler.
        heartbeat_age_s: seconds since its process was last seen alive; 0 for rank 0.
        times: of its steps since `mark_ready`.
    """

    device: str
    memory: MemoryUse | None
    late_compilations: Mapping[str, int]
    heartbeat_age_s: float = 0.0
    times: RankTimes = RankTimes()


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of a step's rows. They are undefined for rows that did not ask for them.

    Attributes:
        token: log-probability of each row's sampled token.
        rank: rank of each row's sampled token by probability, from 1.
        top, top_ids: log-probabilities and ids of each row's most likely tokens; id -1 is padding.
    """

    token: list[float]
    rank: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


class PromptScores(NamedTuple):
    """Log-probabilities of prompt tokens.

    Attributes:
        chunk: the index of the chunk in the plan. Row i is the token after the chunk's token i.
        valid: whether all logits are finite.
    """

    chunk: int
    valid: bool
    logprobs: RowLogprobs


class StepResult(NamedTuple):
    """The result of a step.

    Attributes:
        token_ids: the sampled token of each row of the sampling plan.
        valid: for each row, whether its logits gave a token.
        logprobs: log-probabilities; None: no row asked for them.
        drafts: the next drafts of each chunk that gets any. A list may be longer than the chunk's
            `propose`; the drafts beyond it are undefined.
        confidences: the draft head's confidence in each draft; None: the head gives none.
        verify_seconds: duration of forward and sampling; None: not measured.
        draft_seconds: duration of the draft head; None: not measured.
        scored: one entry for each of the plan's `scored`.
        routed: the experts of each of the plan's tokens [tokens, layers, top-k]; None: the plan
            does not want them.
    """

    token_ids: list[int]
    valid: list[bool]
    logprobs: RowLogprobs | None = None
    drafts: list[list[int]] | None = None
    verify_seconds: float | None = None
    draft_seconds: float | None = None
    scored: tuple[PromptScores, ...] = ()
    confidences: list[list[float]] | None = None
    routed: ExpertIds | None = None


class PendingResult(Protocol):
    """The result of a step that may still be running."""

    def wait(self) -> StepResult:
        """Wait until the device has finished the step."""


class PendingCopies(Protocol):
    """Copies of pages that may still be running."""

    def done(self) -> bool:
        """Whether every rank has ended them. Returns at once."""


class StepRunner(Protocol):
    """Runs step plans in the order of the calls. No call waits for the device."""

    @property
    def description(self) -> RankDescription: ...

    def execute(self, plan: StepPlan) -> PendingResult | None:
        """Launch a step. Returns None if the plan has no sampling; the caller then calls `sample`.

        If this raises, the ranks may have received any part of the plan, so the next plan must
        repeat all settings and page tables (StepPlanner.resend_all). After an
        EngineDeadError no further call is possible.
        """

    def sample(self, plan: SamplingPlan) -> PendingResult:
        """Launch the sampling of the last step, whose plan had no sampling."""


class Executor(StepRunner, Protocol):
    """All ranks of a model."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> PendingCopies:
        """Launch copies between pages and the staging buffer (LocalExecutor.attach_staging).
        Every rank loads; only rank 0 saves.
        """

    def call_ranks(self, work: Callable[[Any], T]) -> list[T]:
        """Call `work` on every rank with its executor, between two steps, and wait for the results.

        The engine can continue after an error of `work`. So `work` must not use the model's
        collectives, in which the other ranks might wait forever.

        Args:
            work: picklable, as is its result.

        Raises:
            FinwhaleError, RuntimeError: of `work` on the first rank on which it failed. Every rank
                has ended its call.
            EngineDeadError: a rank has failed.
        """

    def check(self) -> None:
        """Raise EngineDeadError if a rank has failed. Returns at once."""

    def close(self) -> None:
        """End the other ranks' processes, and disconnect this rank. No call may follow."""

    def mark_ready(self) -> None:
        """Start to count compilations, because the warm-up is over."""

    def rank_states(self) -> tuple[RankState, ...]:
        """The state of each rank, rank 0 first. Returns at once."""
