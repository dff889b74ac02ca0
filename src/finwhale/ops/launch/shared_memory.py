"""Kernels that use little shared memory leave room for the kernels that start beside them.

A multiprocessor divides its memory between L1 cache and shared memory as the first program that it
runs prefers, and cannot change the division while a program runs. A kernel that has started early
waits on many multiprocessors. If it prefers little shared memory, large programs of the next
kernels do not fit on these multiprocessors. Programs that hold all of their weights
(few_tokens_hopper.py) would then start, and request their weights, only when it ends. So such a
kernel prefers shared memory, too.
"""

import ctypes
from functools import cache
from typing import Any

from triton import knobs

# Kernels between two that hold their weights.
KERNELS = ("_combine_kernel", "sum_kernel")
# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver, and its largest value.
CARVEOUT, LARGEST = 9, 100


def prefer_shared_memory() -> None:
    """Let KERNELS prefer shared memory in this process, from their next loading on.

    Triton keeps the hooks of others beside this one.
    """
    knobs.runtime.kernel_load_end_hook.add(_prefer)


def _prefer(module: Any, function: int, name: str, metadata_group: Any, hash: str) -> None:
    """See triton.knobs.runtime.kernel_load_end_hook. `function` is CUDA's handle of the kernel."""
    if name in KERNELS:
        _driver().cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, LARGEST)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
