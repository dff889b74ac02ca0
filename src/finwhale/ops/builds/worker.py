"""A worker process that compiles Triton kernels, without a context on the GPU.

The first line on stdin names the target device and the cache. Each further line is a `Variant` of a
kernel. The worker stores the compiled variant in Triton's cache and answers with a line on stdout:
{"seconds": .., "compiled": ..} or {"seconds": .., "error": ..}. "compiled" is false if the cache
already had the variant.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from finwhale.ops.builds import triton_cache


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


def serve(requests: TextIO, answers: TextIO) -> None:
    first = json.loads(requests.readline())
    triton_cache.use_folder(first["cache"])
    driver.set_active(NoDriver(GPUTarget(**first["target"])))
    for module in first["modules"]:
        importlib.import_module(module)
    for line in requests:
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        try:
            answer["compiled"] = build(**json.loads(line))
        except Exception as error:
            # The parent process then compiles this variant itself and sees the full error.
            answer["error"] = f"{type(error).__name__}: {error}"[:1000]
        answer["seconds"] = round(time.perf_counter() - begin, 3)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Compilers print to stdout. Redirect that to stderr: the pipe must have only answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, out)
    except BrokenPipeError:
        os._exit(1)  # The parent process has ended.
