"""Functions of Gluon kernels: those that start early (early_launch.py), and renamed ones."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# From Triton 3.9 on, these have another name. reinterpret(memory, dtype, shape, layout)
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def start_next(PDL: gl.constexpr):
    """Let the next kernel start."""
    _control(PDL, "griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@gluon.jit
def wait_for_last(PDL: gl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    _control(PDL, "griddepcontrol.wait; mov.u32 $0, 0;")


@gluon.jit
def _control(PDL: gl.constexpr, INSTRUCTION: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            INSTRUCTION, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )
