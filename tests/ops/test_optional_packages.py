"""A missing, old, broken or working DeepGEMM: the table names the reason and has every operator.

A fake package stands in for DeepGEMM, also in the test of its kernels that are built ahead.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

WORKING = """
__version__ = "2.5.0"
import os, time
from pathlib import Path
calls, configs = [], set()
def set_pdl(value): pass
def _run(kind, weight, rows):
    calls.append((kind, tuple(weight.shape), rows))
    # As the library chooses on SM90: by blocks of 64 rows, and smaller ones for few.
    config = (kind, tuple(weight.shape), -(-rows // 64), rows if rows <= 32 else 0)
    folder = Path(os.environ["DG_JIT_CACHE_DIR"]) / "cache" / str(abs(hash(config)))
    if config not in configs:
        configs.add(config)
        folder.mkdir(parents=True, exist_ok=True)
def fp8_gemm_nt(x, w, out, **options): _run("gemm", w[0], len(out))
def fp8_einsum(expression, x, w, out): _run("einsum", w[0], len(out))
"""
TRITON = "finwhale.ops.linear.linear_triton"
TABLE = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
from finwhale.ops import load_ops
from finwhale.ops.tables import optional
from finwhale.platform import Platform
asked = not optional.why_no_deepgemm(), "deep_gemm" in sys.modules, "torch" in sys.modules
for batch_invariant in (False, True):
    ops = load_ops(Platform("nvidia", "sm90"), batch_invariant=batch_invariant)
    assert all(callable(getattr(ops, name)) for name, _ in ops.implementations())
ops = load_ops(Platform("nvidia", "sm90"))
print(asked, ops.linear.__module__, ops.capabilities.packages, optional.notes())
"""


def install(path: Path, code: str, version: str = "2.5.0.post20260629") -> None:
    """Install a fake DeepGEMM package with this code and version into a directory."""
    (path / "deep_gemm").mkdir(parents=True)
    (path / "deep_gemm" / "__init__.py").write_text(code)
    info = path / f"tokenspeed_deepgemm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tokenspeed-deepgemm\nVersion: {version}\n"
    )


def python(code: str, *paths: Path) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), env.get("PYTHONPATH", "")])
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_working_package_is_used(tmp_path: Path) -> None:
    install(tmp_path, WORKING)
    (line,) = python(TABLE, tmp_path)
    used = "('tokenspeed-deepgemm 2.5.0.post20260629',)"
    assert line == f"(True, False, True) finwhale.ops.linear.linear_deepgemm {used} []"


def test_a_package_that_is_too_old_is_not_used(tmp_path: Path) -> None:
    install(tmp_path, "raise AssertionError('imported')", "2.1.0")
    warning, line = python(TABLE, tmp_path)
    assert warning == (
        "Triton kernels replace DeepGEMM's: tokenspeed-deepgemm 2.1.0 is too old: "
        "2.5 or later is needed"
    )
    assert line.startswith(f"(False, False, True) {TRITON} () ['DeepGEMM is not used")


@pytest.mark.parametrize(
    "code",
    [
        "assert 1 > 2, 'no CUDA home'",
        pytest.param("import nowhere_to_be_found", marks=pytest.mark.long),
    ],
)
def test_a_package_whose_import_fails_is_not_used(tmp_path: Path, code: str) -> None:
    install(tmp_path, code)
    warning, line = python(TABLE, tmp_path)
    assert "its import failed, " in warning
    assert "no CUDA home" in warning or "nowhere_to_be_found" in warning
    assert line.startswith(f"(True, False, True) {TRITON} () ['DeepGEMM is not used")


GEMMS = """
import json, sys
import torch
from pathlib import Path
import deep_gemm
from finwhale.ops.builds.deepgemm_builds import DeepGemmKernels
from finwhale.ops.linear import linear_deepgemm
from finwhale.ops.linear import LinearWeight
linear_deepgemm.quantise = lambda x, num_rows=None, early_launch=False: deepgemm_empty(x, num_rows)
from finwhale.ops.linear.quantise_triton import empty_quantised
def deepgemm_empty(x, num_rows):
    y, s = empty_quantised(num_rows or len(x), 1, x.shape[-1], x)
    return y.squeeze(1), s.squeeze(1)
folder = Path(sys.argv[1]) / "deepgemm" / "cache"
folder.mkdir(parents=True)
kernel_builds = DeepGemmKernels(folder)
kernel_builds.install()
w = LinearWeight(torch.empty(256, 2048, dtype=torch.float8_e4m3fn), 128, torch.ones(2, 16))
def linear(n):
    linear_deepgemm.linear(torch.zeros(n, 2048, dtype=torch.bfloat16), w)
with kernel_builds.collecting():
    linear(17), linear(1500)
collected = len(deep_gemm.calls)
jobs = kernel_builds.take_jobs()
assert kernel_builds.load() == 0
with kernel_builds.collecting():
    linear(17), linear(1500)
loaded = kernel_builds.load()
kernels = len(deep_gemm.configs)
for n in (*range(17, 400), *range(400, 1501, 7), 1500):
    linear(n)
before = kernel_builds.total
linear_deepgemm.linear(torch.zeros(5000, 2048, dtype=torch.bfloat16), w)
kernels = kernels, len(deep_gemm.configs)
print(json.dumps([collected, jobs, loaded, *kernels, before, kernel_builds.total]))
"""


def test_gemms_are_built_for_every_number_of_rows(tmp_path: Path) -> None:
    """A kernel that was not built ahead counts as a late compilation."""
    install(tmp_path, WORKING)
    code = GEMMS.replace("sys.argv[1]", repr(str(tmp_path)))
    collected, jobs, loaded, kernels, all_kernels, late, later = json.loads(
        python(code, tmp_path)[-1]
    )
    assert collected == 0
    assert {(job["kind"], *job["weight"]) for job in jobs} == {("gemm", 256, 2048)}
    assert sum(len(job["rows"]) for job in jobs) == loaded
    assert kernels == all_kernels - 1  # the last, of 5000 rows
    assert (late, later) == (0, 1)
