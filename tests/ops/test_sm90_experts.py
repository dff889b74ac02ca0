"""The routed experts' kernels compile for SM90 with the models' sizes, spill nothing, and fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
from finwhale.ops.moe.hopper_experts import _cut

HERE = Path(__file__).parent
KERNELS = {
    ("_fold_kernel", False),
    ("_order_few_kernel", False),
    ("_count_kernel", False),
    ("_scan_kernel", False),
    ("_order_many_kernel", False),
    ("_round_rows_kernel", False),
    ("_gate_up_kernel", False),
    ("_down_kernel", False),
    ("_gate_up_kernel", True),
    ("_down_kernel", True),
    ("_one_gate_up_kernel", True),
    ("_one_down_kernel", True),
    ("_sum_kernel", False),
}
SHARED_LIMIT = 227 * 1024  # bytes that one block may have on SM90


def test_kernels_compile_for_sm90(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    env["TRITON_DISABLE_LINE_INFO"] = "1"  # line numbers are not needed
    command = [sys.executable, str(HERE / "sm90_experts.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(report["kernel"], report["gluon"]) for report in reports} == KERNELS
    for report in reports:
        # Outside its loops over tiles a program of 256 columns keeps a few registers in memory.
        assert report["spilled"] <= (64 if report["gluon"] else 0), report
        assert report["registers"] <= 255, report
        assert report["shared"] <= SHARED_LIMIT, report


def test_programs_share_all_rows() -> None:
    """No rest, whatever the width: tiles of rows come in pairs."""
    for rows in range(2, 130, 2):
        for groups, tiles in ((1, 1), (2, 1), (2, 4), (4, 2)):
            found, steps, programs = _cut(rows, groups, tiles)
            assert found * steps * programs == rows
            assert found <= groups and steps <= tiles and found >= min(2, groups)
