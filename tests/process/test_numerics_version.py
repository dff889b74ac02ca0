"""NUMERICS_VERSION is raised when the bits of cached rows change.

Servers share a prefix store only with the same NUMERICS_VERSION. The libraries' kernels depend on
the processor, so the process that computes the rows uses those that every x86-64 CPU with AVX2 has.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from finwhale.platform import processor_name

from .page_digests import check, wanted

ROOT = Path(__file__).parents[2]


def test_cached_rows_have_the_bits_of_this_version() -> None:
    flags = Path("/proc/cpuinfo").read_text().split() if sys.platform == "linux" else []
    vendor = next((one for one in ("Intel", "AMD") if one in processor_name()), "another CPU")
    if "avx2" not in flags:
        pytest.skip("the digests are those of CPUs with AVX2")
    known = wanted("numpy", vendor)
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})  # beyond SSE
    env = os.environ | {
        "ATEN_CPU_CAPABILITY": "default",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": ",".join(simd.get("found", ())),
        "OPENBLAS_CORETYPE": "Nehalem",
        "PYTHONWARNINGS": "ignore",
    }
    call = [sys.executable, "-m", "tests.process.page_digests", "cpu"]
    done = subprocess.run(call, env=env, text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout.splitlines()[-1]), known)
