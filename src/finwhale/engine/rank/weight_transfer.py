"""Receives new weights on one rank from a trainer: over a process group or over CUDA IPC.

The engine sends only names, dtypes and shapes to its ranks. Each rank receives the tensors itself,
and stages its part of them (staged_weights.py).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from finwhale.checkpoint.incoming import Announced
from finwhale.distributed.cuda_ipc import IpcHandle, open_buffer
from finwhale.distributed.weight_group import GroupAddress, WeightGroup
from finwhale.engine.rank.staged_weights import loader_of, staged_weights_of
from finwhale.errors import CheckpointError

if TYPE_CHECKING:
    from finwhale.engine.rank.executor import LocalExecutor

CPU = torch.device("cpu")


def join_group(executor: "LocalExecutor", *, address: GroupAddress, rank_offset: int) -> None:
    """Become a member of a group, together with the trainer and all other ranks.

    Args:
        rank_offset: the number of this engine's rank 0 in the group.
    """
    loader = loader_of(executor)
    device = loader.device if address.backend == "nccl" else CPU
    group = WeightGroup(address, rank_offset + loader.rank.index, device)
    executor.groups[address.group_name] = group


def leave_group(executor: "LocalExecutor", *, group_name: str) -> None:
    """Leave a group. The other members may be gone."""
    group = executor.groups.pop(group_name, None)
    if group is not None:
        group.close()


def announce(executor: "LocalExecutor", *, tensors: Sequence[Announced], last: bool) -> None:
    """Check tensors before they arrive (StagedWeights.announce)."""
    staged_weights_of(executor).announce(tensors, last=last)


def receive(executor: "LocalExecutor", *, group_name: str, tensors: Sequence[Announced]) -> None:
    """Receive tensors that the trainer broadcasts, and stage them."""
    staged_weights_of(executor).add(executor.groups[group_name].receive(tensors))


def read_buffer(
    executor: "LocalExecutor", *, handles: Mapping[str, IpcHandle], tensors: Sequence[Announced]
) -> None:
    """Read tensors from a buffer of another process on this rank's GPU, and stage them.

    Args:
        handles: a handle for each GPU, by its UUID. All buffers have the same contents.
        tensors: the tensors in the buffer, one after the other.
    """
    staged, device = staged_weights_of(executor), loader_of(executor).device
    buffer = open_buffer(handles, device)
    total = sum(one.nbytes for one in tensors)
    if buffer.nbytes < total:
        raise CheckpointError(
            f"the buffer has {buffer.nbytes} bytes, fewer than the {total} of its tensors"
        )
    start = 0
    for one in tensors:
        end = start + one.nbytes
        staged.add([(one.name, _tensor(buffer[start:end], one))])
        start = end
    if device.type == "cuda":
        # The owner may overwrite the buffer once it has an answer.
        torch.cuda.synchronize(device)


def _tensor(data: Tensor, announced: Announced) -> Tensor:
    """A copy of the tensor in some bytes of a buffer, which may not be aligned."""
    return data.clone().view(announced.dtype).view(announced.shape)
