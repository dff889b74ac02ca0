"""Collectives over NCCL: between hosts, between GPUs without peer access, and of large messages."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from finwhale.distributed import ref
from finwhale.distributed.collectives import Collectives
from finwhale.distributed.rank import Rank


class FromZero(c10d.Store):
    """A store that renumbers torch's exchanges of symmetric memory from 0.

    torch counts exchanges per process, and the number is a part of the keys (`StoreExchange` in
    CUDASymmetricMemoryUtils.hpp). The process of rank 0 may have opened engines before, while the
    processes of other ranks are new, so their keys would differ.
    """

    def __init__(self, store: c10d.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        name, number, *rest = key.split("/")
        renumbered = self._numbers.setdefault(number, len(self._numbers))
        return "/".join((name, str(renumbered), *rest))

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


def new_group(
    rank: Rank,
    store: c10d.Store,
    name: str,
    timeout: timedelta,
    handle_store: c10d.Store | None = None,
) -> dist.ProcessGroup:
    """A process group over NCCL, also for symmetric memory. torch's default group stays unused.

    Args:
        name: equal on all ranks, and new in every process, because torch keeps state by name.
        handle_store: the store in which ranks exchange the handles of symmetric memory; None:
            `store`. `Nccl` keeps it; torch does not.
    """
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = c10d.ProcessGroupNCCL(store, rank.index, rank.size, options)
    backend._set_sequence_number_for_group()
    handle_store = handle_store or c10d.PrefixStore("symmetric", store)
    group = dist.ProcessGroup(handle_store, rank.index, rank.size)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    typed: Any = name
    group._set_group_name(typed)
    # Symmetric memory finds the group by its name and uses its store (torch 2.11), or finds the
    # arguments of set_group_info.
    c10d._register_process_group(typed, group)
    c10d._SymmetricMemory.set_group_info(name, rank.index, rank.size, handle_store)
    return group


class Nccl(Collectives):
    """Collectives over NCCL, whose watchdog ends the process if a rank is missing.

    Args:
        ordered: gather the x of all ranks, and sum in the order of the tree of pairs, in float32.
            Otherwise NCCL sums in an order that depends on the message size, and rounds each
            partial sum of bfloat16. All ranks still get the same bits, because NCCL computes each
            element of the sum once and distributes it.
        handle_store: that of `new_group`, kept for symmetric memory that is allocated later.
    """

    def __init__(
        self,
        rank: Rank,
        group: dist.ProcessGroup,
        *,
        ordered: bool = False,
        handle_store: c10d.Store | None = None,
    ) -> None:
        self.rank = rank
        self._group, self._ordered, self._handle_store = group, ordered, handle_store

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        if self._ordered:
            return ref.all_reduce(self._parts(x).unbind())
        total = x if overwrite else x.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = self._parts(x)
        return parts.flatten(0, 1) if dim == 0 else ref.all_gather(parts.unbind(), dim)

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        if self._ordered:
            return super().reduce_scatter_rows(x)
        count, own = self.rank.rows_per_rank(len(x)), self.rank.rows(len(x))
        total = x.new_empty((count, *x.shape[1:]))
        given = ref.padded(x, count * self.rank.size)
        dist.reduce_scatter_tensor(total, given, group=self._group)
        return total[: own.stop - own.start]

    def close(self) -> None:
        """End the process group. Waits for no other rank, but may wait for the GPU."""
        c10d._unregister_process_group(self._group.group_name)
        self._group.abort()  # `shutdown` would wait for the other ranks

    def _parts(self, x: Tensor) -> Tensor:
        """Gather the ranks' x: [size, ...]."""
        parts = x.new_empty((self.rank.size, *x.shape))
        dist.all_gather_into_tensor(parts, x, group=self._group)
        return parts
