"""Checks that weights and cache fit the memory and the disk before the rank fills them."""

import os
import shutil
from pathlib import Path

from finwhale.errors import ResourceError
from finwhale.platform import available_memory


def check_host_memory(
    num_bytes: int,
    what: str = "on a CPU the weights",
    remedy: str = "`finwhale inspect` says which GPUs hold the model",
) -> None:
    """Check that weights fit the host's free memory. Otherwise the system would kill the process.

    Raises:
        ResourceError: they do not fit. The message names `what` and the remedy.
    """
    free = available_memory()
    if free is not None:
        check_room(num_bytes, free, what, "memory are free", remedy)


def check_disk(folder: str | Path, num_bytes: float, what: str, remedy: str) -> None:
    """Check that a folder's disk has room.

    Raises:
        ResourceError: it has not. The message names `what` and the remedy.
    """
    check_room(num_bytes, shutil.disk_usage(folder).free, what, f"{folder} are free", remedy)


def check_gpu_memory(weights: int, room: int, num_ranks: int) -> None:
    """Check that a rank's weights fit its GPU. Otherwise the start would fail after reading them.

    Args:
        weights, room: bytes of the rank's weights, and bytes of its GPU that it may use.

    Raises:
        ResourceError: they do not fit.
    """
    whose = "the weights" if num_ranks == 1 else f"the weights of each of {num_ranks} ranks"
    remedy = (
        "use more GPUs (tensor_parallel_size), or raise gpu_memory_utilization; `finwhale inspect` "
        "says which GPUs hold the model"
    )
    check_room(weights, room, whose, "the GPU may be used", remedy)


def check_cache_memory(num_bytes: int) -> None:
    """Check that a cache on a CPU fits the machine's memory. The allocation might succeed, but its
    use would end the process.

    Raises:
        ResourceError: it does not fit.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory:
        raise ResourceError(
            f"the cache would take {num_bytes:,} bytes, but this machine has {memory:,} bytes of "
            "memory: lower cache_memory_bytes"
        )


def check_room(num_bytes: float, room: int, what: str, location: str, remedy: str) -> None:
    """Check that `what` (plural) fits the room (bytes) at a location. Raises ResourceError."""
    if num_bytes > room:
        raise ResourceError(
            f"{what} take {num_bytes / 1e9:,.1f} GB, and {room / 1e9:,.1f} GB of {location}: "
            f"{remedy}"
        )
