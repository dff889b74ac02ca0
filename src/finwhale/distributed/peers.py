"""What the ranks of one model tell each other while they start, over a store of torch's."""

import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from finwhale.distributed.rank import ALONE, Rank

HOST = "127.0.0.1"
POLL_S = 0.002
CONNECT_S = 60.0


class Peers:
    """The ranks of one model, as one of them sees them.

    All ranks call the same methods in the same order.

    Args:
        store: a store that all ranks reach; None: one rank alone.

    Attributes:
        check: called while this rank waits; it raises if another rank has failed.
    """

    def __init__(
        self,
        rank: Rank = ALONE,
        store: Store | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.store = rank, store
        self.check = check
        self._calls = 0

    def gather(self, value: int) -> list[int]:
        """Every rank's value, in rank order. Waits for the slowest rank."""
        if self.store is None:
            return [value]
        self._calls += 1
        self.store.set(self._key(self.rank.index), str(value))
        found = []
        for index in range(self.rank.size):
            key = self._key(index)
            # Not `wait`: this process must notice that a rank has failed.
            while not self.store.check([key]):
                self.check()
                time.sleep(POLL_S)
            found.append(int(self.store.get(key)))
        return found

    def least(self, value: int) -> int:
        """The smallest value of all ranks."""
        return min(self.gather(value))

    def meet(self) -> None:
        """Wait until every rank is here."""
        self.gather(0)

    def _key(self, index: int) -> str:
        return f"finwhale.peers/{self._calls}/{index}"


def host_store() -> TCPStore:
    """A store on a free port of the loopback interface, served by this process."""
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def join_store(port: int) -> TCPStore:
    """The store that another process of this host serves.

    Raises:
        RuntimeError: the port cannot be reached in CONNECT_S seconds.
    """
    timeout = timedelta(seconds=CONNECT_S / 2)
    return TCPStore(HOST, port, is_master=False, timeout=timeout, wait_for_workers=False)
