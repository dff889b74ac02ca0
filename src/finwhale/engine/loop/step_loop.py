"""The interface of step loops to the engine, and the launcher that both loops use."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from finwhale.engine.loop.in_flight import InFlightStep, TextStream
from finwhale.engine.loop.sampled_tokens import SampledToken
from finwhale.engine.plan.executor import Executor, PendingResult
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_plan import DraftPlan
from finwhale.engine.plan.step_planner import SamplingInputs, StepPlanner

# A text stream, the index of its new token in the sequence's token_ids, and the token.
NewToken = tuple[TextStream, int, SampledToken]


class StepLoop(Protocol):
    """Plans, launches and collects the steps of an engine."""

    def launch(
        self, streams: Mapping[str, TextStream], in_flight: Sequence[InFlightStep]
    ) -> InFlightStep | None:
        """Plan the next step and launch it. None: no step can be launched now.

        Args:
            in_flight: the in-flight steps, oldest first.
        """
        ...

    def collect(self, step: InFlightStep, later: Sequence[InFlightStep]) -> list[NewToken]:
        """Wait for a step's tokens. A sequence may end before it has used all of its tokens.

        Args:
            later: the in-flight steps after this one.
        """
        ...

    def record_appended(self) -> None:
        """Record the tokens of the last `collect` that the engine has appended to outputs."""
        ...

    def sample_waiting(self, in_flight: Sequence[InFlightStep]) -> None:
        """Launch the sampling that had to wait for the tokens of the last `collect`."""
        ...

    def drop_rows(self) -> None:
        """Drop references to rows of earlier steps, because no sequence remains."""
        ...


class Launcher:
    """Makes step plans from chunks, and passes them to the executor."""

    def __init__(self, executor: Executor, scheduler: Scheduler, vocab_size: int) -> None:
        self.executor, self.scheduler = executor, scheduler
        can_route = executor.description.routed_experts is not None
        self.planner = StepPlanner(vocab_size, can_route=can_route)

    def launch(
        self, chunks: Sequence[Chunk], inputs: SamplingInputs | None, draft: DraftPlan | None = None
    ) -> PendingResult | None:
        """Launch a step. Without `inputs` it returns None, and the caller must call `sample`."""
        freed = self.scheduler.take_freed()
        try:
            plan = self.planner.plan(chunks, freed=freed, inputs=inputs, draft=draft)
            return self.executor.execute(plan)
        except BaseException:
            # The executor may have applied only a part of the plan.
            self.scheduler.return_freed(freed)
            self.planner.resend_all()
            raise

    def sample(
        self, slots: tuple[int, ...], inputs: SamplingInputs, rows: Sequence[int] | None = None
    ) -> PendingResult:
        """Launch the sampling of the last step's tokens."""
        return self.executor.sample(self.planner.plan_sampling(slots, inputs, rows))
