"""Every Triton kernel in the interpreter on its family's shared cases, in float32.

Cases of many tokens are left to the GPU: the interpreter takes milliseconds a program. Kernels that
take packed rows or weights have their cases packed in files of their own.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.checked_case import CheckedCase
from torch import Tensor

from finwhale.ops import Ops, load_ops
from finwhale.ops.linear import KERNEL_GROUP
from finwhale.platform import Platform

from .kernels_support import assert_close

MAX_TOKENS = 9
KERNELS = {
    "linear": "linear_triton",
    "mhc": "mhc_triton",
    "moe": "router_triton",
    "norm": "rms_norm_triton",
}
REFERENCE: Ops = load_ops(Platform.cpu(), reference=True)


def covered() -> list[Any]:
    params = []
    for family, kernel_module in KERNELS.items():
        cases = importlib.import_module(f"tests.support.cases.{family}").CASES
        kernels = importlib.import_module(f"finwhale.ops.{family}.{kernel_module}")
        for case in cases:
            kernel = getattr(kernels, case.operator, None)
            groups = {getattr(arg, "input_group", 0) for arg in case.args()}
            if kernel is None or not groups <= {0, KERNEL_GROUP}:
                continue
            if len(case.args()[0]) <= MAX_TOKENS:
                params.append(pytest.param(case, kernel, id=str(case)))
    return params


def results(fn: Callable[..., Any], case: CheckedCase) -> list[Tensor]:
    args = case.args()
    returned = fn(*args)
    if not isinstance(returned, tuple):
        returned = () if returned is None else (returned,)
    return [*returned, *(args[i] for i in case.written)]


@pytest.mark.parametrize("case, kernel", covered())
def test_against_the_reference(case: CheckedCase, kernel: Callable[..., Any]) -> None:
    found, wanted = results(kernel, case), results(getattr(REFERENCE, case.operator), case)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if not other.dtype.is_floating_point:
            assert torch.equal(one, other)
        elif case.flips and other.numel():
            unit = other.abs().max()
            error = (one - other).abs()
            assert (error > case.tolerance * unit).float().mean() <= case.flips
            assert error.max() <= case.flip * unit
        else:
            assert_close(one, other)
