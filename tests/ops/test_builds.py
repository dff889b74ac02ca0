"""Kernels built ahead: every launch finds its kernel, caches are reused, damage is detected."""

import json
import os
import subprocess
import sys
import tempfile
from ctypes.util import find_library
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
import triton

from .made_once import made_once
from .test_optional_packages import install

PROBE = Path(__file__).parent / "builds_probe.py"
V41_PROBE = Path(__file__).parent / "v41_builds_probe.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def all_launches(of_all_workers: Path) -> dict[str, Any]:
    found: dict[str, Any] = made_once(of_all_workers / "builds", probe)
    return found


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.kernels)])
def report(request: pytest.FixtureRequest, of_all_workers: Path) -> dict[str, Any]:
    """The core suite launches a part of the steps and compiles few kernels."""
    if request.param == "all":
        found: dict[str, Any] = request.getfixturevalue("all_launches")
    else:
        found = made_once(of_all_workers / "few-builds", partial(probe, only=("few",)))
    return found


@pytest.fixture(scope="module")
def with_deepgemm(of_all_workers: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Reports where DeepGEMM is installed: with wo_a inputs in FP8, and in bfloat16."""
    path = tmp_path_factory.mktemp("deepgemm")
    nothing = "def set_pdl(*args, **options): pass\nfp8_gemm_nt = fp8_einsum = set_pdl\n"
    install(path, nothing)
    return made_once(of_all_workers / "deepgemm", partial(probe, path, only=("walk",)))


def make_driver(path: Path) -> None:
    """A library in place of CUDA's driver, with which Triton links launchers up to 3.6."""
    names = (
        "cuCtxGetCurrent cuCtxSetCurrent cuDeviceGet cuDevicePrimaryCtxRetain cuFuncSetAttribute "
        "cuGetErrorString cuLaunchKernelEx cuPointerGetAttribute"
    )
    source = "".join(f"int {name}(void) {{ return 1; }}\n" for name in names.split())
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run([*command, f"-Wl,-soname,{path.name}"], input=source, text=True, check=True)


def probe(*paths: Path, only: tuple[str, ...] = (), script: Path = PROBE) -> Any:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(PROBE.parents[2])
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), env.get("PYTHONPATH", ""), root])
    env |= {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as drivers:
        if triton.__version__ < "3.7" and find_library("cuda") is None:
            env["LD_LIBRARY_PATH"] = drivers
            make_driver(Path(drivers) / "libcuda.so.1")
        done = subprocess.run(
            [sys.executable, str(script), *only],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_number_of_tokens_finds_its_kernels(report: dict[str, Any]) -> None:
    assert report["missing"] == report["missing without weights"] == []
    assert report["left out"] == []
    assert report["every"] > 100
    assert report["rounding"] == []
    assert {"_attend_kernel", "_gate_up_kernel", "tile_kernel", "_scores_kernel"} <= set(
        report["kernels"]
    )


@pytest.mark.kernels
def test_every_step_that_ranks_divide_finds_its_kernels(all_launches: dict[str, Any]) -> None:
    assert all_launches["divided"] == []


@pytest.mark.kernels
def test_every_step_of_data_parallel_ranks_finds_its_kernels(all_launches: dict[str, Any]) -> None:
    assert all_launches["lanes"] == all_launches["drafting lanes"] == []


@pytest.mark.kernels
def test_every_step_of_deepseek_v41_finds_its_kernels() -> None:
    """Whole steps, with plain and captured prefills and with drafts; no tensor has memory."""
    found = probe(script=V41_PROBE)
    assert [report["missing"] for report in found.values()] == [[]] * 3
    assert all(report["every"] > 120 for report in found.values())


@pytest.mark.kernels
def test_the_kernels_of_a_decode_are_listed() -> None:
    command = [sys.executable, "-m", "tools.step_kernels", "--ranks", "2", "--layers", "4"]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    # Each layer has experts, and mHC that adds the ranks' sums twice, but for the first time.
    assert names.count("_few_down_kernel") == 4
    assert names.count("sum_streams_few_kernel") == 8


@pytest.mark.kernels
def test_every_step_that_drafts_finds_its_kernels(all_launches: dict[str, Any]) -> None:
    """Steps have every size and width, and draft passes have any number of sequences."""
    for found in (all_launches["drafting"], all_launches["demo"]):
        assert found["missing"] == found["missing without weights"] == []


@pytest.mark.kernels
def test_verifications_of_up_to_8_tokens_launch_the_kernels_of_a_decode(
    all_launches: dict[str, Any],
) -> None:
    assert all_launches["drafting"]["other verifications"] == []


@pytest.mark.kernels
def test_every_number_of_tokens_finds_its_kernels_with_deepgemm(
    with_deepgemm: list[dict[str, Any]],
) -> None:
    """With DeepGEMM, attention rounds its output in steps of two or more tokens."""
    found = with_deepgemm[0]
    assert found["missing"] == found["missing without weights"] == []
    assert found["rounding"] == ["_attend_kernel", "_combine_kernel"]
    assert found["gemms left out"] == []


@pytest.mark.kernels
def test_every_number_of_tokens_finds_its_kernels_with_bf16_wo_a_input(
    with_deepgemm: list[dict[str, Any]],
) -> None:
    """Attention rounds nothing then, and Finwhale's kernels serve every number of tokens."""
    found = with_deepgemm[1]
    assert found["missing"] == found["missing without weights"] == []
    assert found["rounding"] == []


def test_variants_are_few(report: dict[str, Any]) -> None:
    """Each variant takes a second to compile, so kernels specialise on as little as possible."""
    assert report["walked"] < 220


def test_kernels_that_workers_compiled_are_loaded(report: dict[str, Any]) -> None:
    """They are loaded even after the cache directory has moved."""
    found = report["compiling"]
    assert found["damaged by moving"] == 0
    assert found["compiled"] == 0
    (error,) = found["errors"]
    assert "has no attribute 'nothing'" in error


@pytest.mark.kernels
def test_kernels_are_built_before_the_weights_take_the_memory(all_launches: dict[str, Any]) -> None:
    """`prepare` then compiles only the other kernels, and counts all."""
    assert all_launches["built before"] == [False, 2, True, 0, 1, 1]


def test_a_damaged_kernel_is_compiled_again(report: dict[str, Any]) -> None:
    found = report["compiling"]
    assert found["damaged"] == [1, 0]
    assert found["compiled after damage"] == 1


def test_a_kernel_that_a_step_waits_for_is_counted_and_named(report: dict[str, Any]) -> None:
    count, message = report["compiling"]["late"]
    assert count == 1
    assert message == "a step waited until the kernel _rms_norm_kernel was compiled or loaded"


@pytest.mark.kernels
def test_a_kernel_of_another_configuration_is_not_built_again(all_launches: dict[str, Any]) -> None:
    *compiled, refused = all_launches["several configurations"]
    assert compiled == [1, 0, 1, 0]
    assert refused == "is read-only and lacks 1 kernels"


@pytest.mark.kernels
def test_another_thread_s_launch_waits_while_launches_are_recorded(
    all_launches: dict[str, Any],
) -> None:
    assert all_launches["another thread waits"] == [True, False]
