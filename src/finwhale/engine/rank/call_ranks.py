"""Calls a function on every rank of a model: for measurements and tests.

The function is sent to the workers in order with the plans, so that all ranks call it at the same
point. Serving never does this: import-linter forbids this module there.
"""

from collections.abc import Callable
from typing import TypeVar

from finwhale.engine.plan.executor import Executor
from finwhale.engine.rank.executor import LocalExecutor, local_executor
from finwhale.engine.rank.ranks import Ranks

T = TypeVar("T")


def call_ranks(executor: Executor, work: Callable[[LocalExecutor], T]) -> list[T]:
    """Call `work` on every rank at once, with the executor of the rank.

    If it raises on one of several ranks, the engine dies.

    Args:
        work: makes the same collective calls on all ranks; picklable, as is its result.

    Returns:
        The ranks' results, in the order of the ranks.
    """
    if isinstance(executor, Ranks):
        return executor.call(work)
    return local_executor(executor).on_ranks(work)
