"""Portable kernels compiled for other GPUs than SM90: why each has the table that it has."""

from dataclasses import fields

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
from triton.backends.amd.compiler import HIPOptions

from finwhale.ops import LITTLE_SHARED_MEMORY, NO_E4M3, PORTABLE_ARCHS, WHY_REFERENCE

from . import portable_compile
from .conftest import Compile

SHARED_LIMIT = {
    "sm89": 99 * 1024,
    "sm100": 227 * 1024,
    "sm120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
AMD_REGISTERS = 512  # 32-bit vector registers of a lane, AGPRs among them
# Bytes of memory a lane: 16 warps of 64 lanes leave each lane 128 registers.
AMD_SPILLING = {"drafts.drafts_triton._score_kernel": 28}


def largest_shared(compile_for: Compile, call: str, arch: str) -> int:
    reports = compile_for("portable_compile", call, arch=int(arch[2:]))
    assert reports
    return max(int(report["shared"]) for report in reports)


@pytest.mark.parametrize(
    "call",
    [
        "linear",
        *(pytest.param(call, marks=pytest.mark.kernels) for call in ("attention", "indexer")),
    ],
)
def test_sm100_takes_the_portable_kernels(call: str, sm90: Compile) -> None:
    assert "sm100" in PORTABLE_ARCHS
    assert largest_shared(sm90, call, "sm100") <= SHARED_LIMIT["sm100"]


@pytest.mark.kernels
@pytest.mark.parametrize("arch", ["sm89", "sm120"])
def test_some_have_too_little_shared_memory(arch: str, sm90: Compile) -> None:
    """They compile, but could not be launched."""
    assert WHY_REFERENCE[arch] == LITTLE_SHARED_MEMORY
    assert largest_shared(sm90, "attention", arch) > SHARED_LIMIT[arch]


def test_sm80_has_no_e4m3(sm90: Compile) -> None:
    assert WHY_REFERENCE["sm80"] == NO_E4M3
    with pytest.raises(AssertionError, match="type fp8e4nv not supported in this architecture"):
        sm90("portable_compile", "linear", arch=80)


@pytest.mark.kernels
def test_the_amd_table_launches_every_portable_kernel(sm90: Compile) -> None:
    """Otherwise the next test would not compile it. Triton's compiler for AMD refuses launches
    with options that it lacks.
    """
    kernels = portable_compile.AMD_KERNELS
    calls = {name: sm90("portable_compile", name, mode="names") for name in kernels}
    assert [name for name, launches in calls.items() if not launches] == []
    options = {name for launches in calls.values() for one in launches for name in one["options"]}
    assert "num_warps" in options
    assert options <= {field.name for field in fields(HIPOptions)}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param("amd", marks=pytest.mark.kernels),
        *(pytest.param(name, marks=pytest.mark.long) for name in portable_compile.AMD_KERNELS),
    ],
)
def test_the_amd_table_fits(call: str, arch: str, sm90: Compile) -> None:
    """At every tile that an engine with Flash launches."""
    reports = sm90("portable_compile", call, arch=arch)
    assert reports
    for report in reports:
        assert report["shared"] <= SHARED_LIMIT[arch], report
        assert report["registers"] <= AMD_REGISTERS, report
        assert report["spilled"] <= AMD_SPILLING.get(call, 0), report
