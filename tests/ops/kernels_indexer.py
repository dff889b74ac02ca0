"""The Triton kernel of the indexer's query in the interpreter, against the reference."""

import pytest
import torch

from finwhale.ops.indexer import ref
from finwhale.ops.indexer import triton as kernels

from .kernels_support import DTYPES, Inputs, assert_close

# (N, I, C, R): no token; the model's head; a short group; groups of 128 with a rest.
SIZES = ((0, 4, 128, 64), (1, 1, 128, 64), (2, 17, 128, 64), (3, 2, 50, 10), (2, 3, 300, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_without_rounding(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, heads, width, rope = size
    inputs = Inputs()
    q, rotation = inputs.outliers(tokens, heads, width, dtype=dtype), inputs.rotation(tokens, rope)
    before = q.clone()
    wanted = ref.prepare_index_query(q, rotation, False)
    assert_close(kernels.prepare_index_query(q, rotation, False), wanted)
    assert torch.equal(q, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rounding_bit_for_bit(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """With angle 0 both round the same values: normal and subnormal E4M3, ties, zeros, signs."""
    tokens, heads, width, rope = size
    inputs = Inputs()
    q = inputs.outliers(tokens, heads, width) * torch.logspace(-8, 2, width)
    ties = torch.tensor([448.0, 17.0, 19.0, -21.0, 2**-7 + 2**-10, -(2.0**-10), 3 * 2**-10, -0.0])
    q[..., : len(ties)] = ties
    q = q.to(dtype)
    rotation = torch.tensor([1.0, 0.0]).repeat(tokens, rope // 2, 1)
    found = kernels.prepare_index_query(q, rotation, True)
    wanted = ref.prepare_index_query(q, rotation, True)
    assert found.dtype == wanted.dtype
    # Rope turns -0 into +0 in the reference; the kernel leaves what it does not rotate alone.
    assert torch.equal(found, wanted)


def test_tiny_values_round_with_the_smallest_scale() -> None:
    q = torch.tensor([1e-30, -1e-9, 1e-7, 0.0]).repeat(1, 1, 8)
    rotation = torch.tensor([1.0, 0.0]).repeat(1, 4, 1)
    found = kernels.prepare_index_query(q, rotation, True)
    assert torch.equal(found, ref.prepare_index_query(q, rotation, True))
