"""The CPU table keeps its bits with every kernel that OpenBLAS and torch have for this CPU.

The libraries choose their kernels when they are loaded, hence a process for each choice.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_FLAGS = set(Path("/proc/cpuinfo").read_text().split()) if sys.platform == "linux" else set()
# OPENBLAS_CORETYPE, what the CPU must support, ATEN_CPU_CAPABILITY, torch threads.
CHOICES = (
    ("Nehalem", {"sse4_2"}, "default", 2),
    ("Sandybridge", {"avx"}, "default", 1),
    ("Haswell", {"avx2", "fma"}, "avx2", 2),
    ("SkylakeX", {"avx512f", "avx512dq", "avx512bw", "avx512vl"}, "avx512", 1),
)
LONG = ("Sandybridge", "SkylakeX")


@pytest.mark.parametrize(
    ("core", "flags", "aten", "threads"),
    [
        # Nehalem's kernels have no fused multiply-adds either, and all other tests use SkylakeX's
        # on a CPU that has AVX-512.
        pytest.param(*choice, marks=pytest.mark.long if choice[0] in LONG else [])
        for choice in CHOICES
    ],
    ids=[choice[0] for choice in CHOICES],
)
def test_bits_are_kept(core: str, flags: set[str], aten: str, threads: int) -> None:
    if not flags <= CPU_FLAGS:
        pytest.skip(f"OpenBLAS's {core} kernels need a CPU with {', '.join(sorted(flags))}")
    env = os.environ | {
        "OPENBLAS_CORETYPE": core,
        "ATEN_CPU_CAPABILITY": aten,
        "OMP_NUM_THREADS": str(threads),
    }
    call = [sys.executable, "-m", "tests.process.cpu_bits", str(threads)]
    done = subprocess.run(call, env=env, text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kept"] == [True, True], found
    # Both libraries are in use: otherwise this would only test the table's own products.
    assert found["blas_keeps_bits"] and core in found["openblas"], found
