"""The kernels that read peers' memory compile for SM90 and fit; what spills is known."""

from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

from . import sm90_collectives
from .conftest import Compile

SPILLING = {"_two_shot_kernel": 32}  # bytes of stack a thread, outside the loops that poll


def of_eight(calls: Iterable[str]) -> list[Any]:
    """Kernels for two and four ranks have parts of the kernels for eight."""
    return [
        pytest.param(call, marks=pytest.mark.kernels if call.endswith("-8") else pytest.mark.long)
        for call in calls
    ]


@pytest.mark.parametrize("call", of_eight(sm90_collectives.PARTIAL_SUMS))
def test_mhc_of_partial_sums_compiles_and_fits(call: str, sm90: Compile) -> None:
    reports = sm90("sm90_collectives", call)
    assert {report["kernel"].rpartition(".")[2] for report in reports} >= {"sum_streams_few_kernel"}
    assert not any(report["spilled"] for report in reports), reports


@pytest.mark.parametrize("call", of_eight(sm90_collectives.PUSH))
def test_push_kernels_compile_and_fit(call: str, sm90: Compile) -> None:
    reports = sm90("sm90_collectives", call)
    assert len(reports) == 14
    for report in reports:
        kernel = report["kernel"].rpartition(".")[2]
        assert report["spilled"] <= SPILLING.get(kernel, 0), report


def test_the_calls_launch_every_push_kernel(sm90: Compile) -> None:
    """The tests above compile these launches, outside the core suite."""
    reports = sm90("sm90_collectives", "collectives-8", mode="names")
    names = {report["kernel"].rpartition(".")[2] for report in reports}
    assert len(names) == 9 and len(reports) == 14
