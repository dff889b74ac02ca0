"""Run ranks as threads of this process, with collectives over Gloo."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

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
    store = dist.HashStore()

    def run(index: int) -> T:
        return work(Gloo(Rank(index, size), store, TIMEOUT))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
