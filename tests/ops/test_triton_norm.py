"""The Triton kernel of RMSNorm in the interpreter, against the reference."""

import pytest
import torch

from finwhale.ops.norm import ref
from finwhale.ops.norm import rms_norm_triton as kernels

from .kernels_support import DTYPES, Inputs, assert_close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 128), (3, 100), (2, 3, 7), (2, 4096)], ids=str)
def test_against_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = Inputs()
    x, weight = inputs.outliers(*shape, dtype=dtype), inputs.normal(shape[-1])
    assert_close(kernels.rms_norm(x, weight, 1e-6), ref.rms_norm(x, weight, 1e-6))


def test_rows_apart_and_rows_of_zeros() -> None:
    inputs = Inputs()
    x, weight = inputs.normal(3, 80)[:, 8:72], inputs.normal(64)
    x[1] = 0
    found = kernels.rms_norm(x, weight, 1e-6)
    assert_close(found, ref.rms_norm(x, weight, 1e-6))
    assert torch.equal(found[2], kernels.rms_norm(x[2], weight, 1e-6))


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rms_norm(torch.zeros(4, 8).mT, torch.zeros(4), 1e-6)
    with pytest.raises(ValueError, match="at most 16384"):
        kernels.rms_norm(torch.zeros(1, 20000), torch.zeros(20000), 1e-6)
