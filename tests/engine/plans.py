"""Which sequences a step plan is about."""

from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.sequences import SequenceState
from finwhale.engine.plan.step_plan import StepPlan


def planned(engine: Engine, plan: StepPlan) -> list[SequenceState]:
    """The sequence of each chunk."""
    by_slot = {sequence.slot: sequence for sequence in engine.scheduler.running}
    return [by_slot[slot] for slot in plan.slots]


def completing(engine: Engine, plan: StepPlan) -> list[SequenceState]:
    """The sequences of the chunks that want logits."""
    rows = zip(planned(engine, plan), plan.num_logits, strict=True)
    return [sequence for sequence, count in rows if count]
