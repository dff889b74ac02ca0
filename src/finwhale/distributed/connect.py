"""Connects the ranks of a model: chooses the collectives, and checks them."""

import itertools
import json
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from finwhale.distributed.collectives import Alone, Collectives
from finwhale.distributed.cuda_ipc import IpcHandle, export_handle, open_buffer, uuid_of
from finwhale.distributed.gloo import Gloo
from finwhale.distributed.nccl import FromZero, Nccl, new_group
from finwhale.distributed.push_sizes import SIZES
from finwhale.distributed.rank import Rank
from finwhale.distributed.self_check import self_check
from finwhale.distributed.threads import start_in_thread
from finwhale.errors import FinwhaleError, first_line

if TYPE_CHECKING:
    from finwhale.distributed.push import Push

TIMEOUT = timedelta(seconds=60)
POLL_S = 0.01
# NVLink multicast hangs or fails on some hosts.
NO_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
T = TypeVar("T")
# Sends this rank's value of a name; returns the values of all ranks.
Exchange = Callable[[str, str], list[str]]
logger = logging.getLogger(__name__)
_connections = itertools.count()


def connect(
    rank: Rank,
    device: torch.device,
    store: Store,
    *,
    ordered: bool = False,
    timeout: timedelta = TIMEOUT,
    check: Callable[[], None] = lambda: None,
) -> Collectives:
    """Connect this rank with the others. Blocks until all ranks have called it.

    `Collectives.close` is the reverse. A process may connect several times.

    Args:
        device: the device of this rank; a GPU has an index.
        store: a store that all ranks can reach.
        ordered: sum in the order of the tree of pairs at every size (`batch_invariant`).
        check: called while this rank waits; it raises if another rank has failed.

    Raises:
        FinwhaleError: a rank did not connect in time, or failed the self-check. `timeout` applies
            to each of two phases: until all ranks have called this, and until they are connected.
    """
    if rank.size == 1:
        return Alone()
    os.environ.update(NO_MULTICAST)

    exchange = partial(_exchange, rank, store, timeout)

    def find() -> list[str]:
        return exchange("host", f"{socket.gethostname()} {device.index}")

    def work() -> Collectives:
        collectives = _choose(rank, device, store, exchange, locations, ordered, timeout)
        self_check(collectives, device)
        return collectives

    try:
        locations = _watched(find, check)
        return _watched(work, check, timeout)
    except TimeoutError as error:
        raise FinwhaleError(
            f"rank {rank.index} found the other ranks, but was not connected with them within "
            f"{timeout.total_seconds():.0f} s"
        ) from error
    except (RuntimeError, dist.DistError) as error:
        raise FinwhaleError(f"rank {rank.index} cannot connect: {first_line(error)}") from error


def _watched(
    work: Callable[[], T], check: Callable[[], None], timeout: timedelta | None = None
) -> T:
    """Call `work` on another thread, until `check` raises or the time is over (TimeoutError)."""
    done = start_in_thread("connect", work)
    # Count polls instead of reading a clock, because a rank's clock may be wrong.
    left = None if timeout is None else timeout.total_seconds() / POLL_S

    while not wait([done], POLL_S).done:
        check()
        if left is not None:
            left -= 1
            if left < 0:
                raise TimeoutError
    return done.result()


def _choose(
    rank: Rank,
    device: torch.device,
    store: Store,
    exchange: Exchange,
    locations: list[str],
    ordered: bool,
    timeout: timedelta,
) -> Collectives:
    networks = exchange("network", _network(rank))
    gloo = partial(Gloo, rank, store, timeout, loopback=len(set(networks)) == 1)
    if device.type == "cpu":
        return gloo()
    torch.cuda.set_device(device)
    if len(set(exchange("gpu", uuid_of(device)))) < rank.size:
        return _on_one_gpu(rank, device, exchange, gloo(), ordered)
    # torch finds a group by its name, which must be new in every process.
    number = next(_connections)
    name, *_ = exchange("name", f"finwhale-{os.getpid()}-{number}")
    handle_store: Store = PrefixStore("finwhale.symmetric", store)
    if number > 0:
        handle_store = FromZero(handle_store)
    group = new_group(rank, PrefixStore("finwhale.nccl", store), name, timeout, handle_store)
    nccl = Nccl(rank, group, ordered=ordered, handle_store=handle_store)
    nccl.all_reduce(torch.zeros(1, device=device))  # NCCL connects at its first call
    lacking = next(filter(None, exchange("access", _lacking_access(rank, device, locations))), None)
    if lacking is not None:
        if rank.index == 0:
            logger.warning("ranks communicate over NCCL: %s", lacking)
        return nccl
    return make_push(rank, device, group, nccl, ordered=ordered)


def _network(rank: Rank) -> str:
    """The name of the network of this process: equal names have one loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"unknown, of rank {rank.index}"


def _on_one_gpu(
    rank: Rank, device: torch.device, exchange: Exchange, gloo: Gloo, ordered: bool
) -> "Push":
    """Connect ranks that share a GPU, which NCCL refuses: for development, as they take turns."""
    from finwhale.distributed.push import Push

    if rank.index == 0:
        logger.warning("the ranks share a GPU and take turns on it, so every step is slow")

    def barrier() -> None:
        torch.cuda.synchronize(device)
        gloo.all_reduce(torch.zeros(1))

    memory = _shared_memory(rank, device, exchange)
    # Captured steps need kernels for every size.
    sizes = replace(SIZES[rank.size], nccl=2**62, gather=2**24)
    return Push(rank, device, memory, barrier, gloo, ordered=ordered, sizes=sizes)


def _shared_memory(
    rank: Rank, device: torch.device, exchange: Exchange
) -> Callable[[int], list[torch.Tensor]]:
    """A function that allocates memory which all ranks of the GPU map, over CUDA IPC.

    The other ranks' memory stays mapped as long as the function exists.
    """
    kept: list[torch.Tensor] = []
    number = itertools.count()

    def allocate(num_bytes: int) -> list[torch.Tensor]:
        own = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # One process may open a handle, so each other rank gets its own.
        given = [None if peer == rank.index else export_handle(own)[1] for peer in range(rank.size)]
        text = json.dumps([handle and handle.to_json() for handle in given])
        memories = []
        for peer, given_text in enumerate(exchange(f"memory-{next(number)}", text)):
            memory = own
            if peer != rank.index:
                handle = IpcHandle.from_json(json.loads(given_text)[rank.index])
                memory = open_buffer({uuid_of(device): handle}, device)
                kept.append(memory)
            memories.append(memory)
        return memories

    return allocate


def make_push(
    rank: Rank, device: torch.device, group: dist.ProcessGroup, nccl: Nccl, **options: Any
) -> "Push":
    """Make `Push` with options over symmetric memory. All ranks of `group` call this at once."""
    from finwhale.distributed.push import Push, symmetric_memory

    def barrier() -> None:
        nccl.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    return Push(rank, device, symmetric_memory(group, device), barrier, nccl, **options)


def _lacking_access(rank: Rank, device: torch.device, locations: list[str]) -> str:
    """Why this rank cannot write the memory of all others; empty if it can.

    Args:
        locations: of each rank: its host, a space, and the index of its device.
    """
    own_host = locations[rank.index].split()[0]
    for peer, location in enumerate(locations):
        host, index = location.split()
        if peer == rank.index:
            continue
        if host != own_host:
            return f"rank {rank.index} and rank {peer} are on different hosts"
        if not torch.cuda.can_device_access_peer(device.index, int(index)):
            return f"the GPU of rank {rank.index} has no peer access to that of rank {peer}"
    return ""


def _exchange(rank: Rank, store: Store, timeout: timedelta, what: str, value: str) -> list[str]:
    """The values of all ranks, in order."""
    store = PrefixStore(f"finwhale.{what}", store)
    store.set(str(rank.index), value)
    values = []
    for peer in range(rank.size):
        try:
            store.wait([str(peer)], timeout)
        except RuntimeError as error:
            raise FinwhaleError(
                f"rank {peer} did not connect within {timeout.total_seconds():.0f} s"
            ) from error
        values.append(store.get(str(peer)).decode())
    return values
