"""Calls a function that may use collectives on every rank of a model: for benchmarks and tests.

The function is sent to the workers in order with the plans, so that all ranks call it at the same
point. If it fails on one rank, the others may wait for that rank forever, so any error ends the
engine. Executor.call_ranks instead reports a FinwhaleError of one rank, and the engine continues;
serving uses only that method (import-linter forbids this module there).
"""

from collections.abc import Callable
from typing import TypeVar

from finwhale.engine.plan.executor import Executor
from finwhale.engine.rank.executor import LocalExecutor, local_executor
from finwhale.engine.rank.ranks import Ranks

T = TypeVar("T")


def call_ranks_or_die(executor: Executor, work: Callable[[LocalExecutor], T]) -> list[T]:
    """Call `work` on every rank at once, with the executor of the rank.

    If it raises on one of several ranks, the engine dies.

    Args:
        work: makes the same collective calls on all ranks; picklable, as is its result.

    Returns:
        The ranks' results, in the order of the ranks.
    """
    if isinstance(executor, Ranks):
        return executor.call_ranks_or_die(work)
    return local_executor(executor).call_ranks(work)
