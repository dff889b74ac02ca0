"""Trainers that broadcast weights over a process group, for tests."""

import socket
import threading
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from finwhale.engine.loop.weight_updates import BroadcastTensors

HOST = "127.0.0.1"


def free_port() -> int:
    """Returns the number of a port on which no program listens. One may begin to at any time."""
    with listening() as listener:
        return port_of(listener)


def listening() -> socket.socket:
    """Returns a socket that listens on an unused port."""
    return socket.create_server((HOST, 0))


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def described(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[Any]]:
    """The names, dtypes and shapes of tensors."""
    items = list(tensors)
    return {
        "names": [name for name, _ in items],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in items],
        "shapes": [list(tensor.shape) for _, tensor in items],
    }


def broadcast_of(
    tensors: Iterable[tuple[str, Tensor]], group_name: str = "trainer"
) -> BroadcastTensors:
    return BroadcastTensors(**described(tensors), group_name=group_name)


class TorchTrainer:
    """Rank 0 of a group, made as slime's and SGLang's trainers make it.

    They name a port; here the store gets a socket that has one already.
    """

    def __init__(
        self, listener: socket.socket, world_size: int, group_name: str, seconds: float
    ) -> None:
        timeout = timedelta(seconds=seconds)
        store = TCPStore(
            HOST,
            port_of(listener),
            world_size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
        self.group: Any
        self.group, _ = c10d._new_process_group_helper(
            world_size,
            0,
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(group_name, store),
            group_name=group_name,  # type: ignore[arg-type]
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self.group] = {i: i for i in range(world_size)}

    def send(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            data = tensor.reshape(-1).view(torch.uint8)  # Gloo does not know every dtype
            dist.broadcast(data, 0, group=self.group)

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


class InThread:
    """A function that runs in a thread; `end` waits for it, and raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except BaseException as error:
            traceback.print_exc()  # the engine may fail first, and hide this error
            self._error = error

    def end(self, seconds: float = 120) -> Any:
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self.result
