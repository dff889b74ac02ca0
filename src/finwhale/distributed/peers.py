"""Communication of the ranks of one model during their start, over torch's key-value store."""

import socket
import time
import zlib
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from finwhale.distributed.rank import ALONE, HOST, Rank, StoreAddress
from finwhale.errors import FinwhaleError, first_line

POLL_S = 0.002
CONNECT_S = 60.0


class Peers:
    """One rank's access to all ranks of its model.

    All ranks call the same methods in the same order.

    Args:
        store: a store that all ranks can reach; None: there is a single rank.

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
        return [int(text) for text in self.gather_text(str(value))]

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order. Waits for the slowest rank."""
        if self.store is None:
            return [text]
        self._calls += 1
        self.store.set(self._key(self.rank.index), text)
        found = []
        for index in range(self.rank.size):
            key = self._key(index)
            # Do not call `wait`: this process must notice that a rank has failed.
            while not self.store.check([key]):
                self.check()
                time.sleep(POLL_S)
            found.append(self.store.get(key).decode())
        return found

    def minimum(self, value: int) -> int:
        """The smallest value of all ranks."""
        return min(self.gather(value))

    def on_this_host(self) -> int:
        """Number of ranks on this host, with this rank."""
        host = zlib.crc32(socket.gethostname().encode())
        return self.gather(host).count(host)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.gather(0)

    def new_key(self, what: str) -> str:
        """A new key of the store, the same on all ranks."""
        self._calls += 1
        return f"finwhale.{what}/{self._calls}"

    def _key(self, index: int) -> str:
        return f"finwhale.peers/{self._calls}/{index}"


def join_store(
    address: StoreAddress, timeout_seconds: float = CONNECT_S / 2, *, serves: bool = False
) -> Store:
    """Connect to the store that another process serves, or serve it from this process.

    Raises:
        FinwhaleError: the store cannot be reached, or the port is in use.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if serves:
            store = _serve(address.host, address.port, timeout)
        else:
            store = TCPStore(address.host, address.port, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        where = f"{address.host} port {address.port}"
        raise FinwhaleError(
            f"cannot connect to the ranks' store on {where}: {first_line(error)}"
        ) from error
    return PrefixStore(address.prefix, store)


def serve_store(host: str = HOST) -> tuple[Store, StoreAddress]:
    """Serve a store from this process on a free port of `host`, its address for other ranks."""
    store = _serve(host, 0)
    address = StoreAddress(host, store.port)
    return PrefixStore(address.prefix, store), address


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens for ranks: on loopback if `host` names it, otherwise everywhere.

    Other names do not say where to listen: this host may resolve its own name to loopback.
    """
    if host == "localhost" or host.startswith("127."):
        return socket.create_server((HOST, port))
    everywhere = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if everywhere else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=everywhere)


def _serve(host: str, port: int, timeout: timedelta = timedelta(seconds=CONNECT_S)) -> TCPStore:
    """A store that this process serves. torch itself would listen everywhere."""
    listener = listen(host, port)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
