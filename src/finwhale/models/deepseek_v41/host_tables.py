"""Engram's tables in host memory, in their stored form, once for all ranks of a host."""

import math
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from finwhale.checkpoint.spec import WeightSpec
from finwhale.checkpoint.stored import has_scale, row_dtype, scale_shape
from finwhale.distributed.peers import Peers
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v41.weight_classes import ModelWeights
from finwhale.weights.allocation import Target, WeightForm
from finwhale.weights.assembler import Assembler
from finwhale.weights.table import DUMMY_ROWS, LookupTable, WeightList

PORTABLE, MAPPED = 1, 2  # cudaHostRegister: for every context, and for kernels


class TableAssembler(Assembler[ModelWeights]):
    """An assembler whose lookup tables all ranks map. Each rank fills its rows of them.

    A GPU reads the tables from host memory, which is pinned once it is filled.
    """

    def __init__(
        self, make: Callable[[WeightList], ModelWeights], form: WeightForm, device: torch.device
    ) -> None:
        self._memories: list[SharedMemory] = []
        super().__init__(make, form, device)

    def finish(self) -> ModelWeights:
        if self._device.type == "cuda":
            for memory in self._memories:
                memory.pin()
        return super().finish()

    def lookup(self, spec: WeightSpec) -> LookupTable:
        spec, storage, own = self._shared(spec), self._storage(spec), self.rank.rows(spec.shape[0])
        lookups, scale, shape = self.destinations.lookups, None, spec.shape
        if self._form.dummy:
            shape = min(shape[0], DUMMY_ROWS), shape[1]
        rows = self._on_host(shape, row_dtype(storage))
        lookups[spec.name] = rows[own].view(-1).view(torch.uint8)
        if has_scale(storage):
            scale = self._on_host(scale_shape(shape, storage), torch.uint8)
            lookups[spec.scale_name] = scale[own].view(-1)
        self.specs[spec.name] = spec
        self._targets[spec.name] = (Target(rows[own], None if scale is None else scale[own]),)
        return LookupTable(rows, scale)

    def _on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        memory = shared_zeros(self._form.peers, math.prod(shape) * dtype.itemsize)
        self._memories.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class SharedMemory(mmap.mmap):
    """Memory that all ranks map. The tensors in it hold this object."""

    _address = 0  # if it is pinned

    def pin(self) -> None:
        """Let kernels read the memory at its own address.

        Raises:
            FinwhaleError: CUDA refuses.
        """
        address, cuda = torch.frombuffer(self, dtype=torch.uint8).data_ptr(), torch.cuda.cudart()
        result = cuda.cudaHostRegister(address, len(self), PORTABLE | MAPPED)
        if int(result):
            raise FinwhaleError(
                f"CUDA cannot pin {len(self):,} bytes of host memory, from which GPUs read the "
                f"model's lookup tables: {cuda.cudaGetErrorString(result)}"
            )
        self._address, self._unpin = address, cuda.cudaHostUnregister

    def __del__(self) -> None:
        if self._address:
            self._unpin(self._address)


def shared_zeros(peers: Peers, num_bytes: int) -> SharedMemory:
    """num_bytes of zeros that all ranks map. A page takes memory at its first use.

    Raises:
        FinwhaleError: the ranks are on several hosts.
    """
    if peers.on_this_host() < peers.rank.size:
        raise FinwhaleError("all ranks must be on one host: they share the model's lookup tables")
    # The memory has no name, so it is freed with the last process that maps it.
    file = os.memfd_create("finwhale-tables")
    os.ftruncate(file, num_bytes)
    with open(peers.gather_text(f"/proc/{os.getpid()}/fd/{file}")[0], "r+b") as first:
        memory = SharedMemory(first.fileno(), num_bytes)
    peers.barrier()
    os.close(file)
    return memory
