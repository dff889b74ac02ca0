"""Early launch: a kernel starts while the kernel before it ends (programmatic dependent launch)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import triton
import triton.language as tl


def launch_options(early: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel's launch; `early` needs Hopper or a later NVIDIA GPU.

    A kernel that starts early takes a constexpr PDL. If PDL is true, every program of the kernel
    calls `start_next`, usually first, and calls `wait_for_last` before it reads what another kernel
    of the step writes.

    - Before `wait_for_last` it may read weights and the inputs of the step: positions, sequences,
      token ids and page tables. Nothing of a step starts early until these are written: the
      embedding, an ordinary kernel, comes between.
    - A kernel that calls `wait_for_last` before `start_next` guarantees more: all writes of earlier
      kernels are visible when the next kernel starts. The experts' GEMMs rely on that when they
      read the order of the tokens. One program that calls them in this order is enough, and the
      guarantee extends to all later kernels.
    - A kernel that has started early occupies registers and shared memory while it waits. So a
      kernel before a large one calls `start_next` late, if kernels on a side stream should start
      first.
    """
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()
