"""The executor: how the engine reaches the ranks that execute its plans. No torch.

An executor runs plans in this process (rank/executor.py). Its results and its description are plain
data, so that an executor can also run the same plans in other processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from finwhale.engine.plan.pages import PageGroup
from finwhale.engine.plan.step_plan import SamplingPlan, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a rank holds on its device.

    Attributes:
        weights: the model's weights and tables.
        workspace: temporaries of the largest steps, logits and sampling, captured graphs. 0 on a
            CPU, where each step allocates and frees its temporaries.
        cache: the paged state.
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
    """Steps of a drafting engine that follow each other on the device (draft_decode.py).

    Attributes:
        counts: numbers of drafts that there are such steps for.
        max_seqs: sequences of a step at most.
    """

    counts: tuple[int, ...]
    max_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDescription:
    """What opening a rank found. The engine knows nothing else of it.

    Attributes:
        device: as torch names it, such as "cuda:0".
        asynchronous: the device computes while the host goes on: the engine plans a step ahead.
        needs_warm_up: lazy initialisation is left, which warm-up requests trigger.
        groups: the model's cache groups.
        num_pages: pages of each group, page 0 included.
        max_model_len: tokens of one sequence at most.
        can_draft: the rank has a draft head and drafts with it.
        device_drafts: None: every drafting step goes over the host.
        kernels: kernels that were built ahead; compiled_kernels: those of them that no cache held.
        compiled_layers: in the compiled mode, the graphs that were compiled and not loaded.
        start_seconds: how long each phase of the start took.
    """

    device: str
    asynchronous: bool
    needs_warm_up: bool
    groups: tuple[PageGroup, ...]
    num_pages: Mapping[str, int]
    max_model_len: int
    can_draft: bool
    device_drafts: DeviceDrafts | None
    memory: MemoryUse
    kernels: int
    compiled_kernels: int
    compiled_layers: int
    start_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities of a step's rows, meaningless for rows that asked for none.

    Attributes:
        token: of each row's token.
        rank: of each row's token among all, from 1.
        top, top_ids: of each row's most likely tokens; an id of -1 is padding.
    """

    token: list[float]
    rank: list[int]
    top: list[list[float]]
    top_ids: list[list[int]]


class StepResult(NamedTuple):
    """What a step gave.

    Attributes:
        token_ids: one a row of the sampling plan.
        valid: whether the row's logits gave a token.
        logprobs: None: no row asked for any.
        drafts: for each chunk that proposes, its next drafts; meaningless past its own number.
        verify_seconds, draft_seconds: how long forward and choice took, and the drafts. None: not
            measured.
    """

    token_ids: list[int]
    valid: list[bool]
    logprobs: RowLogprobs | None = None
    drafts: list[list[int]] | None = None
    verify_seconds: float | None = None
    draft_seconds: float | None = None


class PendingResult(Protocol):
    """The result of a step that may still be running."""

    def wait(self) -> StepResult:
        """Wait for the device."""
        ...


class Executor(Protocol):
    """Runs step plans in the order in which it gets them. No call waits for the device."""

    @property
    def description(self) -> RankDescription: ...

    def execute(self, plan: StepPlan) -> PendingResult | None:
        """Launch a step. None: the plan has no sampling, and `sample` is called next.

        If this raises, the executor may have lost any part of the plan: the next plan must say
        everything again (StepPlanner.forget).
        """
        ...

    def sample(self, plan: SamplingPlan) -> PendingResult:
        """Launch the choice of tokens of the last step, whose plan left it out."""
        ...

    def ready(self) -> None:
        """The warm-up is over: count every compilation from here on."""
        ...

    def late_compilations(self) -> Mapping[str, int]:
        """By compiler: what was compiled, or loaded from the cache, since `ready`."""
        ...
