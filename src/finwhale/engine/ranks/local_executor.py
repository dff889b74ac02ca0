"""The executor of the rank in this process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from finwhale.distributed.collectives import Alone, Collectives
from finwhale.engine.plan.executor import RankDescription, RankState
from finwhale.engine.plan.step_plan import LargestLane, PageCopy, StepPlan
from finwhale.engine.ranks.arena import Arena
from finwhale.engine.ranks.rank_weights import RankWeights
from finwhale.engine.steps.executor import StepExecutor, StepTransfer
from finwhale.engine.steps.page_copies import Copying, PageCopies
from finwhale.engine.steps.runner import ModelRunner
from finwhale.ops.builds import Builds
from finwhale.weights.allocation import WeightForm

ALONE = Alone()
P = ParamSpec("P")
T = TypeVar("T")


class LocalExecutor(StepExecutor):
    """Executes plans, and calls between steps (plan/executor.py has the contract).

    Args:
        weight_form: how this rank holds its weights; None: they cannot be replaced.
        ranks_on_host: number of ranks on this host, with this rank.

    Attributes:
        weights: this rank's part in updates of the weights.
        arenas: the memory of "weights" and "cache", if it can be freed while the engine sleeps.
        page_copies: copies pages for a prefix store; None: there is none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        builds: Builds,
        description: RankDescription,
        collectives: Collectives = ALONE,
        weight_form: WeightForm | None = None,
        arenas: Mapping[str, Arena] | None = None,
        ranks_on_host: int = 1,
    ) -> None:
        super().__init__(runner)
        self.builds, self.description = builds, description
        self.collectives, self.arenas = collectives, arenas or {}
        self.weights = RankWeights(runner.model, weight_form, ranks_on_host)
        self.page_copies: PageCopies | None = None

    def execute_lane(self, plan: StepPlan | None, largest: LargestLane) -> StepTransfer | None:
        """Execute the plan of this data-parallel rank; None: take part in the other ranks' step."""
        if plan is not None:
            return self.execute(plan)
        self.runner.serve_others(largest)
        return None

    def attach_staging(self, file: str, mark: bytes, lane: int | None = None) -> None:
        """Let this rank copy pages to and from a staging buffer (PageCopies). `lane`: only if it is
        this data-parallel rank; None: let every rank.
        """
        rank, runner = self.collectives.rank, self.runner
        if lane not in (None, rank.index):
            return
        users = (0, 1) if rank.data_parallel else (rank.index, rank.size)
        self.page_copies = PageCopies(
            file, mark, runner.cache.pages, runner.device, users, counts_saves=rank.data_parallel
        )

    def copy_pages(self, copies: Sequence[PageCopy]) -> Copying:
        assert self.page_copies is not None
        self.runner.use_device()
        return self.page_copies.begin(copies)

    def call_ranks(self, work: Callable[["LocalExecutor"], T]) -> list[T]:
        self.runner.use_device()
        return [work(self)]

    def check(self) -> None:
        self.collectives.check()

    def close(self) -> None:
        """Free the captured steps, then the connections to other ranks. No call may follow."""
        self._open = None
        for group in self.weights.groups.values():
            group.close()
        if self.page_copies is not None:
            self.page_copies.close()
        runner = self.runner
        runner.graphs = runner.prefill_graphs = runner.verification_steps = None
        self.collectives.close()

    def release(self) -> None:
        """Drop all references to the model, the cache and the sampler."""
        description = self.description
        for one in (self.runner, self.weights, self):
            vars(one).clear()
        self.description = description

    def mark_ready(self) -> None:
        self.builds.mark_ready()
        self.runner.times.reset()

    def rank_states(self) -> tuple[RankState, ...]:
        about, late = self.description, dict(self.builds.late())
        return (RankState(about.device, about.memory, late, times=self.runner.times.read()),)


def on_weights(
    method: Callable[Concatenate[RankWeights, P], T],
    executor: LocalExecutor,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call a method of a rank's `weights`: work for Executor.call_ranks."""
    return method(executor.weights, *args, **kwargs)
