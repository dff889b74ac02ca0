"""FP8 blocks, FP4 rows and E8M0 scales against closed forms and torch's own e4m3 conversion."""

import math

import pytest
import torch
from torch import Tensor

from finwhale.checkpoint import formats
from finwhale.checkpoint.formats import (
    dequantise_fp4,
    dequantise_fp8_block,
    e8m0_to_float32,
    find_nan,
    quantise_fp4,
    quantise_fp8_block,
)
from finwhale.errors import CheckpointError

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_weight(*shape: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, so that blocks get different scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator)
    return weight * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), generator=generator))


def e8m0(*codes: int) -> Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def smallest_power_of_two(amax: float, limit: float) -> float:
    """By exact arithmetic on Python floats: the smallest 2^k with amax <= limit * 2^k."""
    if amax == 0:
        return 1.0
    k = -127
    while amax > math.ldexp(limit, k):
        k += 1
    return math.ldexp(1.0, k)


# --- E8M0 ---


def test_e8m0_every_code_is_its_power_of_two() -> None:
    values = e8m0_to_float32(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert values[:255].tolist() == [math.ldexp(1.0, b - 127) for b in range(255)]
    assert math.isnan(values[255])
    assert values[0] == 2.0**-127  # a float32 subnormal


@pytest.mark.parametrize("limit", [448.0, 6.0])
def test_scales_are_the_smallest_power_of_two(limit: float) -> None:
    exact = torch.tensor(limit)
    amax = torch.tensor(
        [
            0.0,
            1.0,
            limit,
            torch.nextafter(exact, torch.tensor(math.inf)).item(),
            torch.nextafter(exact, torch.tensor(0.0)).item(),
            limit * 2.0**-100,
            limit * 2.0**-127,
            2.0**-149,
            2.0**-130,
            torch.finfo(torch.float32).max,
        ]
    )
    raw = formats._power_of_two_scales(amax, limit)
    assert e8m0_to_float32(raw).tolist() == [
        smallest_power_of_two(value, limit) for value in amax.tolist()
    ]


# --- FP8 ---


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (1, 1), (130, 257), (100, 128), (7, 300)]
)
@pytest.mark.parametrize("size", [128, 32])
def test_fp8_equals_torch_conversion_block_by_block(shape: tuple[int, int], size: int) -> None:
    weight = random_weight(*shape)
    data, scale = quantise_fp8_block(weight, block=size)
    assert data.dtype == torch.float8_e4m3fn and data.shape == shape
    assert scale.dtype == torch.float8_e8m0fnu
    assert scale.shape == (math.ceil(shape[0] / size), math.ceil(shape[1] / size))
    restored = dequantise_fp8_block(data, scale, torch.float32, size)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(size * i, size * (i + 1)), slice(size * j, size * (j + 1)))
            factor = smallest_power_of_two(weight[block].abs().max().item(), 448.0)
            assert e8m0_to_float32(scale)[i, j] == factor
            codes = (weight[block] / factor).to(torch.float8_e4m3fn)
            assert torch.equal(data[block].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(restored[block], codes.float() * factor)


@pytest.mark.parametrize("shape", [(128, 256), (130, 257)])
def test_fp8_with_float32_scales(shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    data, scale = quantise_fp8_block(weight, torch.float32)
    assert scale.dtype == torch.float32
    corner = weight[:128, :128]
    factor = corner.abs().max() / 448
    assert scale[0, 0] == factor
    assert data.float().abs().max() == 448
    restored = dequantise_fp8_block(data, scale, torch.float32)
    assert torch.equal(restored[:128, :128], data[:128, :128].float() * factor)
    bound = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]] * 16
    assert bool(((restored - weight).abs() <= bound).all())  # half a step at 448 is 16


def test_fp8_round_trip_is_exact_for_its_own_values_and_bf16_holds_them() -> None:
    data, scale = quantise_fp8_block(random_weight(200, 200))
    values = dequantise_fp8_block(data, scale, torch.float32)
    again, again_scale = quantise_fp8_block(values)
    assert torch.equal(dequantise_fp8_block(again, again_scale, torch.float32), values)
    assert torch.equal(dequantise_fp8_block(data, scale, torch.bfloat16).float(), values)


def test_fp8_zero_and_tiny_blocks() -> None:
    weight = torch.zeros(128, 384)
    weight[0, 128] = 2.0**-149
    weight[0, 256] = 448 * 2.0**-127
    data, scale = quantise_fp8_block(weight)
    assert scale.view(torch.uint8).tolist() == [[127, 0, 0]]
    assert data[0, 128].float() == 0 and data[0, 256].float() == 448
    assert dequantise_fp8_block(data, scale, torch.float32)[0, 256] == 448 * 2.0**-127
    data, scale = quantise_fp8_block(weight, torch.float32)
    restored = dequantise_fp8_block(data, scale, torch.float32)
    assert bool(restored.isfinite().all()) and bool((restored[:, :128] == 0).all())


def test_fp8_accepts_bf16_slices_and_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(600, 130).bfloat16()
    whole = quantise_fp8_block(weight)
    values = dequantise_fp8_block(*whole, torch.float32)
    monkeypatch.setattr(formats, "_SLICE_ELEMENTS", 130 * 200)  # 128 rows at a time
    sliced = quantise_fp8_block(weight)
    for a, b in zip(whole, sliced, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(dequantise_fp8_block(*sliced, torch.float32), values)
    data, scale = quantise_fp8_block(torch.empty(0, 256))
    assert dequantise_fp8_block(data, scale, torch.float32).shape == (0, 256)


# --- FP4 ---


def test_fp4_low_nibble_is_the_even_position() -> None:
    # A byte by hand: low nibble 0x2 = 1.0 at k = 0, high nibble 0xF = -6.0 at k = 1.
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0xF2
    packed[0, 15] = 0x51  # 0.5 at k = 30, 3.0 at k = 31
    expected = torch.zeros(1, 32)
    expected[0, 0], expected[0, 1], expected[0, 30], expected[0, 31] = 1.0, -6.0, 0.5, 3.0
    stored = packed.view(torch.int8)
    assert torch.equal(dequantise_fp4(stored, e8m0(127)[None], torch.float32), expected)
    assert torch.equal(dequantise_fp4(stored, e8m0(126)[None], torch.float32), expected / 2)
    assert torch.equal(quantise_fp4(expected)[0].view(torch.uint8), packed)


def test_fp4_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes | (codes.flip(0) << 4)).view(torch.int8)[None]
    expected = torch.tensor(E2M1 + [-v for v in E2M1]).repeat(2)
    values = dequantise_fp4(packed, e8m0(127, 129)[None], torch.float32)[0]
    factor = torch.tensor([1.0, 4.0]).repeat_interleave(32)
    assert torch.equal(values[0::2], expected * factor[0::2])
    assert torch.equal(values[1::2], expected.flip(0) * factor[1::2])


def test_fp4_rounds_to_nearest_even() -> None:
    """Against a search over all codes; 6.0 in each row pins the scale to 1."""
    steps = torch.arange(-768, 769) / 128
    near = torch.cat([steps, torch.nextafter(steps, torch.tensor(0.0))])
    values = torch.zeros(near.numel() + -near.numel() % 31)
    values[: near.numel()] = near
    weight = torch.cat([torch.full((values.numel() // 31, 1), 6.0), values.view(-1, 31)], 1)
    packed, scale = quantise_fp4(weight)
    assert bool((scale.view(torch.uint8) == 127).all())
    got = dequantise_fp4(packed, scale, torch.float32).flatten().tolist()
    for value, rounded in zip(weight.flatten().tolist(), got, strict=True):
        code = min(range(8), key=lambda c: (abs(E2M1[c] - abs(value)), c % 2))
        assert rounded == math.copysign(E2M1[code], value)


@pytest.mark.parametrize("shape", [(3, 32), (33, 160), (2, 5, 64)])
def test_fp4_scales_and_shapes(shape: tuple[int, ...]) -> None:
    weight = random_weight(*shape)
    packed, scale = quantise_fp4(weight)
    assert packed.dtype == torch.int8 and packed.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.dtype == torch.float8_e8m0fnu and scale.shape == (*shape[:-1], shape[-1] // 32)
    amax = weight.unflatten(-1, (-1, 32)).abs().amax(-1)
    wanted = [smallest_power_of_two(v, 6.0) for v in amax.flatten().tolist()]
    assert e8m0_to_float32(scale).flatten().tolist() == wanted
    values = dequantise_fp4(packed, scale, torch.float32)
    factor = torch.tensor(wanted).view(amax.shape).repeat_interleave(32, -1)
    assert bool(((values - weight).abs() <= factor).all())  # half a step between 4 and 6
    assert torch.equal(dequantise_fp4(packed, scale, torch.bfloat16).float(), values)
    again, again_scale = quantise_fp4(values)
    assert torch.equal(dequantise_fp4(again, again_scale, torch.float32), values)


def test_fp4_slices_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(77, 64)
    packed, scale = quantise_fp4(weight)
    values = dequantise_fp4(packed, scale, torch.float32)
    monkeypatch.setattr(formats, "_SLICE_ELEMENTS", 64 * 10)
    assert torch.equal(quantise_fp4(weight)[0], packed)
    assert torch.equal(dequantise_fp4(packed, scale, torch.float32), values)


def test_fp4_zero_and_tiny_groups() -> None:
    weight = torch.zeros(1, 96)
    weight[0, 32], weight[0, 64] = 2.0**-149, 6 * 2.0**-127
    packed, scale = quantise_fp4(weight)
    assert scale.view(torch.uint8).tolist() == [[127, 0, 0]]
    assert dequantise_fp4(packed, scale, torch.float32)[0, 64] == 6 * 2.0**-127


def test_fp4_needs_whole_groups() -> None:
    with pytest.raises(CheckpointError, match=r"multiple of 32 values, got .* \[4, 40\]"):
        quantise_fp4(torch.zeros(4, 40))


# --- Faults ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_cannot_be_quantised(bad: float) -> None:
    weight = torch.zeros(130, 160)
    weight[129, 159] = bad
    for quantise in (quantise_fp4, quantise_fp8_block):
        with pytest.raises(CheckpointError, match="not finite"):
            quantise(weight)


def test_find_nan() -> None:
    data, scale = quantise_fp8_block(random_weight(130, 130))
    assert find_nan(data, scale) is None
    assert find_nan(data, e8m0(0, 254, 255, 1)) == "the E8M0 scale code 255, which means NaN"
    assert find_nan(data, torch.tensor([math.inf])) == "a scale that is not finite"
    for code in (0x7F, 0xFF):
        damaged = data.clone()
        damaged.view(torch.uint8)[129, 129] = code
        assert find_nan(damaged, scale) == "an E4M3 NaN code"
    assert find_nan(torch.tensor([1.0, math.nan]).bfloat16(), None) == "a value that is not finite"
    assert find_nan(torch.tensor([1, 2]), None) is None
