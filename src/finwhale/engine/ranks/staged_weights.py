"""Stages new weights of one rank, and writes them in place of the old ones once they are complete.

The code that loads a checkpoint first fills a second copy of the rank's weights, in host memory.
Only when this copy is complete on every rank, each tensor is copied into the memory of the old one,
so captured graphs remain valid.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.checkpoint.reader import Checkpoint
from finwhale.distributed.peers import Peers
from finwhale.engine.ranks.memory_checks import check_host_memory
from finwhale.errors import CheckpointError
from finwhale.models.protocol import Model
from finwhale.models.registry import architecture_of, parse_config
from finwhale.ops.host_forms import forget_forms
from finwhale.weights.allocation import WeightForm
from finwhale.weights.assembler import Assembler
from finwhale.weights.incoming import Announced, Incoming
from finwhale.weights.source import WeightSource
from finwhale.weights.table import DUMMY_ROWS, table_bytes
from finwhale.weights.tree import device_tensors, tensors_of

CPU = torch.device("cpu")
STAGED = (
    "new weights, which are staged in host memory,",
    "end other programs, or start the engine again with the new weights",
)
# Limits for announced tensors. No tensor of a model is near them.
MAX_DIM, MAX_TENSOR_BYTES = 2**30, 2**40


class StagedWeights:
    """The copy of new weights that an update fills before it writes any of them.

    Args:
        model: the model whose weights are updated.
        form: how this rank holds them.
        partial: weights that do not arrive keep their values.
        ranks_on_host: number of ranks that stage their weights in this host's memory.

    Raises:
        ResourceError: the host has too little memory to stage all weights.
    """

    def __init__(
        self, model: Model, form: WeightForm, *, partial: bool, ranks_on_host: int = 1
    ) -> None:
        # The staged tables are this process's own.
        self._model, self._form, self._partial = model, replace(form, peers=Peers()), partial
        self._on_devices = device_tensors(model.weights)
        self._staged_bytes = ranks_on_host * sum(tensor.nbytes for tensor in self._on_devices)
        if not partial:
            check_host_memory(self._staged_bytes, *STAGED)
        architecture, config, form = architecture_of(model.config), model.config, self._form
        self._assembler: Assembler[Any] | None = architecture.assembler(config, form, CPU)
        self._specs = architecture.weight_specs(config, form.rank)
        self._ignored = architecture.ignored_prefixes(config)
        # Dequantised weights have one layout, whatever their stored format.
        self._packed = form.ops.capabilities.quantised_weights
        storages = form.storages if self._packed else None
        self._incoming = Incoming(self._specs, self._ignored, storages)
        self._announced = Incoming(self._specs, self._ignored, storages)
        self._whole = False
        self._staged: list[tuple[Tensor, Tensor]] = []

    def announce(self, tensors: Iterable[Announced], *, last: bool) -> None:
        """Check the names, dtypes and shapes of tensors before they arrive. Raises CheckpointError.

        Args:
            last: no other tensors will follow.
        """
        for one in tensors:
            if any(not 0 < size < MAX_DIM for size in one.shape) or one.nbytes > MAX_TENSOR_BYTES:
                raise CheckpointError(f"no weight has the shape {list(one.shape)} of {one.name}")
            for _ in self._announced.add(one.name, one.meta()):
                pass
        if last:
            self._announced.check_complete(partial=self._partial)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage tensors. Raises CheckpointError."""
        assert self._assembler is not None
        for name, tensor in tensors:
            for spec, stored in self._incoming.add(name, tensor):
                self._assembler.add(spec, stored)

    def read(self, path: Path) -> None:
        """Stage a whole checkpoint; this rank reads its part only. Raises CheckpointError."""
        assert self._assembler is not None
        checkpoint = Checkpoint.open(path)
        theirs = parse_config(checkpoint.config)
        ours = self._model.config
        if theirs.draft_head != ours.draft_head and ours.draft_head is None:
            theirs = theirs.without_draft_head()
        # Trainers save no generation_config.json, which may have end tokens.
        ends = {"eos_token_ids": ours.eos_token_ids}
        if replace(theirs, **ends) != ours:  # type: ignore[type-var]
            raise CheckpointError(f"{path} is a checkpoint of another model")
        source = WeightSource(checkpoint, self._specs, ignored=self._ignored)
        tables = table_bytes(self._specs, source.storages)
        if (self._packed or tables) and source.storages != self._form.storages:
            raise CheckpointError(
                f"{path} stores weights in other formats than the loaded checkpoint, for which the "
                "memory is laid out"
            )
        lookups = (spec for spec in self._specs.values() if spec.lookup)
        if self._form.dummy and any(spec.shape[0] > DUMMY_ROWS for spec in lookups):
            raise CheckpointError(
                f"the running model's lookup tables are random and have {DUMMY_ROWS:,} rows, fewer "
                f"than those of {path}: start an engine with a checkpoint"
            )
        check_host_memory(self._staged_bytes + tables, *STAGED)
        for spec, stored in source.into(self._assembler.destinations):
            self._assembler.add(spec, stored)
        self._whole = True

    def prepare(self) -> None:
        """Complete the staged weights. Raises CheckpointError if one is missing."""
        assert self._assembler is not None
        if not self._whole:
            self._incoming.check_complete(partial=self._partial)
        staged, complete = self._assembler.finish_part(self._model.device, self._model.weights)
        self._assembler = None
        pairs = list(zip(tensors_of(self._model.weights), tensors_of(staged), strict=True))
        for old, new in pairs:
            assert old.shape == new.shape and old.dtype == new.dtype, (old.shape, new.shape)
        on_devices = set(map(id, self._on_devices))
        for old, new in pairs:
            if id(new) in complete:
                if id(old) not in on_devices:  # a lookup table: each rank has staged some rows
                    own = self._form.rank.rows(len(old))
                    old, new = old[own], new[own]
                self._staged.append((old, new))

    @torch.inference_mode()
    def commit(self) -> None:
        """Write the staged weights into the memory of the current ones."""
        for old, new in self._staged:
            old.copy_(new)
            forget_forms(old)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
