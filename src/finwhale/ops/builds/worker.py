"""A process that compiles Triton kernels for another one, without a GPU's context of its own.

The first line on stdin says for what and where to; each further line is a variant of a kernel.
Each is answered by a line: {"seconds": .., "compiled": ..} or {"error": ..}, where what was in
Triton's cache is not compiled. The result is there.
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
    """As much of a driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def build(module: str, name: str, specialization: str) -> bool:
    """Compile one variant, and what launches it where that is compiled; whether it had to be."""
    kernel = getattr(importlib.import_module(module), name)
    found: list[bool] = []
    knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
    compiled = kernel.preload(specialization)
    if driver.active.get_current_target().backend == "cuda":
        backend = importlib.import_module("triton.backends.nvidia.driver")
        if hasattr(backend, "make_launcher"):
            # Up to Triton 3.6 a launcher is C, one for each signature.
            backend.CudaLauncher(compiled.src, compiled.metadata)
    return not all(found)


def serve(requests: TextIO, answers: TextIO) -> None:
    first = json.loads(requests.readline())
    triton_cache.keep_in(first["cache"])
    driver.set_active(NoDriver(GPUTarget(**first["target"])))
    for module in first["modules"]:
        importlib.import_module(module)
    for line in requests:
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        try:
            answer["compiled"] = build(**json.loads(line))
        except Exception as error:
            # Whoever asked compiles it himself then, and sees the whole error.
            answer["error"] = f"{type(error).__name__}: {error}"[:1000]
        answer["seconds"] = round(time.perf_counter() - begin, 3)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Compilers print: the pipe stays for answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, out)
    except BrokenPipeError:
        os._exit(1)  # Whoever asked is gone.
