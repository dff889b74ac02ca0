"""Gets the processes of all ranks: spawned here, placed by torchrun, or started as Ray actors."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from finwhale.config import EngineConfig
from finwhale.distributed.hosts import RemoteProcesses, RemoteWorker, WorkerListener
from finwhale.distributed.peers import join_store, serve_store
from finwhale.distributed.rank import Placement, StoreAddress
from finwhale.distributed.workers import SpawnedProcesses, WorkerProcesses
from finwhale.engine.ranks.devices import device_kind
from finwhale.errors import FinwhaleError
from finwhale.extras import import_extra


@dataclass(frozen=True, slots=True)
class RankProcesses:
    """The processes of all ranks, of which this one has rank 0.

    Attributes:
        devices: the device of each rank.
        workers: the other ranks' processes.
        store: the key-value store that this process serves.
        address: where the other ranks reach the store.
    """

    devices: tuple[str, ...]
    workers: WorkerProcesses
    store: Store
    address: StoreAddress


def spawn(devices: Sequence[str]) -> RankProcesses:
    """Start a process on this host for each device but the first."""
    return RankProcesses(tuple(devices), SpawnedProcesses(devices[1:]), *serve_store())


def connect_launched(config: EngineConfig, placement: Placement) -> RankProcesses:
    """Connect to the processes that a launcher such as torchrun has placed.

    Raises:
        FinwhaleError: the options contradict the launcher, or a process does not connect.
    """
    if config.distributed_executor != "spawn":
        raise FinwhaleError(
            f"distributed_executor is {config.distributed_executor!r}, but torchrun has started "
            "this process: leave the option out"
        )
    kind = device_kind(config, placement.rank.size)
    store = join_store(placement.store, serves=placement.serves_store)
    listener = WorkerListener(placement.store.host)
    listener.publish(store)
    workers = listener.receive(placement.rank.size)
    devices, labels = _devices(kind, placement.local_index, workers)
    return RankProcesses(devices, RemoteProcesses(labels, workers), store, placement.store)


def on_ray(config: EngineConfig) -> RankProcesses:
    """Start one Ray actor for each GPU.

    Raises:
        FinwhaleError: ray is not installed, has too few GPUs, or an actor does not connect.
    """
    size = config.num_ranks
    if size in (None, 1):
        raise FinwhaleError(
            "distributed_executor 'ray' needs a tensor_parallel_size or data_parallel_size above 1"
        )
    assert size is not None
    kind = device_kind(config, size)
    actors = import_extra("finwhale.distributed.ray_actors").Actors(size, kind)
    try:
        store, address = serve_store(actors.host)
        listener = WorkerListener(actors.host)
        actors.work_for(listener.invitation)
        workers = listener.receive(size, actors.check)
    except BaseException:
        actors.close()
        raise
    devices, labels = _devices(kind, actors.local_index, workers)
    processes = RemoteProcesses(labels, workers, actors.close)
    return RankProcesses(devices, processes, store, address)


def _devices(
    kind: str, local_index: int, workers: Sequence[RemoteWorker]
) -> tuple[tuple[str, ...], list[str]]:
    """Returns the devices of all ranks, and a text for each rank after the first: its device and
    its host. `local_index` is the index of rank 0's device.
    """
    others = [worker.introduction for worker in workers]
    indices = [local_index, *(one.local_index for one in others)]
    devices = tuple("cpu" if kind == "cpu" else f"{kind}:{index}" for index in indices)
    return devices, [f"{d} of {one.host}" for d, one in zip(devices[1:], others, strict=True)]
