"""A worker process that compiles Triton kernels, without a context on the GPU.

The first line on stdin names the target device and the cache. Each job is a `Variant` of a kernel.
The worker stores the compiled variant in Triton's cache and answers {"seconds": .., "compiled": ..}
or {"seconds": .., "error": ..}. "compiled" is false if the cache already had the variant. After an
error, the parent process compiles this variant itself and sees the full error.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import importlib
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from finwhale.ops.builds import triton_cache
from finwhale.ops.builds.pool import serve_jobs


class NoDriver:
    """The part of a Triton driver that compilation uses."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def build(module: str, name: str, specialization: str) -> bool:
    """Compile one variant and its launcher; returns whether the cache lacked the variant."""
    kernel = getattr(importlib.import_module(module), name)
    found: list[bool] = []
    knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
    compiled = kernel.preload(specialization)
    if driver.active.get_current_target().backend == "cuda":
        backend = importlib.import_module("triton.backends.nvidia.driver")
        if hasattr(backend, "make_launcher"):
            # Up to Triton 3.6, each launch signature has a launcher, which is compiled C code.
            backend.CudaLauncher(compiled.src, compiled.metadata)
    return not all(found)


def begin(first: dict[str, Any]) -> Callable[[dict[str, str]], dict[str, Any]]:
    triton_cache.use_folder(first["cache"])
    driver.set_active(NoDriver(GPUTarget(**first["target"])))
    for module in first["modules"]:
        importlib.import_module(module)
    return lambda job: {"compiled": build(**job)}


if __name__ == "__main__":
    serve_jobs(begin)
