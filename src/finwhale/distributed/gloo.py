"""Collectives over torch's Gloo backend: of ranks on CPUs, and of ranks that share a GPU.

For tests and development: every call copies the tensors of all ranks to each rank, those of a GPU
by way of the host. A CUDA graph cannot capture such a call.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from finwhale.distributed import ref
from finwhale.distributed.collectives import Collectives
from finwhale.distributed.rank import HOST, Rank

TIMEOUT = timedelta(seconds=60)


class Gloo(Collectives):
    """Collectives over a Gloo backend that this object owns. Every call raises its own error.

    Args:
        store: a store that all ranks can reach. Ranks of one process can share a `HashStore`.
        timeout: a call raises RuntimeError if another rank has not made it within this time.
        loopback: all ranks are on one host, so listen on its loopback address only. Otherwise Gloo
            listens on the address of the host's name.

    Raises:
        RuntimeError: a rank did not connect in time.
    """

    beside_bytes = 0  # It waits for every exchange, but models call it as they call `Push`.

    def __init__(
        self, rank: Rank, store: Store, timeout: timedelta = TIMEOUT, *, loopback: bool = False
    ) -> None:
        self.rank = rank
        store = PrefixStore("finwhale.gloo", store)
        backend: Any = dist.ProcessGroupGloo
        settings: Any = timeout
        if loopback:
            settings = backend._Options()
            settings._timeout = timeout
            settings._devices = [backend.create_device(hostname=HOST)]
        self._group = backend(store, rank.index, rank.size, settings)

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        return ref.all_reduce(self._parts(x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return ref.all_gather(self._parts(x), dim)

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Gather the ranks' x, as bytes, because Gloo does not support every dtype."""
        sent = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.rank.size)]
        if sent.numel() > 0:
            self._group.allgather([received], [sent]).wait()
        return [part.view(x.dtype).reshape(x.shape).to(x.device) for part in received]
