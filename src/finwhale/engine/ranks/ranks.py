"""The executor of several ranks: one in this process, the others in worker processes.

rank_processes.py says where the worker processes come from.

Every rank opens the same model with its own share of the weights, and executes every plan. Only
rank 0 transfers results to the host. The ranks wait for each other inside the model, so none can
continue without the others: if one fails, in whatever way, the engine dies.
"""

import atexit
import logging
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from finwhale.collection import freeze_heap
from finwhale.distributed import worker_messages
from finwhale.distributed.peers import Peers, join_store
from finwhale.distributed.rank import Rank, StoreAddress
from finwhale.distributed.threads import start_in_thread
from finwhale.distributed.worker import CAUSE_S, OwnerLink, notices_another
from finwhale.distributed.workers import Workers
from finwhale.engine.plan.executor import Executor, RankDescription, RankState, StepResult
from finwhale.engine.plan.step_plan import PageCopy, SamplingPlan, StepPlan
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.rank_processes import RankProcesses
from finwhale.engine.steps.executor import StepTransfer
from finwhale.engine.steps.host_transfer import Transfer
from finwhale.engine.steps.page_copies import Copying
from finwhale.errors import EngineDeadError, FinwhaleError, first_line

logger = logging.getLogger(__name__)

OpenRank = Callable[[Peers], LocalExecutor]
T = TypeVar("T")

# The first byte of a message to the workers says what the message is.
_EXECUTE, _SAMPLE, _COPY, _READY, _CALL = b"e", b"s", b"p", b"r", b"c"
LANE_STEP, LANE_SAMPLE, LANE_COPY = b"l", b"o", b"i"  # of data-parallel ranks (lane_ranks.py)
CLOSE_S = 10.0  # time limit for closing the device and NCCL
FAILED_CLOSE_S = 2.0  # the same after a rank has failed, for which this rank's device may wait
EXIT_S = 5  # time limit for the exit of a process whose device waits for a rank that is gone


def open_ranks(
    open_first: OpenRank,
    open_worker: OpenRank,
    processes: RankProcesses,
    kind: "type[Ranks] | None" = None,
) -> "Ranks":
    """Open all ranks: the first in this process, the others in a process each.

    Args:
        open_first: opens rank 0, in this process.
        open_worker: opens each of the other ranks in its process; picklable.
        kind: the class of the result; None: Ranks.

    Raises:
        FinwhaleError: a rank cannot be opened. The error has the class of the rank's own error.
    """
    workers = Workers(partial(run_worker, open_worker, processes.address), processes.workers)
    try:
        local = open_first(Peers(Rank(0, workers.size), processes.store, workers.check))
        workers.wait_opened()
    except BaseException as error:
        # A worker that has noticed a failure waits for CAUSE_S itself.
        failure = workers.wait_failure(2 * CAUSE_S if notices_another(error) else 0.0)
        workers.close()
        if failure is not None and isinstance(error, Exception):
            raise failure from error
        raise
    return (kind or Ranks)(local, workers, processes.store)


def first_rank(executor: Executor) -> LocalExecutor:
    """The rank of this process. It must not call collectives alone."""
    rank = executor.local if isinstance(executor, Ranks) else executor
    assert isinstance(rank, LocalExecutor)
    return rank


class Ranks:
    """Runs plans on all ranks (plan/executor.py has the contract).

    A plan that fails on one rank may have succeeded on another. So every error in `execute` or
    `sample`, on any rank, is an EngineDeadError.
    """

    def __init__(self, local: LocalExecutor, workers: Workers, store: Store) -> None:
        self.local, self.workers = local, workers
        self._store = store  # later connections need it
        self._close = weakref.finalize(self, _close, os.getpid(), workers, local)

    @property
    def description(self) -> RankDescription:
        return self.local.description

    def execute(self, plan: StepPlan) -> "RanksResult | None":
        result = self._on_all(_EXECUTE, plan, lambda: self.local.execute(plan))
        return None if result is None else RanksResult(partial(self.wait, result))

    def sample(self, plan: SamplingPlan) -> "RanksResult":
        result = self._on_all(_SAMPLE, plan, lambda: self.local.sample(plan))
        return RanksResult(partial(self.wait, result))

    def copy_pages(self, copies: Sequence[PageCopy]) -> Copying:
        loads = [copy for copy in copies if copy.load]
        return self._on_all(_COPY, loads, lambda: self.local.copy_pages(copies))

    def call_ranks_collectively(self, work: Callable[[LocalExecutor], T]) -> list[T]:
        """Call `work` on every rank at once. Any error on any rank is an EngineDeadError."""

        def call() -> list[T]:
            mine = self.local.call_ranks(work)
            others = self.workers.wait_answers()
            return mine + [pickle.loads(answer.pickled) for answer in others]

        return self._on_all(_CALL, work, call)

    def _on_all(self, kind: bytes, content: object, call: Callable[[], T]) -> T:
        """Send the workers a message, unless its content is empty, and call this rank."""
        try:
            with self.workers.guard():
                if content:
                    self.workers.send(kind + pickle.dumps(content, 5))
                return call()
        except BaseException as error:
            raise self._die(error) from error

    def call_ranks(self, work: Callable[[LocalExecutor], T]) -> list[T]:
        found = self.call_ranks_collectively(partial(_or_error, work))
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found  # type: ignore[return-value]

    def _die(self, error: BaseException) -> BaseException:
        """Kill the workers, because of an error of rank 0; returns the exception to raise."""
        failure: FinwhaleError | None = None
        if isinstance(error, EngineDeadError):
            failure = error
        elif notices_another(error):
            failure = self.workers.wait_failure()
        if failure is None:
            reason = str(error).strip().partition("\n")[0]
            device = self.description.device
            failure = EngineDeadError(f"rank 0 ({device}): {type(error).__name__}: {reason}")
        self.workers.fail(failure)
        self._hurry_exit()
        return failure if isinstance(error, Exception) else error

    def _hurry_exit(self) -> None:
        if self.description.asynchronous:
            atexit.register(_limit_exit)

    def wait(self, result: StepTransfer) -> StepResult:
        """Wait for a result, unless a rank fails."""
        try:
            with self.workers.guard():
                while not result.done():
                    self.workers.check()
                    time.sleep(0)
                found = result.wait()
            self._check_local()  # a collective that gave up has computed nothing
        except EngineDeadError:
            self._hurry_exit()
            raise
        return found

    def check(self) -> None:
        self.workers.check()
        self._check_local()

    def _check_local(self) -> None:
        """End all ranks if a collective of this rank gave up.

        Raises:
            EngineDeadError: the collective waited too long for another rank.
        """
        try:
            self.local.check()
        except EngineDeadError as error:
            self.workers.fail(error)
            raise

    def mark_ready(self) -> None:
        self.workers.send(_READY)
        self.workers.steady = True
        self.local.mark_ready()

    def rank_states(self) -> tuple[RankState, ...]:
        others = [
            replace(
                one.status or RankState(one.label, one.about, {}),
                device=one.label,
                heartbeat_age_s=one.silent_s,
            )
            for one in self.workers.states()
        ]
        return (*self.local.rank_states(), *others)

    def close(self) -> None:
        """End the workers, and disconnect this rank. No call may follow."""
        self._close()


def _or_error(work: Callable[[LocalExecutor], T], executor: LocalExecutor) -> T | Exception:
    """The result of `work`, or its error: an error of one rank must not end the others."""
    try:
        return work(executor)
    except (EngineDeadError, torch.AcceleratorError):
        raise
    except FinwhaleError as error:
        return error
    except Exception as error:
        logger.exception("a call of a rank failed")
        return RuntimeError(f"{type(error).__name__}: {first_line(error)}")  # can be pickled


class RanksResult:
    """The result of a step of all ranks (PendingResult)."""

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self.wait = wait


def _close(owner: int, workers: Workers, local: LocalExecutor) -> None:
    """End the workers, and close the rank of this process, unless that takes too long: its device
    may wait for a rank that is gone.

    The limit is longer if no rank has failed. A process that exits while NCCL is still closing may
    abort, after all its work succeeded.
    """
    if os.getpid() != owner:  # a forked process must not end the workers
        return
    workers.close()
    closing = threading.Thread(target=local.close, name="close", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # some versions of Python start no thread while they exit
        local.close()
    else:
        closing.join(CLOSE_S if workers.wait_failure(0.0) is None else FAILED_CLOSE_S)


def _limit_exit() -> None:
    """End the process by a signal if its exit takes longer than EXIT_S: the driver may wait for a
    device that never finishes.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_S)


def run_worker(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    """Open one rank in its process, and execute the plans that arrive."""
    owner.report(worker_messages.CONNECTING)
    store = join_store(address)
    owner.report(worker_messages.OPENING)
    executor = open_worker(Peers(owner.rank, store))
    results: SimpleQueue[StepTransfer | None] | None = None
    if executor.collectives.rank.data_parallel:
        results = SimpleQueue()
        start_in_thread("results", partial(_report_results, executor, owner, results))
    else:
        executor.transfer = lambda tensors: Transfer(())  # the engine reads the results of rank 0
    logger.info("%s holds %s", executor.description.device, executor.description.memory)
    owner.report(worker_messages.Opened(executor.description.memory))
    while True:
        message = owner.read()
        executor.check()
        kind, content = message[:1], memoryview(message)[1:]
        if kind == _EXECUTE:
            executor.execute(pickle.loads(content))
        elif kind == _SAMPLE:
            executor.sample(pickle.loads(content))
        elif kind == _COPY:
            executor.copy_pages(pickle.loads(content))
        elif kind == LANE_STEP:
            assert results is not None
            largest, plans = pickle.loads(content)
            pickled = plans[owner.rank.index - 1]
            plan = None if pickled is None else pickle.loads(pickled)
            results.put(executor.execute_lane(plan, largest))
        elif kind == LANE_SAMPLE:
            assert results is not None
            index, plan = pickle.loads(content)
            if index == owner.rank.index:
                results.put(executor.sample(plan))
        elif kind == LANE_COPY:
            index, copies = pickle.loads(content)
            if index == owner.rank.index:
                executor.copy_pages(copies)
        elif kind == _CALL:
            owner.report(worker_messages.Answer(pickle.dumps(pickle.loads(content)(executor), 5)))
        else:
            assert kind == _READY, kind
            executor.mark_ready()
            freeze_heap()
            owner.status = lambda: executor.rank_states()[0]


def _report_results(
    executor: LocalExecutor, owner: OwnerLink, results: "SimpleQueue[StepTransfer | None]"
) -> None:
    """Report a data-parallel rank's results, in order, when its device has finished them."""
    try:
        executor.runner.use_device()
        while True:
            pending = results.get()
            if pending is None:
                continue
            found = pending.wait()
            executor.check()  # a collective that gave up has computed nothing
            owner.report(worker_messages.LaneResults(pickle.dumps(found, 5)))
    except Exception as error:
        owner.report_failure(error)
