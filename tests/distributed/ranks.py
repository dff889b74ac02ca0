"""Run ranks as threads of this process, with collectives over Gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from finwhale.distributed.collectives import Collectives
from finwhale.distributed.gloo import Gloo
from finwhale.distributed.rank import Rank

TIMEOUT = timedelta(seconds=60)
T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Collectives], T]) -> list[T]:
    """Call `work` on every rank at once, with the rank's collectives.

    Returns:
        The ranks' results, in order. If ranks raise, the first one's error is raised.
    """
    store = HashStore()

    # A rank without work would otherwise disconnect while another one still connects.
    connected: list[Gloo] = []

    def run(index: int) -> T:
        gloo = Gloo(Rank(index, size), store, TIMEOUT)
        connected.append(gloo)
        return work(gloo)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
