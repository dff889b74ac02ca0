"""The ranks of a model with data parallelism: each executes the plans of its own lane.

All ranks run every step, because they share the experts. So the lanes' plans wait here until every
lane has planned. Then one message has all of them, with the sizes of the largest, and a rank
without a plan computes only its part of the experts.
"""

import pickle
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from finwhale.distributed.workers import Workers
from finwhale.engine.plan.executor import Executor, RankDescription, StepResult
from finwhale.engine.plan.step_plan import LargestLane, PageCopy, SamplingPlan, StepPlan
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import LANE_COPY, LANE_SAMPLE, LANE_STEP, Ranks, RanksResult
from finwhale.engine.steps.executor import StepTransfer
from finwhale.engine.steps.page_copies import Copying
from finwhale.errors import EngineDeadError


class LaneRanks(Ranks):
    """The ranks, with one executor for each lane.

    Attributes:
        lanes: the executors, in the order of the ranks.
    """

    def __init__(self, local: LocalExecutor, workers: Workers, store: Store) -> None:
        super().__init__(local, workers, store)
        self.lanes = [LaneExecutor(self, index) for index in range(workers.size)]
        # The results of this process's rank that are not read yet, with their numbers.
        self.local_results: deque[tuple[int, StepTransfer]] = deque()

    def send_plans(self) -> None:
        """Launch the step that the lanes have planned."""
        taken = [lane.take() for lane in self.lanes]
        largest = LargestLane.of([plan for plan in taken if plan is not None])
        mine, *others = [None if one is None else one._replace(largest=largest) for one in taken]
        # Each worker unpickles only its own plan.
        sent = largest, [None if plan is None else pickle.dumps(plan, 5) for plan in others]
        self._keep(self._on_all(LANE_STEP, sent, lambda: self.local.execute_lane(mine, largest)))

    def sample_lane(self, index: int, plan: SamplingPlan) -> None:
        """Launch the sampling of one lane's last step."""
        result = self._on_all(
            LANE_SAMPLE, (index, plan), lambda: None if index else self.local.sample(plan)
        )
        self._keep(result)

    def copy_lane(self, index: int, copies: Sequence[PageCopy]) -> None:
        """Launch copies of one lane's pages."""
        self._on_all(
            LANE_COPY, (index, copies), lambda: None if index else self.local.copy_pages(copies)
        )

    def wait_lane(self, index: int, number: int) -> StepResult:
        """Wait for result `number` of a lane's rank, counted from 1, unless a rank fails."""
        # Results of steps that were discarded are skipped.
        while not index:
            found_number, pending = self.local_results.popleft()
            if found_number == number:
                return self.wait(pending)
        try:
            found: StepResult = pickle.loads(self.workers.wait_result(index, number))
        except EngineDeadError:
            self._hurry_exit()
            raise
        return found

    def _keep(self, result: StepTransfer | None) -> None:
        if result is not None:
            self.local_results.append((self.lanes[0].launched, result))


class LaneExecutor:
    """One lane's view of the ranks (a StepRunner).

    Attributes:
        launched: the number of results that its rank was asked for.
    """

    def __init__(self, ranks: LaneRanks, index: int) -> None:
        self._ranks, self._index = ranks, index
        self._plan: StepPlan | None = None
        self.launched = self._batches = 0
        self._counter: Tensor | None = None

    @property
    def description(self) -> RankDescription:
        return self._ranks.description

    def execute(self, plan: StepPlan) -> RanksResult | None:
        """Keep the plan until `LaneRanks.send_plans`."""
        assert self._plan is None
        self._plan = plan
        return None if plan.sampling is None else self._expected()

    def sample(self, plan: SamplingPlan) -> RanksResult:
        result = self._expected()
        if self._plan is not None:
            self._plan = self._plan._replace(sampling=plan)
        else:
            self._ranks.sample_lane(self._index, plan)
        return result

    def attach_staging(self, file: str, mark: bytes, buffer: memoryview) -> None:
        """Let the lane's rank copy pages to and from a staging buffer (PageCopies)."""
        self._counter = torch.frombuffer(buffer, dtype=torch.int64, count=1)
        attach = LocalExecutor.attach_staging
        self._ranks.call_ranks(partial(attach, file=file, mark=mark, lane=self._index))

    def copy_pages(self, copies: Sequence[PageCopy]) -> Copying:
        assert self._counter is not None
        self._batches += 1
        self._ranks.copy_lane(self._index, copies)
        return Copying(self._counter, self._batches)

    def take(self) -> StepPlan | None:
        """The kept plan, which leaves; None: the lane has planned nothing."""
        plan, self._plan = self._plan, None
        return plan

    def _expected(self) -> RanksResult:
        self.launched += 1
        return RanksResult(partial(self._ranks.wait_lane, self._index, self.launched))


def lane_executors(executor: Executor) -> "Sequence[Executor | LaneExecutor]":
    """The executors of an engine's lanes."""
    return executor.lanes if isinstance(executor, LaneRanks) else [executor]


def send_plans(executor: Executor) -> None:
    """Launch the step that the lanes have planned, unless that has happened."""
    if isinstance(executor, LaneRanks):
        executor.send_plans()
