"""The numeric formats of a checkpoint's weights in plain torch: FP8 blocks, FP4 rows, E8M0 scales.

FP8 block: e4m3 values [out, in], one scale per BxB block: [ceil(out/B), ceil(in/B)], B 128 or 32.
FP8 row: e4m3 values [rows, in], one scale per 1x32: [rows, in/32].
FP4: two e2m1 values a byte along the last axis, the low nibble is the even k: int8 [..., in/2], one
scale per 1x32: [..., in/32]. E8M0: a byte b means 2^(b - 127); 255 means NaN (OCP Microscaling
Formats 1.0, section 5.4.1). The code reads and writes scales only as bytes, because devices differ
in how they round values to E8M0.

All functions run on any device and process slices of rows, to avoid a full-size float32 copy.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from finwhale.errors import CheckpointError
from finwhale.number_formats import E2M1_MAX, E4M3_MAX, e2m1_codes, e2m1_values

FP4_BLOCK = ROW_BLOCK = 32
E8M0_BIAS = 127
E8M0_NAN = 255

_SLICE_ELEMENTS = 1 << 24


def e8m0_bytes(scale: Tensor) -> Tensor:
    """View a float8_e8m0fnu or uint8 tensor as exponent bytes (uint8)."""
    assert scale.dtype in (torch.float8_e8m0fnu, torch.uint8), scale.dtype
    return scale.view(torch.uint8)


def e8m0_to_float32(scale: Tensor) -> Tensor:
    """2^(b - 127) as float32, exact for every byte (0 is the subnormal 2^-127, 255 is NaN)."""
    raw = e8m0_bytes(scale).int()
    bits = torch.where(raw == 0, 0x0040_0000, raw << 23)
    bits = torch.where(raw == E8M0_NAN, 0x7FC0_0000, bits)
    return bits.view(torch.float32)


def scale_to_float32(scale: Tensor) -> Tensor:
    """A scale tensor, float8_e8m0fnu or float32, as float32."""
    return scale if scale.dtype == torch.float32 else e8m0_to_float32(scale)


def find_nan(data: Tensor, scale: Tensor | None) -> str | None:
    """Describe a value of a stored weight that is not finite; None if all are finite.

    Checks e4m3 codes, float32 and E8M0 scales, and plain floating values.
    """
    if scale is not None and not_finite(scale):
        return "a scale that is not finite" if scale.dtype == torch.float32 else fault(scale.dtype)
    return fault(data.dtype) if not_finite(data) else None


def fault(dtype: torch.dtype) -> str:
    """Describe the fault of a tensor of this dtype that is not finite."""
    return {
        torch.float8_e8m0fnu: f"the E8M0 scale code {E8M0_NAN}, which means NaN",
        torch.float8_e4m3fn: "an E4M3 NaN code",
    }.get(dtype, "a value that is not finite")


def not_finite(stored: Tensor) -> Tensor:
    """Whether any value is infinite or NaN: a bool on the tensor's device.

    The host does not wait, and no temporary tensor is as large as `stored`.

    Args:
        stored: a tensor in its stored form. FP4 codes and integers are always finite.
    """
    dtype = stored.dtype
    if not stored.numel() or not dtype.is_floating_point:
        return torch.zeros((), dtype=torch.bool, device=stored.device)
    if dtype == torch.float8_e8m0fnu:
        return e8m0_bytes(stored).amax() == E8M0_NAN
    if dtype == torch.float8_e4m3fn:
        # 0xFF is the largest byte and 0x7F the largest signed one.
        return (stored.view(torch.uint8).amax() == 0xFF) | (stored.view(torch.int8).amax() == 0x7F)
    # aminmax propagates NaN. Zero times infinity or NaN is NaN, which differs from every number.
    low, high = torch.aminmax(stored)
    return low * 0 != high * 0


def _power_of_two_scales(amax: Tensor, limit: float) -> Tensor:
    """The E8M0 bytes (uint8) of the smallest powers of two s with amax <= limit * s.

    amax: float32, any shape. A zero amax gets scale 1; a result under 2^-127 becomes 2^-127.
    Exact: compares mantissas instead of dividing.
    """
    limit_mantissa, limit_exponent = torch.frexp(torch.tensor(limit))
    mantissa, exponent = torch.frexp(amax)
    up = (mantissa > limit_mantissa.item()).int()
    raw = (exponent - int(limit_exponent) + up + E8M0_BIAS).clamp_(0, E8M0_NAN - 1)
    return torch.where(amax == 0, E8M0_BIAS, raw).to(torch.uint8)


def _reciprocal(raw: Tensor) -> Tensor:
    """1 / scale as float32 for E8M0 bytes under 254."""
    return e8m0_to_float32(2 * E8M0_BIAS - raw)


def fp8_scale_shape(shape: tuple[int, ...], block: int = 128) -> tuple[int, int]:
    """The shape of the scales of an FP8 weight [out, in]."""
    rows, columns = shape
    return -(-rows // block), -(-columns // block)


def quantise_fp8_block(
    weight: Tensor, scale_dtype: torch.dtype = torch.float8_e8m0fnu, block: int = 128
) -> tuple[Tensor, Tensor]:
    """Round a weight to e4m3 with one scale per block.

    Args:
        weight: [out, in], floating; any sizes, the last block of a row or column may be partial.
        scale_dtype: float8_e8m0fnu (amax/448 rounded up to a power of two) or float32 (amax/448).
        block: rows and columns of a block.

    Returns:
        float8_e4m3fn [out, in] and the scales [ceil(out/B), ceil(in/B)]; weight is their
        product up to rounding to nearest even. A zero block has scale 1.

    Raises:
        CheckpointError: the weight has a value that is not finite.
    """
    assert weight.dim() == 2 and scale_dtype in (torch.float8_e8m0fnu, torch.float32)
    rows, columns = weight.shape
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(fp8_scale_shape((rows, columns), block), device=weight.device)
    raw = torch.empty_like(scale, dtype=torch.uint8)
    for start, stop in row_slices(rows, columns, block):
        part = weight[start:stop].to(torch.float32, copy=True)
        amax = _block_amax(part, block)
        _check_finite(amax)
        blocks = slice(start // block, -(-stop // block))
        if scale_dtype == torch.float32:
            smallest = torch.finfo(torch.float32).tiny
            scale[blocks] = torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp_min(smallest))
            inverse = scale[blocks].reciprocal()
        else:
            raw[blocks] = _power_of_two_scales(amax, E4M3_MAX)
            inverse = _reciprocal(raw[blocks])
        _multiply_blocks(part, inverse, block)
        data[start:stop] = part.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return data, scale if scale_dtype == torch.float32 else raw.view(torch.float8_e8m0fnu)


def dequantise_fp8_block(
    data: Tensor, scale: Tensor, dtype: torch.dtype, block: int = 128
) -> Tensor:
    """e4m3 [out, in] times its block scales (E8M0 or float32), computed in float32, as dtype."""
    assert data.dim() == 2 and tuple(scale.shape) == fp8_scale_shape(tuple(data.shape), block)
    factors = scale_to_float32(scale)
    rows, columns = data.shape
    out = torch.empty(rows, columns, dtype=dtype, device=data.device)
    for start, stop in row_slices(rows, columns, block):
        part = data[start:stop].float()
        _multiply_blocks(part, factors[start // block : -(-stop // block)], block)
        out[start:stop] = part
    return out


def _block_amax(part: Tensor, block: int) -> Tensor:
    """The largest magnitude of each block of float32 [rows, columns]; NaN stays NaN."""
    rows, columns = part.shape
    if rows % block or columns % block:
        missing = (0, -columns % block, 0, -rows % block)
        part = torch.nn.functional.pad(part, missing)
    low, high = torch.aminmax(part.view(len(part), -1, block), dim=2)
    return torch.maximum(high, -low).view(-1, block, low.shape[1]).amax(1)


def _multiply_blocks(part: Tensor, factors: Tensor, block: int) -> None:
    """Multiply float32 [rows, columns] in place by one factor per block."""
    rows, columns = part.shape
    by_row = factors.repeat_interleave(block, 0)[:rows]
    whole = columns // block
    if whole:
        split = part[:, : whole * block].view(rows, whole, block)
        split.mul_(by_row[:, :whole, None])
    if columns % block:
        part[:, whole * block :].mul_(by_row[:, whole:])


def row_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight [..., in] with one for each 1x32 values, FP8 or FP4."""
    return *shape[:-1], shape[-1] // ROW_BLOCK


def dequantise_fp8_rows(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 [rows, in] times its E8M0 scales [rows, in/32], computed in float32, as dtype."""
    assert tuple(scale.shape) == row_scale_shape(tuple(data.shape)), (data.shape, scale.shape)
    values: Tensor = data.float().unflatten(1, (-1, ROW_BLOCK))
    return values.mul_(e8m0_to_float32(scale)[..., None]).flatten(1).to(dtype)


def quantise_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to packed e2m1 with one power-of-two scale per 32 values of a row.

    Args:
        weight: [..., in], floating, in a multiple of 32.

    Returns:
        int8 [..., in/2], the low nibble the even k, and float8_e8m0fnu [..., in/32]: the smallest
        power of two that is at least amax/6. Values round to nearest even.

    Raises:
        CheckpointError: the weight has a value that is not finite, or in is no multiple of 32.
    """
    columns = weight.shape[-1]
    if columns % FP4_BLOCK:
        raise CheckpointError(
            f"FP4 needs rows of a multiple of {FP4_BLOCK} values, got a weight of shape "
            f"{list(weight.shape)}"
        )
    flat = weight.reshape(-1, columns)
    packed = torch.empty(flat.shape[0], columns // 2, dtype=torch.uint8, device=weight.device)
    raw = torch.empty(flat.shape[0], columns // FP4_BLOCK, dtype=torch.uint8, device=weight.device)
    for start, stop in row_slices(flat.shape[0], columns, 1):
        part = flat[start:stop].to(torch.float32, copy=True).view(stop - start, -1, FP4_BLOCK)
        low, high = torch.aminmax(part, dim=2)
        amax = torch.maximum(high, -low)
        _check_finite(amax)
        raw[start:stop] = _power_of_two_scales(amax, E2M1_MAX)
        part.mul_(_reciprocal(raw[start:stop])[:, :, None])
        signs = torch.signbit(part).to(torch.uint8) << 3
        codes = (e2m1_codes(part.abs()) | signs).view(stop - start, columns)
        packed[start:stop] = codes[:, 0::2] | (codes[:, 1::2] << 4)
    lead = weight.shape[:-1]
    return (
        packed.view(torch.int8).view(*lead, columns // 2),
        raw.view(torch.float8_e8m0fnu).view(*lead, columns // FP4_BLOCK),
    )


def dequantise_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed e2m1 [..., in/2] times its scales [..., in/32], computed in float32, as dtype."""
    lead, half = packed.shape[:-1], packed.shape[-1]
    assert tuple(scale.shape) == (*lead, half * 2 // FP4_BLOCK), (packed.shape, scale.shape)
    values = e2m1_values(packed.device)
    # float32 [256, 2]: the values of a byte's low and high nibble.
    table = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    codes = packed.reshape(-1, half).view(torch.uint8)
    factors = scale_to_float32(scale).reshape(codes.shape[0], -1)
    out = torch.empty(codes.shape[0], half * 2, dtype=dtype, device=packed.device)
    for start, stop in row_slices(codes.shape[0], half * 2, 1):
        pairs = table.index_select(0, codes[start:stop].reshape(-1).int())
        part = pairs.view(stop - start, -1, FP4_BLOCK).mul_(factors[start:stop, :, None])
        out[start:stop] = part.view(stop - start, half * 2)
    return out.view(*lead, half * 2)


def row_slices(rows: int, columns: int, multiple: int) -> Iterator[tuple[int, int]]:
    """(start, stop) over the rows, each slice a multiple of `multiple` rows but the last."""
    step = max(_SLICE_ELEMENTS // max(columns, 1) // multiple, 1) * multiple
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _check_finite(amax: Tensor) -> None:
    if not_finite(amax):
        raise CheckpointError("a weight with a value that is not finite cannot be quantised")
