"""A worker process in which DeepGEMM compiles GEMMs. It creates a context on the GPU.

The first line on stdin names the cache and the GPU. Each job is the shape of a weight and row
counts; DeepGEMM stores the kernels in its cache.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from finwhale.ops.builds.pool import serve_jobs


def begin(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    os.environ["DG_JIT_CACHE_DIR"] = first["cache"]
    device = torch.device("cuda", first["device"])
    torch.cuda.set_device(device)
    deepgemm_builds = importlib.import_module("finwhale.ops.builds.deepgemm_builds")

    def compile_gemms(job: dict[str, Any]) -> dict[str, Any]:
        weight = torch.empty(job["weight"], dtype=torch.float8_e4m3fn, device=device)
        scale = torch.ones(job["scale"], dtype=torch.float32, device=device)
        for rows in job["rows"]:
            deepgemm_builds.call(job["kind"], weight, scale, rows)
        torch.cuda.synchronize(device)
        return {}

    return compile_gemms


if __name__ == "__main__":
    serve_jobs(begin)
