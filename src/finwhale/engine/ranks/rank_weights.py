"""One rank's part in updates of its weights: what the engine calls on every rank between steps.

The engine sends only names, dtypes and shapes of the tensors that a trainer has: over a process
group, or in a buffer of CUDA IPC. Each rank receives the tensors itself, and stages its part of
them (staged_weights.py).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.distributed.cuda_ipc import IpcHandle, open_buffer
from finwhale.distributed.threads import start_in_thread
from finwhale.engine.ranks.staged_weights import StagedWeights
from finwhale.errors import CheckpointError, FinwhaleError
from finwhale.models.protocol import Model
from finwhale.weights.allocation import WeightForm
from finwhale.weights.incoming import Announced
from finwhale.weights.weight_group import GroupAddress, WeightGroup


class RankWeights:
    """The updates of one rank's weights.

    Args:
        form: how the rank holds its weights; None: they cannot be replaced.
        ranks_on_host: number of ranks on this host, with this rank.

    Attributes:
        staged: the new weights of an update that has begun; None: none has begun.
        groups: the process groups over which trainers send weights, by name.
    """

    def __init__(self, model: Model, form: WeightForm | None, ranks_on_host: int) -> None:
        self._model, self._form, self.ranks_on_host = model, form, ranks_on_host
        self.staged: StagedWeights | None = None
        self.groups: dict[str, WeightGroup] = {}
        # By a group's name, what a thread waits for: the group, or tensors of its trainer. If the
        # engine gives it up, it ends after its time limit.
        self._waiting: dict[str, Future[Any]] = {}

    def begin(self, *, partial: bool) -> None:
        """Begin to stage an update (StagedWeights)."""
        form = self._checked_form()
        self.staged = None  # frees the memory of an update that was not finished
        self.staged = StagedWeights(
            self._model, form, partial=partial, ranks_on_host=self.ranks_on_host
        )

    def _checked_form(self) -> WeightForm:
        if self._form is None:
            raise FinwhaleError("the weights of a compiled engine cannot be updated")
        return self._form

    def _begun(self) -> StagedWeights:
        assert self.staged is not None, "no update has begun"
        return self.staged

    def stage(self, *, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._begun().add(tensors)

    def stage_bytes(self, *, tensors: Sequence[tuple[Announced, Tensor]]) -> None:
        """Stage tensors that are given as their bytes."""
        self._begun().add(
            (form.name, data.view(form.dtype).view(form.shape)) for form, data in tensors
        )

    def stage_checkpoint(self, *, path: Path) -> None:
        self._begun().read(path)

    def prepare(self) -> None:
        """Complete the staged weights."""
        self._begun().prepare()

    def commit(self) -> None:
        """Write the staged weights, after every rank has prepared its own."""
        self._begun().commit()
        self.staged = None

    def discard(self) -> None:
        """Drop the staged weights."""
        self.staged = None

    def start_join(self, *, address: GroupAddress, rank_offset: int) -> None:
        """Begin to become a member of a group, together with the trainer and all other ranks.

        Args:
            rank_offset: the number of this engine's rank 0 in the group.
        """
        device = self._model.device if address.backend == "nccl" else torch.device("cpu")
        rank = rank_offset + self._checked_form().rank.index
        self._waiting[address.group_name] = start_in_thread(
            "weight-transfer", lambda: WeightGroup(address, rank, device)
        )

    def end_join(self, *, group_name: str) -> None:
        self.groups[group_name] = self._waiting.pop(group_name).result()

    def is_done(self, *, group_name: str) -> bool:
        """Whether this rank has finished its join or its transfer."""
        return self._waiting[group_name].done()

    def leave(self, *, group_name: str) -> None:
        """Leave a group, or give up a wait for it. The other members may be gone."""
        self._waiting.pop(group_name, None)
        group = self.groups.pop(group_name, None)
        if group is not None:
            group.close()

    def announce(self, *, tensors: Sequence[Announced], last: bool) -> None:
        """Check tensors before they arrive (StagedWeights.announce)."""
        self._begun().announce(tensors, last=last)

    def start_receive(self, *, group_name: str, tensors: Sequence[Announced]) -> None:
        """Begin to receive tensors that the trainer broadcasts."""
        group = self.groups[group_name]
        self._waiting[group_name] = start_in_thread(
            "weight-transfer", lambda: group.receive(tensors)
        )

    def end_receive(self, *, group_name: str) -> None:
        """Stage the received tensors."""
        self._begun().add(self._waiting.pop(group_name).result())

    def read_buffer(
        self, *, handles: Mapping[str, IpcHandle], tensors: Sequence[Announced]
    ) -> None:
        """Read tensors from a buffer of another process on this rank's GPU, and stage them.

        Args:
            handles: a handle for each GPU, by its UUID. All buffers have the same contents.
            tensors: the tensors in the buffer, one after the other.
        """
        device = self._model.device
        buffer = open_buffer(handles, device)
        total = sum(one.nbytes for one in tensors)
        if buffer.nbytes < total:
            raise CheckpointError(
                f"the buffer has {buffer.nbytes} bytes, fewer than the {total} of its tensors"
            )
        start = 0
        for one in tensors:
            # A copy, because the tensor's bytes may not be aligned.
            data = buffer[start : start + one.nbytes].clone()
            self._begun().add([(one.name, data.view(one.dtype).view(one.shape))])
            start += one.nbytes
        if device.type == "cuda":
            # The owner may overwrite the buffer once it has an answer.
            torch.cuda.synchronize(device)
