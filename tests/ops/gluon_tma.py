"""Tensor descriptors and TMA loads, for gluon_interpreter.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from .gluon_memory import FENCE, Shared
from .gluon_programs import Access, Barrier, VectorClock
from .gluon_values import MEMORY, NARROW, TORCH_NAMES, itemsize


class Descriptor:
    """What a kernel gets for a TensorDescriptor, which reads boxes of a tensor."""

    def __init__(self, host: Any) -> None:
        name = TORCH_NAMES.get(host.base.dtype, str(host.base.dtype).removeprefix("torch."))
        self.dtype, self.layout, self.shape = gl.dtype(name), host.layout, tuple(host.shape)
        self.block_type = SimpleNamespace(shape=list(host.block_shape), element_ty=self.dtype)
        bits = torch.uint8 if itemsize(self.dtype) == 1 else torch.int16
        self.memory = (host.base.view(bits) if name in NARROW else host.base).numpy()

    def box(self, at: list[int]) -> Any:
        """The elements at `at`, as in memory. Outside of the tensor, they are 0."""
        sizes = self.block_type.shape
        data = np.zeros(sizes, MEMORY[self.dtype.name])
        ranges = [
            (max(first, 0), min(first + size, end))
            for first, size, end in zip(at, sizes, self.shape, strict=True)
        ]
        if all(first < end for first, end in ranges):
            target = (
                slice(first - start, end - start)
                for (first, end), start in zip(ranges, at, strict=True)
            )
            data[tuple(target)] = self.memory[tuple(slice(*limits) for limits in ranges)]
        return data


class TmaLoad:
    """A TMA load in flight. It ends at any moment from its issue on; then its bytes are there.

    It is ordered after all that its issue is ordered after, and before every wait for its barrier's
    phase.
    """

    def __init__(self, desc: Descriptor, at: list[int], barrier: Barrier, memory: Shared) -> None:
        program = memory.program
        sizes, name = tuple(desc.block_type.shape), memory.memory.name
        if memory.shape != sizes or memory.dtype != desc.dtype:
            to = f"{name}, {memory.dtype} {memory.shape}"
            program.fault(f"TMA load of {desc.dtype} {sizes} to {to}")
        if memory.swizzle != desc.layout.swizzle_byte_width:
            program.fault(f"TMA load of {desc.layout} to {name}, which has another swizzle")
        if memory.offset % 128:
            program.fault(f"TMA load to byte {memory.offset} of {name}, not a multiple of 128")
        if at[-1] * itemsize(desc.dtype) % 16:
            program.fault(f"TMA load from {at} of {desc.dtype}, not a multiple of 16 bytes")
        by, time = barrier.initialised
        if program.current.clock.times[1, by] < time:
            program.fault(f"no fence_async_shared follows mbarrier.init of {barrier.name}")
        barrier.loader.num_issued += 1
        barrier.check_phase("a TMA load is not ordered after the last phase of")
        self.desc, self.at, self.barrier, self.memory = desc, at, barrier, memory
        self.phase = barrier.completed
        clock = VectorClock()
        clock.merge(program.current.clock)
        self.access, self.issuer = Access(barrier.loader, clock), program.current.number

    def finish(self) -> None:
        """Write the bytes, and signal the barrier."""
        barrier, memory = self.barrier, self.memory
        memory.check_write(self.access, self.issuer)
        memory.check_order(self.access, 1, FENCE)
        data = self.desc.box(self.at)
        barrier.loader.places.append(self.access.place)
        time = len(barrier.loader.places) - 1
        memory.write(data, self.access, time)
        barrier.gathered.times[:, barrier.loader.number] = time
        if barrier.completed != self.phase:
            memory.program.fault(f"more bytes than expected at {barrier}", self.access)
        barrier.tx_count -= data.nbytes
        barrier.end_phase(self.access)
