"""Brings new weights to one rank from a trainer: over a process group or over CUDA IPC.

Only names, dtypes and shapes travel with the work that the engine sends to its ranks. Each rank
receives the tensors itself, and stages its part of them (weight_update.py).
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
        rank_offset: the member that rank 0 of this engine is.
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
    """Check tensors before they come (WeightUpdate.announce)."""

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
        handles: handles by the UUID of their GPU. The buffers have the same bytes.
        tensors: lie one after the other in the buffer.
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
            # The owner may fill the buffer again once it has an answer.
            torch.cuda.synchronize(device)


def _tensor(data: Tensor, announced: Announced) -> Tensor:
    """The tensor in some bytes of a buffer. A copy, because they may not be aligned."""
    return data.clone().view(announced.dtype).view(announced.shape)
