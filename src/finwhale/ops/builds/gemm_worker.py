"""A worker process in which DeepGEMM compiles GEMMs. It creates a context on the GPU.

The first line on stdin names the cache and the GPU. Each further line is a job: the shape of a
weight and row counts. The worker answers each job with one line of JSON on stdout, and DeepGEMM
stores the kernels in its cache.
"""

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

import torch


def serve(requests: TextIO, answers: TextIO) -> None:
    first = json.loads(requests.readline())
    os.environ["DG_JIT_CACHE_DIR"] = first["cache"]
    device = torch.device("cuda", first["device"])
    torch.cuda.set_device(device)
    deepgemm_builds = importlib.import_module("finwhale.ops.builds.deepgemm_builds")
    for line in requests:
        job = json.loads(line)
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        try:
            weight = torch.empty(job["weight"], dtype=torch.float8_e4m3fn, device=device)
            scale = torch.ones(job["scale"], dtype=torch.float32, device=device)
            for rows in job["rows"]:
                deepgemm_builds.call(job["kind"], weight, scale, rows)
            torch.cuda.synchronize(device)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"[:1000]
        answer["seconds"] = round(time.perf_counter() - begin, 3)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # DeepGEMM and nvcc print to stdout. Redirect that to stderr: the pipe must have only answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, out)
    except BrokenPipeError:
        os._exit(1)  # The parent process has ended.
