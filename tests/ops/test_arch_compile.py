"""Portable kernels compiled for other GPUs than SM90: why each has the table that it has."""

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

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


@pytest.mark.parametrize("call", ["linear", "attention", "indexer"])
def test_sm100_takes_the_portable_kernels(call: str, sm90: Compile) -> None:
    assert "sm100" in PORTABLE_ARCHS
    assert largest_shared(sm90, call, "sm100") <= SHARED_LIMIT["sm100"]


@pytest.mark.parametrize("arch", ["sm89", "sm120"])
def test_some_have_too_little_shared_memory(arch: str, sm90: Compile) -> None:
    """They compile, but could not be launched."""
    assert WHY_REFERENCE[arch] == LITTLE_SHARED_MEMORY
    assert largest_shared(sm90, "attention", arch) > SHARED_LIMIT[arch]


def test_sm80_has_no_e4m3(sm90: Compile) -> None:
    assert WHY_REFERENCE["sm80"] == NO_E4M3
    with pytest.raises(AssertionError, match="type fp8e4nv not supported in this architecture"):
        sm90("portable_compile", "linear", arch=80)


def test_the_amd_table_launches_every_portable_kernel(sm90: Compile) -> None:
    """Otherwise the next test would not compile it."""
    kernels = portable_compile.AMD_KERNELS
    calls = {name: sm90("portable_compile", name, mode="names") for name in kernels}
    assert [name for name, launches in calls.items() if not launches] == []


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "call",
    ["amd", *(pytest.param(name, marks=pytest.mark.long) for name in portable_compile.AMD_KERNELS)],
)
def test_the_amd_table_fits(call: str, arch: str, sm90: Compile) -> None:
    """At every tile that an engine with Flash launches."""
    reports = sm90("portable_compile", call, arch=arch)
    assert reports
    for report in reports:
        assert report["shared"] <= SHARED_LIMIT[arch], report
        assert report["registers"] <= AMD_REGISTERS, report
        assert report["spilled"] <= AMD_SPILLING.get(call, 0), report
