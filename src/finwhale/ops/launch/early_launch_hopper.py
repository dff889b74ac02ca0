"""Gluon functions for kernels on Hopper that start early (early_launch.py)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
