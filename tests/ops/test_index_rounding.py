"""The rounding of index queries and keys: Hadamard rotation, FP4, and how keys are packed.

The oracle searches all e2m1 values for the nearest one, in float64, and multiplies by the matrix as
written out: no code in common with the definition.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from tests.support.op_arguments import outliers
from tests.support.op_case import Draw
from tests.support.packed_pools import pack_keys
from tests.support.packing import unpack_keys
from torch import Tensor

from finwhale.ops.indexer import cpu
from finwhale.ops.indexer.layout import IndexKey
from finwhale.ops.rounding import hadamard, rotate_to_fp4, scaled_fp4, unscaled_fp4

from .test_references import E2M1, f64, naive_fp4, naive_hadamard

VALUES = [value for _, value in E2M1]
MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise(VALUES)]


def rounded(x: Tensor) -> Tensor:
    """To FP4, not rotated."""
    return unscaled_fp4(*scaled_fp4(x))


def grid(scale: float = 1.0) -> Tensor:
    """[2, 32]: all values, all ties and their neighbours in float32, in groups that hold a 6."""
    ties = torch.tensor(MIDDLES)
    up, down = ties.nextafter(torch.tensor(8.0)), ties.nextafter(torch.tensor(0.0))
    half = torch.cat((torch.tensor(VALUES), ties, up, down, torch.full((3,), 6.0)))
    return torch.stack((half, -half)) * scale


def test_the_values_are_those_of_e2m1() -> None:
    assert VALUES == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    found = unscaled_fp4(codes, torch.tensor([4.0]))[:16].tolist()
    assert found == [4 * v for v in VALUES] + [-4 * v for v in VALUES]


@pytest.mark.parametrize("exponent", [-120, -3, 0, 7, 90])
def test_every_value_tie_and_neighbour_of_a_tie(exponent: int) -> None:
    x = grid(2.0**exponent)
    found = f64(rounded(x)) * 2.0**-exponent
    assert np.array_equal(found, [naive_fp4(row) for row in f64(x) * 2.0**-exponent])
    # By hand: ties go to the value whose mantissa bit is 0.
    ties = torch.tensor([*MIDDLES, *[6.0] * 25])
    assert rounded(ties)[:7].tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_scales_at_their_boundaries() -> None:
    """amax / 6 is rounded up: 6 * 2^k has the scale 2^k, the next float32 above it 2^(k+1)."""
    for k in (-126, -125, -10, 0, 30, 120):
        largest = torch.tensor(6.0 * 2.0**k)
        above, below = largest.nextafter(2 * largest), largest.nextafter(0 * largest)
        for amax, wanted in ((largest, k), (above, k + 1), (below, k)):
            x = torch.zeros(32)
            x[5] = -amax
            assert scaled_fp4(x)[1].tolist() == [2.0**wanted]


def test_smallest_groups() -> None:
    """amax is at least 6 * 2^-126: what is smaller rounds at the scale 2^-126, subnormals too."""
    for x in (
        torch.zeros(32),
        torch.tensor([2.0**-149] * 32),
        torch.tensor([2.0**-128, 2.0**-127, 1.25 * 2.0**-126, 1.75 * 2.0**-126, *[0.0] * 28]),
    ):
        assert scaled_fp4(x)[1].tolist() == [2.0**-126]
        assert np.array_equal(f64(rounded(x)), naive_fp4(f64(x)))
        found = x.numpy().copy()
        cpu.round_fp4(found)
        assert torch.equal(rounded(x), torch.from_numpy(found))
    x = torch.tensor([2.0**-128, 3 * 2.0**-128, 2.0**-127, *[0.0] * 29])
    assert (rounded(x)[:3] * 2.0**126).tolist() == [0, 1.0, 0.5]


@pytest.mark.parametrize("width", [1, 2, 16, 32, 64, 128, 512])
def test_random_values(width: int) -> None:
    draw = Draw()
    for x in (draw.normal(40, width), outliers(draw, 40, width), draw.normal(9, width) * 1e-30):
        codes, scale = scaled_fp4(x)
        assert codes.dtype == torch.uint8 and scale.shape == (len(x), max(1, width // 32))
        assert np.array_equal(f64(unscaled_fp4(codes, scale)), [naive_fp4(row) for row in f64(x)])


@pytest.mark.parametrize("width", [1, 2, 4, 32, 64, 128, 256])
def test_the_hadamard_matrix(width: int) -> None:
    """Sylvester's, by its recursion and by its closed form; orthogonal and symmetric."""
    found = f64(hadamard(torch.eye(width)))
    wanted = np.ones((1, 1))
    while len(wanted) < width:
        wanted = np.block([[wanted, wanted], [wanted, -wanted]])
    assert np.array_equal(np.sign(found), wanted)
    assert np.allclose(np.abs(found), width**-0.5, rtol=1e-7, atol=0)
    assert np.array_equal(found, found.T)
    assert np.allclose(found @ found, np.eye(width), atol=1e-6)
    x = outliers(Draw(), 3, width)
    unit = x.double().norm(dim=1)[:, None].numpy() + 1e-30
    assert (np.abs(f64(hadamard(x)) - [naive_hadamard(r) for r in f64(x)]) / unit).max() < 1e-6


def test_dot_products_keep_their_values_under_rotation() -> None:
    q, k = Draw(1).normal(8, 128), Draw(2).normal(50, 128)
    found, wanted = hadamard(q).double() @ hadamard(k).double().T, q.double() @ k.double().T
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("width", [0, 3, 48, 100])
def test_other_widths_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        hadamard(torch.zeros(2, width))


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (5, 16), (700, 3)])
def test_the_cpu_s_rounding(width: int, shape: tuple[int, ...]) -> None:
    """The same bits after the rotation; sums of whole numbers are exact, so the same altogether."""
    draw = Draw()
    for x in (outliers(draw, *shape, width), draw.normal(*shape, width) * 1e-38):
        found = x.numpy().copy()
        cpu.round_fp4(found)
        assert torch.equal(torch.from_numpy(found), rounded(x))
    x = draw.integers(100, *shape, width, low=-99).float()
    before = x.clone()
    assert torch.equal(torch.from_numpy(cpu.rotate_to_fp4(x.numpy())), rotate_to_fp4(x))
    assert torch.equal(x, before)
    # Of real values a sum may round otherwise, which changes one value in millions.
    x = outliers(draw, *shape, width)
    same = torch.from_numpy(cpu.rotate_to_fp4(x.numpy())) == rotate_to_fp4(x)
    assert same.double().mean() > 0.999


def test_bfloat16_holds_every_result() -> None:
    x = outliers(Draw(), 50, 128)
    assert torch.equal(rotate_to_fp4(x.bfloat16()).float(), rotate_to_fp4(x.bfloat16().float()))


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_packed_keys_are_what_was_rounded(width: int) -> None:
    keys = rotate_to_fp4(outliers(Draw(), 128, width) * 1e-3)
    pool = pack_keys(keys, 64)
    assert pool.shape == (2, IndexKey(width).page_bytes(64)) and pool.dtype == torch.uint8
    assert torch.equal(unpack_keys(pool, 64, width), keys)
    # Pages may be longer than their keys.
    assert torch.equal(unpack_keys(torch.nn.functional.pad(pool, (0, 9)), 64, width), keys)


def test_offsets_of_a_page_s_values() -> None:
    """By hand: magnitudes are in order, signs are where layout.py says; exponents follow."""
    assert IndexKey(128).page_bytes(64) == 64 * 68
    keys = torch.zeros(4, 128)
    keys[1, 34], keys[1, 35] = 6.0, -0.5  # group 1, scale 1
    keys[3, 127] = -3.0 * 2.0**-9  # group 3: amax 3 * 2^-9 is 6 * 2^-10
    pool = pack_keys(keys, 2)
    codes, exponents = pool[:, :128].reshape(4, 64), pool[:, 128:].reshape(4, 4)
    # Values 2 and 3 of word 4, the sign of the latter in byte 3; value 7 of word 15.
    assert codes[1, 17] == 7 | 1 << 4 and codes[1, 19] == 1 << 7
    assert codes[3, 63] == 7 << 4 | 1 << 3
    assert codes.count_nonzero() == 3
    assert exponents.tolist() == [[1] * 4, [116, 127, 116, 116], [1] * 4, [106, 106, 106, 117]]


def test_rounding_moves_a_key_by_a_tenth() -> None:
    """That FP4 is coarse, and no coarser than e2m1: 4 to 20% of a normal key."""
    x = Draw().normal(64, 128)
    error = ((rotate_to_fp4(x) - hadamard(x)).norm(dim=1) / x.norm(dim=1)).max()
    assert 0.04 < error < 0.2 and math.isfinite(error)
