"""Functions of Gluon that have another name from Triton 3.9 on."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_memory = gl.shared_memory_descriptor
# reinterpret(memory, dtype, shape, layout)
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
