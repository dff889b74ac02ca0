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
    files = sorted(map(str, HERE.glob("kernels_*.py")))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
