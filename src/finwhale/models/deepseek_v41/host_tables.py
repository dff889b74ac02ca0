"""Engram's tables in host memory, in their stored form, once for all ranks of a host."""

import math
import mmap
import os

import torch
from torch import Tensor

from finwhale.checkpoint.spec import WeightSpec
from finwhale.checkpoint.stored import has_scale, row_dtype, scale_shape
from finwhale.distributed.peers import Peers
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v41.weight_classes import ModelWeights
from finwhale.weights.allocation import Target
from finwhale.weights.assembler import Assembler
from finwhale.weights.table import LookupTable


class TableAssembler(Assembler[ModelWeights]):
    """An assembler whose lookup tables all ranks map. Each rank fills its rows of them."""

    def lookup(self, spec: WeightSpec) -> LookupTable:
        spec, storage, own = self._shared(spec), self._storage(spec), self.rank.rows(spec.shape[0])
        lookups, scale = self.destinations.lookups, None
        rows = self._on_host(spec.shape, row_dtype(storage))
        lookups[spec.name] = rows[own].view(-1).view(torch.uint8)
        if has_scale(storage):
            scale = self._on_host(scale_shape(spec.shape, storage), torch.uint8)
            lookups[spec.scale_name] = scale[own].view(-1)
        self.specs[spec.name] = spec
        self._targets[spec.name] = (Target(rows[own], None if scale is None else scale[own]),)
        return LookupTable(rows, scale)

    def _on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        num_bytes = math.prod(shape) * dtype.itemsize
        return shared_zeros(self._form.peers, num_bytes).view(dtype).view(shape)


def shared_zeros(peers: Peers, num_bytes: int) -> Tensor:
    """A uint8 tensor [num_bytes] of zeros that all ranks map. A page takes memory at its first use.

    Kernels will need pinned memory: this is the place for cudaHostRegister.

    Raises:
        FinwhaleError: the ranks are on several hosts.
    """
    if peers.on_this_host() < peers.rank.size:
        raise FinwhaleError("all ranks must be on one host: they share the model's lookup tables")
    # The memory has no name, so it is freed with the last process that maps it.
    file = os.memfd_create("finwhale-tables")
    os.ftruncate(file, num_bytes)
    with open(peers.gather_text(f"/proc/{os.getpid()}/fd/{file}")[0], "r+b") as first:
        memory = mmap.mmap(first.fileno(), num_bytes)
    peers.barrier()
    os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8)
