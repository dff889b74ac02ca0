"""Every Triton kernel against its reference, on the CPU, in Triton's interpreter.

The interpreter is chosen when a kernel's module is imported, so the tests, `kernels_*.py` beside
this file, run in a process of their own that has TRITON_INTERPRET=1 from the start.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
HERE = Path(__file__).parent


def test_kernels_in_the_interpreter() -> None:
    """Two processes: the AMD table and sampling take as long as the others."""
    files = {path.name for path in HERE.glob("kernels_*.py")}
    first = {"kernels_amd.py", "kernels_sampling.py"}
    assert first < files
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "--dist=no", "-p", "no:cacheprovider"]
    halves = [
        subprocess.Popen(
            [*command, *half],
            cwd=HERE,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for half in (sorted(first), sorted(files - first))
    ]
    outputs = [half.communicate()[0] for half in halves]
    for half, output in zip(halves, outputs, strict=True):
        assert half.returncode == 0, output[-6000:]
