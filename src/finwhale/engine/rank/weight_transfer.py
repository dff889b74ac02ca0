"""Receives new weights on one rank from a trainer: over a process group or over CUDA IPC.

The engine sends only names, dtypes and shapes to its ranks. Each rank receives the tensors itself,
and stages its part of them (weight_update.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finwhale.checkpoint.incoming import Announced
from finwhale.distributed.cuda_ipc import IpcHandle, open_buffer
from finwhale.distributed.weight_group import GroupAddress, WeightGroup
from finwhale.engine.rank.weight_update import loader_of, update_of
from finwhale.errors import CheckpointError

if TYPE_CHECKING:
    from finwhale.engine.rank.executor import LocalExecutor

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member of a group, together with the trainer and all other ranks.

    Attributes:
        rank_offset: the number of this engine's rank 0 in the group.
    """

    address: GroupAddress
    rank_offset: int

    def __call__(self, executor: "LocalExecutor") -> None:
        loader = loader_of(executor)
        device = loader.device if self.address.backend == "nccl" else CPU
        group = WeightGroup(self.address, self.rank_offset + loader.rank.index, device)
        executor.groups[self.address.group_name] = group


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave a group. The other members may be gone."""

    group_name: str

    def __call__(self, executor: "LocalExecutor") -> None:
        group = executor.groups.pop(self.group_name, None)
        if group is not None:
            group.close()


@dataclass(frozen=True, slots=True)
class Announce:
    """Check tensors before they arrive (WeightUpdate.announce)."""

    tensors: Sequence[Announced]
    last: bool

    def __call__(self, executor: "LocalExecutor") -> None:
        update_of(executor).announce(self.tensors, last=self.last)


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive tensors that the trainer broadcasts, and stage them."""

    group_name: str
    tensors: Sequence[Announced]

    def __call__(self, executor: "LocalExecutor") -> None:
        update = update_of(executor)
        update.add(executor.groups[self.group_name].receive(self.tensors))


@dataclass(frozen=True, slots=True)
class Open:
    """Read tensors from a buffer of another process on this rank's GPU, and stage them.

    Attributes:
        handles: a handle for each GPU, by its UUID. All buffers have the same contents.
        tensors: the tensors in the buffer, one after the other.
    """

    handles: Mapping[str, IpcHandle]
    tensors: Sequence[Announced]

    def __call__(self, executor: "LocalExecutor") -> None:
        update, device = update_of(executor), loader_of(executor).device
        buffer = open_buffer(self.handles, device)
        total = sum(one.nbytes for one in self.tensors)
        if buffer.nbytes < total:
            raise CheckpointError(
                f"the buffer has {buffer.nbytes} bytes, fewer than the {total} of its tensors"
            )
        start = 0
        for one in self.tensors:
            end = start + one.nbytes
            update.add([(one.name, _tensor(buffer[start:end], one))])
            start = end
        if device.type == "cuda":
            # The owner may overwrite the buffer once it has an answer.
            torch.cuda.synchronize(device)


def _tensor(data: Tensor, announced: Announced) -> Tensor:
    """A copy of the tensor in some bytes of a buffer, which may not be aligned."""
    return data.clone().view(announced.dtype).view(announced.shape)
