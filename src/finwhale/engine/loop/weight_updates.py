"""Updates an engine's weights: from tensors, a directory, a process group or CUDA IPC."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from finwhale.checkpoint.stored import DTYPE_NAMES
from finwhale.distributed.cuda_ipc import IpcHandle
from finwhale.engine.loop.control import change_weights, check_weights_can_change, no_steps
from finwhale.engine.loop.engine import Engine
from finwhale.engine.ranks.local_executor import on_weights
from finwhale.engine.ranks.rank_weights import RankWeights
from finwhale.errors import EngineDeadError, RequestError
from finwhale.request import Requests
from finwhale.weights.group_defaults import GROUP_NAME, TIMEOUT_S, GroupBackend
from finwhale.weights.incoming import Announced
from finwhale.weights.weight_group import GroupAddress

NamedTensors = Iterable[tuple[str, Tensor]]

# Tensors are sent to the processes of other ranks, and received from a trainer, in messages of at
# most this size, or one tensor. Steps run between the messages.
BUCKET_BYTES = 2**28
LATE_S = 5.0  # time for torch to report that a time limit is over

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastTensors:
    """Tensors that a trainer broadcasts over a group, in this order.

    Attributes:
        names, dtypes, shapes: one entry for each tensor; a dtype is a name such as "bfloat16".
        group_name: a group that the engine has joined (`init_weights_update_group`).
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    group_name: str = GROUP_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensors:
    """Tensors in a buffer on each GPU of the engine, one after the other.

    Attributes:
        names, dtypes, shapes: one entry for each tensor; a dtype is a name such as "bfloat16".
        handles: a handle of each buffer (distributed/cuda_ipc.py) by the UUID of its GPU.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    handles: Mapping[str, IpcHandle]


T = TypeVar("T")
WeightsSource = str | Path | NamedTensors | BroadcastTensors | SharedTensors


class WeightUpdates:
    """Updates the weights of one engine, one update at a time. Several threads may call it.

    Attributes:
        version: the name of the current weights: the last update's `version`, or its number.
        begun: whether an update has begun and neither succeeded nor failed.
        cancelled: set it to end a call that waits for a trainer.
    """

    def __init__(self, engine: Engine) -> None:
        self.version = "0"
        self.begun = False
        self.cancelled = threading.Event()
        self._engine = engine
        self._count = 0
        self._next_version: str | None = None
        self._partial = False
        self._groups: dict[str, GroupAddress] = {}
        self._lock = threading.Lock()

    def join(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int = 1,
        world_size: int | None = None,
        group_name: str = GROUP_NAME,
        backend: GroupBackend | None = None,
        timeout_seconds: float = TIMEOUT_S,
    ) -> None:
        """Join a group with a trainer (LLM.init_weights_update_group)."""
        rank = self._engine.executor.description
        native: GroupBackend = "gloo" if rank.device.startswith("cpu") else "nccl"
        if backend == "nccl" and native == "gloo":
            raise RequestError('the backend "nccl" needs GPUs: use "gloo"')
        if group_name in self._groups:
            raise RequestError(f"the engine is in a group {group_name!r} already: destroy it first")
        last = rank_offset + rank.num_ranks
        world_size = last if world_size is None else world_size
        if rank_offset < 1 or last > world_size:
            raise RequestError(
                f"{rank.num_ranks} ranks from rank_offset {rank_offset} do not fit a group of "
                f"world_size {world_size}, in which the trainer is rank 0"
            )
        if not 0 < timeout_seconds <= 86_400:
            raise RequestError(
                f"timeout_seconds must be above 0 and at most 86400, got {timeout_seconds}"
            )
        address = GroupAddress(
            master_address=master_address,
            master_port=master_port,
            world_size=world_size,
            backend=backend or native,
            group_name=group_name,
            timeout_seconds=timeout_seconds,
        )
        try:
            self._call(RankWeights.start_join, address=address, rank_offset=rank_offset)
            self._wait(address)
            self._call(RankWeights.end_join, group_name=group_name)
        except EngineDeadError:
            raise
        except BaseException:
            self._call(RankWeights.leave, group_name=group_name)
            raise
        self._groups[group_name] = address

    def leave(self, group_name: str = GROUP_NAME) -> None:
        """Leave a group. Raises RequestError if the engine is not in it."""
        if group_name not in self._groups:
            raise RequestError(f"the engine is in no group {group_name!r}")
        del self._groups[group_name]
        self._call(RankWeights.leave, group_name=group_name)

    def _wait(self, group: GroupAddress) -> None:
        """Wait until every rank has joined or failed. The engine continues meanwhile.

        Raises:
            RequestError: the call was cancelled, or torch has not kept the group's time limit.
        """
        seconds, left = 0.001, group.timeout_seconds + LATE_S
        while not all(self._call(RankWeights.is_done, group_name=group.group_name)):
            if self.cancelled.wait(seconds):
                raise RequestError("the call was cancelled")
            left -= seconds
            if left < 0:
                raise RequestError(
                    f"the trainer of the group {group.group_name!r} has not answered within "
                    f"{group.timeout_seconds:g} s"
                )
            seconds = min(2 * seconds, 0.05)

    def _call(self, method: Callable[..., T], **arguments: Any) -> list[T]:
        return self._engine.call_ranks(functools.partial(on_weights, method, **arguments))

    def update(
        self,
        source: WeightsSource,
        *,
        partial: bool = False,
        requests: Requests = "recompute",
        version: str | None = None,
    ) -> None:
        """Replace the weights (LLM.update_weights)."""
        if partial and isinstance(source, str | Path):
            raise RequestError("a directory holds all weights: leave out partial")
        check_weights_can_change(self._engine, partial=partial, requests=requests)
        self.begin(partial=partial)
        self._add(source, last=True)
        self.finish(requests=requests, version=version)

    def begin(self, *, partial: bool = False) -> None:
        """Begin an update: then `add` stages weights, and `finish` writes them.

        Raises:
            RequestError: another update has begun, or the weights cannot be written now.
            ResourceError: the host has too little memory to stage the weights.
        """
        check_weights_can_change(self._engine, partial=partial)
        with self._lock:
            if self.begun:
                raise RequestError("another update of the weights has begun: finish it first")
            self.begun = True
            self._next_version, self._partial = None, partial
        try:
            self._call(RankWeights.begin, partial=partial)
        except BaseException as error:
            self._discard(error)
            raise

    def add(self, source: WeightsSource, *, version: str | None = None) -> None:
        """Stage weights of an update that has begun. If this fails, the update ends.

        Args:
            version: the name of the new weights, unless `finish` gets another one.
        """
        self._add(source, last=False)
        self._next_version = version or self._next_version

    def finish(self, *, requests: Requests = "recompute", version: str | None = None) -> None:
        """Write the staged weights.

        If a rank cannot complete its staged weights, the old ones stay, and the update ends.

        Raises:
            RequestError: no update has begun, the weights are asleep, or `requests` is unknown. An
                update that has begun goes on. A partial update ends if the weights have been
                dropped since it began.
            EngineDeadError: a rank failed while it wrote the weights. The engine has ended, because
                only some of the weights may be new.
        """
        self._check_begun()
        check_weights_can_change(self._engine, requests=requests)
        try:
            self._call(RankWeights.prepare)
            commit = functools.partial(on_weights, RankWeights.commit)
            change_weights(self._engine, commit, requests, partial=self._partial)
        except BaseException as error:
            self._discard(error)
            raise
        self.begun = False
        self._count += 1
        self.version = version or self._next_version or str(self._count)

    def discard(self) -> None:
        """Drop an update that has begun; do nothing if there is none."""
        if self.begun:
            self._discard(None)

    def _check_begun(self) -> None:
        if not self.begun:
            raise RequestError("no update of the weights has begun, or it has failed")

    def _add(self, source: WeightsSource, *, last: bool) -> None:
        """Stage weights. `last`: the update has no others."""
        self._check_begun()
        try:
            if isinstance(source, str | Path):
                self._call(RankWeights.stage_checkpoint, path=Path(source))
            elif isinstance(source, BroadcastTensors):
                self._receive(source, last)
            elif isinstance(source, SharedTensors):
                tensors = self._announce(source, last)
                self._call(RankWeights.read_buffer, handles=dict(source.handles), tensors=tensors)
            else:
                self._stage(source)
        except BaseException as error:
            self._discard(error)
            raise

    def _stage(self, tensors: NamedTensors) -> None:
        if self._engine.executor.description.num_ranks == 1:
            # The only rank is this process. It gets each tensor at once, without a copy.
            for pair in _named(tensors):
                self._call(RankWeights.stage, tensors=[pair])
            return
        for message in _messages(map(_as_bytes, _named(tensors)), lambda one: one[0]):
            self._call(RankWeights.stage_bytes, tensors=message)

    def _receive(self, source: BroadcastTensors, last: bool) -> None:
        name = source.group_name
        if name not in self._groups:
            raise RequestError(
                f"the engine is in no group {name!r}: a failed update closes the group"
            )
        try:
            for piece in _messages(self._announce(source, last), lambda one: one):
                # No kernel that waits for another rank may run beside NCCL's.
                with no_steps(self._engine):
                    self._call(RankWeights.start_receive, group_name=name, tensors=piece)
                    self._wait(self._groups[name])
                    self._call(RankWeights.end_receive, group_name=name)
        except EngineDeadError:
            raise
        except BaseException:
            # Otherwise the engine would take the trainer's next broadcast for a missed one.
            self.leave(name)
            raise

    def _announce(self, source: BroadcastTensors | SharedTensors, last: bool) -> list[Announced]:
        """Let all ranks check the tensors of a source before they arrive; returns them."""
        tensors = _announced(source)
        self._call(RankWeights.announce, tensors=tensors, last=last)
        return tensors

    def _discard(self, error: BaseException | None) -> None:
        try:
            if not isinstance(error, EngineDeadError):
                self._call(RankWeights.discard)
        finally:
            self.begun = False  # Not before: another thread's update must not be discarded.


def _announced(source: BroadcastTensors | SharedTensors) -> list[Announced]:
    """The tensors of a source. Raises RequestError."""
    names, dtypes, shapes = source.names, source.dtypes, source.shapes
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            f"there are {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes"
        )
    unknown = set(dtypes) - set(_DTYPES)
    if unknown:
        raise RequestError(f"the dtype {min(unknown)} is none of {', '.join(_DTYPES)}")
    return [
        Announced(name, _DTYPES[dtype], tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _named(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The pairs of a name and a tensor. Raises RequestError if there is anything else."""
    for item in tensors:
        match item:
            case (str() as name, Tensor() as tensor):
                yield name, tensor.detach()
            case _:
                raise RequestError("the weights must be pairs of a name and a tensor")


def _as_bytes(pair: tuple[str, Tensor]) -> tuple[Announced, Tensor]:
    """A copy of a tensor's bytes for a message. torch cannot unpickle FP8.

    A message contains the whole memory of which a tensor may be a part, and the sender may reuse
    that memory for the next tensor.
    """
    name, tensor = pair
    copied = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    form = Announced(name, tensor.dtype, tuple(tensor.shape))
    return form, copied.reshape(-1).view(torch.uint8)


def _messages(items: Iterable[T], announced: Callable[[T], Announced]) -> Iterator[list[T]]:
    """Split tensors into messages of at most BUCKET_BYTES or one tensor, in order."""
    message: list[T] = []
    size = 0
    for item in items:
        num_bytes = announced(item).nbytes
        if message and size + num_bytes > BUCKET_BYTES:
            yield message
            message, size = [], 0
        message.append(item)
        size += num_bytes
    if message:
        yield message
