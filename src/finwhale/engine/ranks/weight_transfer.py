"""Receives new weights on one rank from a trainer: over a process group or over CUDA IPC.

The engine sends only names, dtypes and shapes to its ranks. Each rank receives the tensors itself,
and stages its part of them (staged_weights.py).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from finwhale.distributed.cuda_ipc import IpcHandle, open_buffer
from finwhale.engine.ranks.staged_weights import staged_weights_of, weight_form_of
from finwhale.errors import CheckpointError
from finwhale.weights.incoming import Announced
from finwhale.weights.weight_group import GroupAddress, WeightGroup

if TYPE_CHECKING:
    from finwhale.engine.ranks.local_executor import LocalExecutor

CPU = torch.device("cpu")


def start_join(executor: "LocalExecutor", *, address: GroupAddress, rank_offset: int) -> None:
    """Begin to become a member of a group, together with the trainer and all other ranks.

    Args:
        rank_offset: the number of this engine's rank 0 in the group.
    """
    device = executor.runner.device if address.backend == "nccl" else CPU
    rank = rank_offset + weight_form_of(executor).rank.index
    _start(executor, address.group_name, lambda: WeightGroup(address, rank, device))


def end_join(executor: "LocalExecutor", *, group_name: str) -> None:
    executor.groups[group_name] = executor.waiting.pop(group_name).result()


def _start(executor: "LocalExecutor", group_name: str, work: Callable[[], Any]) -> None:
    """Wait for other members on a thread: meanwhile the engine may be asked to give up.

    A thread that is given up ends after its time limit.
    """
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    executor.waiting[group_name] = done
    threading.Thread(target=run, name="weight-transfer", daemon=True).start()


def is_done(executor: "LocalExecutor", *, group_name: str) -> bool:
    """Whether this rank has finished its join or its transfer."""
    return bool(executor.waiting[group_name].done())


def leave_group(executor: "LocalExecutor", *, group_name: str) -> None:
    """Leave a group, or give up a wait for it. The other members may be gone."""
    executor.waiting.pop(group_name, None)
    group = executor.groups.pop(group_name, None)
    if group is not None:
        group.close()


def announce(executor: "LocalExecutor", *, tensors: Sequence[Announced], last: bool) -> None:
    """Check tensors before they arrive (StagedWeights.announce)."""
    staged_weights_of(executor).announce(tensors, last=last)


def start_receive(
    executor: "LocalExecutor", *, group_name: str, tensors: Sequence[Announced]
) -> None:
    """Begin to receive tensors that the trainer broadcasts."""
    group = executor.groups[group_name]
    _start(executor, group_name, lambda: group.receive(tensors))


def end_receive(executor: "LocalExecutor", *, group_name: str) -> None:
    """Stage the received tensors."""
    staged_weights_of(executor).add(executor.waiting.pop(group_name).result())


def read_buffer(
    executor: "LocalExecutor", *, handles: Mapping[str, IpcHandle], tensors: Sequence[Announced]
) -> None:
    """Read tensors from a buffer of another process on this rank's GPU, and stage them.

    Args:
        handles: a handle for each GPU, by its UUID. All buffers have the same contents.
        tensors: the tensors in the buffer, one after the other.
    """
    staged, device = staged_weights_of(executor), executor.runner.device
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
