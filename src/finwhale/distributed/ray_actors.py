"""Ranks as Ray actors, one for each GPU of a placement group. Needs the extra `ray`."""

import os

from finwhale.distributed.hosts import Invitation, work_for
from finwhale.distributed.rank import Rank
from finwhale.distributed.workers import CONNECT_S
from finwhale.errors import FinwhaleError
from finwhale.extras import named_extras

with named_extras():
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Actors:
    """The actors of `size` ranks. Rank 0 is this process; its actor only reserves its GPU.

    The constructor connects to the cluster that RAY_ADDRESS names or that runs on this host;
    otherwise Ray starts a cluster of this host.

    Args:
        kind: the kind of device of each rank. A rank on a "cpu" takes one of Ray's CPUs.

    Attributes:
        host: the address of this host, as the other hosts reach it.
        local_index: the index of rank 0's GPU on this host.

    Raises:
        FinwhaleError: the cluster has too few free GPUs, or an actor fails. The placement group is
            removed.
    """

    def __init__(self, size: int, kind: str) -> None:
        try:
            if not ray.is_initialized():
                ray.init()
        except (RayError, ConnectionError) as error:
            raise FinwhaleError(f"cannot connect to Ray: {error}") from error
        self.host = get_node_ip_address()
        resource = "CPU" if kind == "cpu" else "GPU"
        bundles = [{resource: 1.0} for _ in range(size)]
        bundles[0][f"node:{self.host}"] = 0.001  # on this host
        self._group = placement_group(bundles, strategy="PACK")
        try:
            self._start(bundles, resource)
        except BaseException:
            self.close()
            raise
        self._working: list[ray.ObjectRef[None]] = []

    def _start(self, bundles: list[dict[str, float]], resource: str) -> None:
        """Start the actors. Raises FinwhaleError."""
        try:
            ray.get(self._group.ready(), timeout=CONNECT_S)
            actor = ray.remote(_Actor)
            self._actors = [
                actor.options(
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                ).remote()
                for index, bundle in enumerate(bundles)
            ]
            self.local_index = ray.get(self._actors[0].local_index.remote(), timeout=CONNECT_S)
        except GetTimeoutError as error:
            raise FinwhaleError(
                f"Ray has not placed the ranks within {CONNECT_S:.0f} s: they need {len(bundles)} "
                f"{resource}s, one of them on this host"
            ) from error
        except RayError as error:
            raise FinwhaleError(f"Ray cannot start the ranks: {_reason(error)}") from error

    def work_for(self, invitation: Invitation) -> None:
        """Let each actor but the first run its rank."""
        size = len(self._actors)
        self._working = [
            actor.work_for.remote(invitation, Rank(index, size))
            for index, actor in enumerate(self._actors[1:], 1)
        ]

    def check(self) -> None:
        """Raise FinwhaleError if an actor has ended."""
        ended, _ = ray.wait(self._working, timeout=0)
        for reference in ended:
            try:
                ray.get(reference)
            except RayError as error:
                rank = 1 + self._working.index(reference)
                raise FinwhaleError(f"rank {rank}, an actor of Ray: {_reason(error)}") from error

    def close(self) -> None:
        """Free the GPUs, and end the remaining actors."""
        remove_placement_group(self._group)


def _reason(error: RayError) -> str:
    """The last line of an error, after the traceback of the actor."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()


class _Actor:
    def local_index(self) -> int:
        """The number of this actor's GPU on its host."""
        gpus = ray.get_gpu_ids()
        if not gpus:
            return 0
        # Ranks of one host write each other's memory, so each must see all GPUs. Nothing has used
        # CUDA in this process yet.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        return int(gpus[0])

    def work_for(self, invitation: Invitation, rank: Rank) -> None:
        work_for(invitation, rank, self.local_index())
