"""The process group over which a trainer broadcasts weights to the ranks of engines.

The trainer is rank 0, and the ranks of the engines are the other members. The group is not part of
torch.distributed's state in the process. Its members find each other as in SGLang's
`init_custom_process_group`, which slime, verl and OpenRLHF have copied, so a trainer may use that
function or this module.
"""

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from finwhale.distributed.connect import NO_MULTICAST
from finwhale.distributed.threads import start_in_thread
from finwhale.errors import FinwhaleError
from finwhale.weights.group_defaults import GROUP_NAME, TIMEOUT_S, GroupBackend
from finwhale.weights.incoming import Announced

GRACE_S = 1.0  # time for a backend to report a timeout itself
ABORT_S = 10.0  # time for NCCL to end its kernels
# torch's threads that watch NCCL would end the process when a broadcast fails or the trainer is
# gone, but the engine must continue.
_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """The address and the properties of a group.

    Attributes:
        master_address, master_port: the TCP address on which rank 0, the trainer, listens.
        world_size: number of members: the trainer, and each rank of each engine.
        backend: "nccl" for tensors on GPUs, "gloo" for tensors on CPUs.
        timeout_seconds: time limit for the members to connect, and for each broadcast.
    """

    master_address: str
    master_port: int
    world_size: int
    backend: GroupBackend
    group_name: str = GROUP_NAME
    timeout_seconds: float = TIMEOUT_S


class WeightGroup:
    """One member of a group. The constructor waits for all members.

    Args:
        rank: 0 for the trainer.
        device: the device of this member's tensors; a GPU for "nccl", a CPU for "gloo".

    Raises:
        FinwhaleError: a member did not connect in time.
    """

    def __init__(self, address: GroupAddress, rank: int, device: torch.device) -> None:
        self.address, self.device = address, device
        seconds = address.timeout_seconds
        limit = timedelta(seconds=seconds)
        try:
            store: c10d.Store = c10d.TCPStore(
                address.master_address.strip("[]"),
                address.master_port,
                address.world_size,
                is_master=rank == 0,
                timeout=limit,
            )
            name = address.group_name
            device_type = "cuda" if address.backend == "nccl" else "cpu"
            for prefix in (name, f"{name}/", f"{device_type}/"):
                store = c10d.PrefixStore(prefix, store)
            self._backend = _open(address, store, rank, limit)
        except (RuntimeError, dist.DistError) as error:
            raise FinwhaleError(
                f"the group {address.group_name!r} at {address.master_address}:"
                f"{address.master_port} was not complete within {seconds:g} s: {_line(error)}"
            ) from error

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors in order, as rank 0. Returns when they have been sent.

        Raises:
            FinwhaleError: another member did not take part in time. The group is then closed.
        """
        self._broadcast([tensor.detach().to(self.device).contiguous() for tensor in tensors])

    def receive(self, announced: Sequence[Announced]) -> list[tuple[str, Tensor]]:
        """Receive the next tensors of rank 0, in its order.

        Raises:
            FinwhaleError: they did not arrive in time. The group is then closed.
        """
        received = [torch.empty(a.shape, dtype=a.dtype, device=self.device) for a in announced]
        self._broadcast(received)
        return [(one.name, tensor) for one, tensor in zip(announced, received, strict=True)]

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        if self.device.type == "cuda":
            # Another thread, on another CUDA stream, uses the tensors. And no kernel that waits for
            # another rank may run at the same time as NCCL's kernels.
            torch.cuda.synchronize(self.device)
        done = start_in_thread("broadcast", partial(self._exchange, tensors))
        try:
            done.result(self.address.timeout_seconds + GRACE_S)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, dist.DistError, TimeoutError) as error:
            self.close()  # also ends NCCL's kernel
            raise FinwhaleError(
                f"a broadcast in the group {self.address.group_name!r} failed (its time limit is "
                f"{self.address.timeout_seconds:g} s): {_line(error)}"
            ) from error

    def _exchange(self, tensors: Sequence[Tensor]) -> None:
        """The function of the broadcasting thread. If a member is gone, NCCL waits forever."""
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if self._backend is None:
            raise RuntimeError("the group is closed")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # Broadcast bytes, because no backend supports every dtype.
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        for work in [self._backend.broadcast([part], options) for part in parts]:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Leave the group. Other members get an error or a timeout at their next broadcast."""
        held, self._backend = [self._backend], None
        # While NCCL connects, `abort` may not return. Gloo's destructor waits for a broadcast.
        ending = threading.Thread(target=_abort, args=(held,), name="abort", daemon=True)
        ending.start()
        if self.address.backend == "nccl":
            ending.join(ABORT_S)


def _abort(held: list[Any]) -> None:
    """End the backend that the list holds, which has the only reference; None: it has ended."""
    backend = held.pop()
    with contextlib.suppress(RuntimeError, dist.DistError):
        if backend is not None:
            backend.abort()


def _open(address: GroupAddress, store: c10d.Store, rank: int, limit: timedelta) -> Any:
    if address.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        return gloo(store, rank, address.world_size, limit)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = 2 * limit + timedelta(minutes=1)  # later than the limits of this module
    os.environ.update(NO_MULTICAST)  # NCCL reads this when it connects, at the first broadcast
    with _environment(_NO_WATCHDOG):
        return c10d.ProcessGroupNCCL(store, rank, address.world_size, options)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _line(error: Exception) -> str:
    """The first line of an error, without Gloo's prefix of a source position.

    Gloo has several messages for a member that is gone, depending on when it notices.
    """
    line = str(error).strip().partition("\n")[0]
    if any(words in line for words in ("closed by peer", "reset by peer", "Broken pipe")):
        return "the connection to another member has ended"
    return re.sub(r"^\[\S+:\d+\] ", "", line) or type(error).__name__
