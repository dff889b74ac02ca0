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
import torch

from finwhale.engine.store.fingerprint import NUMERICS_VERSION
from finwhale.platform import processor_name

ROOT = Path(__file__).parents[2]
# By NUMERICS_VERSION, then by libraries and vendor. A failure prints the digests. Changed bits need
# a new NUMERICS_VERSION with them; other libraries or vendors need them alone.
DIGESTS = {
    1: {
        "torch 2.13, numpy 2.4, Intel": {
            "exact": "f0cd0c89f4bc745066de5cc178289989",
            "drafts": "b07c086d9e5cc2e3ac95d0b3f77424ae",
        },
    },
}


def test_cached_rows_have_the_bits_of_this_version() -> None:
    flags = Path("/proc/cpuinfo").read_text().split() if sys.platform == "linux" else []
    vendor = next((one for one in ("Intel", "AMD") if one in processor_name()), "another CPU")
    versions = (".".join(version.split(".")[:2]) for version in (torch.__version__, np.__version__))
    kind = "torch {}, numpy {}, {}".format(*versions, vendor)
    wanted = DIGESTS[NUMERICS_VERSION].get(kind)
    if wanted is None or "avx2" not in flags:
        pytest.skip(f"no digests of cached rows are known for {kind}")
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})  # beyond SSE
    env = os.environ | {
        "ATEN_CPU_CAPABILITY": "default",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": ",".join(simd.get("found", ())),
        "OPENBLAS_CORETYPE": "Nehalem",
        "PYTHONWARNINGS": "ignore",
    }
    call = [sys.executable, "-m", "tests.process.page_digests"]
    done = subprocess.run(call, env=env, text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == wanted, (
        "the bits of cached rows have changed: raise NUMERICS_VERSION in "
        f"engine/store/fingerprint.py, and keep the digests for {kind}: {json.dumps(found)}"
    )
