"""The Triton kernels around sparse attention in the interpreter, against the reference."""

import pytest
import torch

from finwhale.ops.attention import ref
from finwhale.ops.attention import triton as kernels

from .kernels_support import DTYPES, Inputs, assert_close

# (N, A, C, R): no token; one head; Flash's head; widths that are no power of two; rope only.
HEADS = ((0, 4, 64, 16), (1, 1, 64, 16), (2, 5, 512, 64), (3, 3, 74, 10), (2, 2, 32, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", HEADS, ids=str)
def test_query_and_inverse_rope(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, heads, width, rope = size
    inputs = Inputs()
    q = inputs.outliers(tokens, heads, width, dtype=dtype)
    rotation = inputs.rotation(tokens, rope)
    wanted = ref.prepare_query(q, rotation, 1e-6)
    assert_close(kernels.prepare_query(q.clone(), rotation, 1e-6), wanted)
    assert_close(kernels.inverse_rope(q.clone(), rotation), ref.inverse_rope(q, rotation))


def test_the_inverse_touches_the_rope_part_only_and_works_in_place() -> None:
    inputs = Inputs()
    o, rotation = inputs.normal(2, 3, 74), inputs.rotation(2, 10)
    before = o.clone()
    assert kernels.inverse_rope(o, rotation) is o
    assert torch.equal(o[..., :64], before[..., :64])
    assert not torch.equal(o[..., 64:], before[..., 64:])


def test_heads_inside_a_larger_tensor() -> None:
    inputs = Inputs()
    whole, rotation = inputs.normal(2, 6, 48), inputs.rotation(2, 16)
    wanted = ref.prepare_query(whole[:, 1:5, 8:40], rotation, 1e-6)
    untouched = whole[:, 5].clone()
    assert_close(kernels.prepare_query(whole[:, 1:5, 8:40], rotation, 1e-6).clone(), wanted)
    assert_close(whole[:, 1:5, 8:40].clone(), wanted)
    assert torch.equal(whole[:, 5], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(0, 64, 16), (1, 32, 8), (3, 512, 64), (2, 150, 10)], ids=str)
def test_window_rows(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, width, rope = size
    inputs = Inputs()
    kv = inputs.outliers(tokens, width, dtype=dtype)
    norm, rotation = inputs.normal(width), inputs.rotation(tokens, rope)
    slots = torch.randperm(9, generator=inputs.generator)[:tokens]
    found, wanted = torch.full((9, width), 7.0, dtype=dtype), torch.full((9, width), 7.0).to(dtype)
    kernels.store_window(kv, norm, rotation, 1e-6, False, found, slots)
    ref.store_window(kv, norm, rotation, 1e-6, False, wanted, slots)
    assert_close(found, wanted)
    others = [row for row in range(9) if row not in slots.tolist()]
    assert (found[others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, rope", [(512, 64), (150, 10), (64, 64)])
def test_rounded_window_rows_bit_for_bit(width: int, rope: int, dtype: torch.dtype) -> None:
    """Values of +-1 without eps have a norm of exactly 1, and angle 0 leaves them as they are, so
    that the norm's weights arrive at the rounding exactly, whatever the order of the sum.
    """
    inputs = Inputs()
    kv = inputs.normal(4, width).sign().to(dtype)
    norm = inputs.outliers(width) * torch.logspace(-12, 6, width)
    norm[:2] = torch.tensor([0.0, 2.0**-30])
    rotation = torch.tensor([1.0, 0.0]).repeat(4, rope // 2, 1)
    slots = torch.tensor([3, 0, 5, 1])
    found, wanted = torch.zeros(6, width, dtype=dtype), torch.zeros(6, width, dtype=dtype)
    kernels.store_window(kv, norm, rotation, 0.0, True, found, slots)
    ref.store_window(kv, norm, rotation, 0.0, True, wanted, slots)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_rounded_window_rows_of_any_norm() -> None:
    """A last bit of the norm may carry a value over to the next E4M3 one: few, and by one step."""
    inputs = Inputs()
    kv, norm, rotation = inputs.outliers(4, 512), inputs.normal(512), inputs.rotation(4, 64)
    found, wanted = torch.zeros(4, 512), torch.zeros(4, 512)
    slots = torch.arange(4)
    kernels.store_window(kv, norm, rotation, 1e-6, True, found, slots)
    ref.store_window(kv, norm, rotation, 1e-6, True, wanted, slots)
    assert (found[:, :448] != wanted[:, :448]).sum() <= 2
    assert ((found - wanted).abs() <= 2.0**-3 * wanted.abs() + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_s_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    inputs = Inputs()
    q, rotation = inputs.outliers(5, 3, 96, dtype=dtype), inputs.rotation(5, 32)
    together = kernels.prepare_query(q.clone(), rotation, 1e-6)
    alone = kernels.prepare_query(q[3:4].clone(), rotation[3:4], 1e-6)
    assert torch.equal(together[3:4], alone)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    inputs = Inputs()
    rotation = inputs.rotation(1, 8)
    with pytest.raises(ValueError, match=r"even number .* got 33 and 8"):
        kernels.prepare_query(inputs.normal(1, 2, 33), rotation, 1e-6)
    with pytest.raises(ValueError, match="lie together"):
        kernels.inverse_rope(inputs.normal(1, 32, 2).mT, rotation)
    with pytest.raises(ValueError, match="rotation must be contiguous"):
        kernels.inverse_rope(inputs.normal(1, 2, 32), rotation.expand(1, 4, 2).mT.mT[:, ::2])
