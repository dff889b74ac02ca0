"""The kernels with which the embedded model is trained compile for SM90."""

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

from . import sm90_demo
from .conftest import Compile


@pytest.mark.parametrize("call", sm90_demo.CALLS)
def test_training_kernels_compile_without_spilling(call: str, sm90: Compile) -> None:
    reports = sm90("sm90_demo", call)
    assert [report["spilled"] for report in reports] == [0, 0]
