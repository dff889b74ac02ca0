"""Workers with faults: each function stands in for ranks.run_worker in a worker's process."""

import ctypes
import os
import random
import signal
import time
from typing import Any

from finwhale.distributed import worker
from finwhale.distributed.rank import StoreAddress
from finwhale.distributed.worker import OwnerLink
from finwhale.distributed.worker_messages import CONNECTING
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import OpenRank, run_worker
from finwhale.engine.start import startup
from finwhale.engine.steps.executor import StepTransfer
from finwhale.errors import OtherRankError


def wrong_clock(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    """The clocks jump, forwards and backwards, and the rank is slow."""
    draw = random.Random(0)
    time.time = time.monotonic = time.perf_counter = lambda: draw.uniform(-1e9, 1e9)
    read = owner.read

    def slow() -> bytes:
        message = read()
        time.sleep(draw.uniform(0, 0.01))
        return message

    owner.read = slow  # type: ignore[method-assign]
    run_worker(open_worker, address, owner)


def no_memory(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    def load(start: Any) -> None:
        raise RuntimeError("cannot allocate memory: tried to allocate 160 GB")

    startup._Start._load = load  # type: ignore[assignment, method-assign]
    run_worker(open_worker, address, owner)


def no_memory_told_last(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    """Rank 2 has no memory. The other ranks notice before it reports its error, and wait for it."""
    worker.CAUSE_S = 120.0

    def load(start: Any) -> None:
        if owner.rank.index != 2:
            raise OtherRankError("rank 2: cannot allocate memory")
        time.sleep(0.5)
        raise RuntimeError("cannot allocate memory: tried to allocate 160 GB")

    startup._Start._load = load  # type: ignore[assignment, method-assign]
    run_worker(open_worker, address, owner)


def not_connecting(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    owner.report(CONNECTING)
    time.sleep(1000)


def lost_result(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    """The device fails while it transfers a result, which only the results' thread notices."""

    def wait(result: StepTransfer) -> Any:
        raise RuntimeError("the device has failed")

    StepTransfer.wait = wait  # type: ignore[assignment, method-assign]
    run_worker(open_worker, address, owner)


def killed_told_last(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    """Rank 2 is killed in a step. Rank 1 has noticed before."""
    worker.CAUSE_S = 120.0

    def failing(executor: LocalExecutor, plan: Any) -> Any:
        if owner.rank.index == 1:
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    if owner.rank.index in (1, 2):
        LocalExecutor.execute = failing  # type: ignore[assignment, method-assign]
    run_worker(open_worker, address, owner)


def keeps_the_lock(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    """No thread of the rank runs Python any more. Its stderr is the file $STACKS."""
    os.dup2(os.open(os.environ["STACKS"], os.O_CREAT | os.O_WRONLY), 2)

    def _keep_the_lock(executor: LocalExecutor, plan: Any) -> Any:
        ctypes.PyDLL(None).sleep(1000)

    LocalExecutor.execute = _keep_the_lock  # type: ignore[assignment, method-assign]
    run_worker(open_worker, address, owner)


def no_memory_in_a_step(open_worker: OpenRank, address: StoreAddress, owner: OwnerLink) -> None:
    execute, steps = LocalExecutor.execute, []

    def failing(executor: LocalExecutor, plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == 3:
            raise MemoryError("no memory for the third step")
        return execute(executor, plan)

    LocalExecutor.execute = failing  # type: ignore[assignment, method-assign]
    run_worker(open_worker, address, owner)
