"""Every Triton kernel compiles for SM90 with the model's sizes and fits; what spills is known.

In a process of its own: under TRITON_INTERPRET a kernel's module holds nothing to compile.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
HERE = Path(__file__).parent
KERNELS = {
    "_streams_few_kernel",
    "_planes_kernel",
    "_streams_many_kernel",
    "_gates_kernel",
    "_block_input_kernel",
    "_rms_norm_kernel",
    "_gate_few_kernel",
    "_gate_many_kernel",
    "_choose_kernel",
    "_hash_kernel",
    "_best_kernel",
    "_pick_kernel",
    "_penalise_kernel",
    "_add_kernel",
    "_restrict_kernel",
    "_scan_kernel",
    "_draw_kernel",
    "_quantise_kernel",
    "_prepare_qkv_kernel",
    "_attend_kernel",
    "_combine_kernel",
    "_compress_kernel",
    "_scores_kernel",
    "_select_kernel",
    "row_kernel",
    "tile_kernel",
    "sum_kernel",
}
# Bytes of stack a thread: attention of many tokens on other GPUs than Hopper, where hopper.py runs,
# and the indexer's scores of a prefill.
SPILLING = {"_attend_kernel": 256, "_scores_kernel": 896}
SHARED_LIMIT = 227 * 1024  # bytes that one block may have on SM90


def test_kernels_compile_for_sm90(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    env["TRITON_DISABLE_LINE_INFO"] = "1"  # line numbers are not needed
    halves = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sm90_compile.py"), part],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for part in ("layers", "caches")
    ]
    reports = []
    for half in halves:
        out, error = half.communicate()
        assert half.returncode == 0, error[-6000:]
        reports += [json.loads(line) for line in out.splitlines()]
    assert {report["kernel"] for report in reports} == KERNELS
    for report in reports:
        assert report["spilled"] <= SPILLING.get(report["kernel"], 0), report
        assert report["registers"] <= 255, report
        assert report["shared"] <= SHARED_LIMIT, report
