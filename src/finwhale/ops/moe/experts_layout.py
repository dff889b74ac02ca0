"""The layout of FP4 experts that the Triton and Gluon kernels read, and its conversion kernel.

A weight enters the tensor cores as E4M3, exactly: each group's exponent is stored as its difference
from the row's largest one, and E4M3 holds an FP4 value times 2^-11 to 2^0. The kernels look up four
magnitudes at once in a table of eight bytes, to which they add the group's exponent bits. For that
lookup, the bits within every 64 bytes are reordered. Loading converts the experts once, in place.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import logging
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.moe import EXPONENT_SPREAD, Dispatched, ExpertWeight

logger = logging.getLogger(__name__)

GROUP = 128  # activations that share a scale


@dataclass(frozen=True, slots=True)
class TiledExperts(ExpertWeight):
    """FP4 weights after `tile_experts`, in the decoder's order.

    Attributes:
        scale13, scale2: uint8 of the scales' shapes: a group's exponent bits, 8 (11 - d), where d
            is the difference between the row's largest exponent and the group's. The kernels add
            them to the E4M3 bytes of the group's codes.
        row_scale13, row_scale2: float32 [E,2I] and [E,D]: the factor of a row's decoded values.
    """

    row_scale13: Tensor | None = None
    row_scale2: Tensor | None = None

    def gate_up(self) -> tuple[Tensor, Tensor, Tensor]:
        """w13, its exponent bits as words of four groups, and its row scales."""
        assert self.scale13 is not None and self.row_scale13 is not None
        return self.w13, self.scale13.view(torch.int32), self.row_scale13

    def down(self) -> tuple[Tensor, Tensor, Tensor]:
        """w2, its exponent bits as words of four groups, and its row scales."""
        assert self.scale2 is not None and self.row_scale2 is not None
        return self.w2, self.scale2.view(torch.int32), self.row_scale2


@triton.jit
def _code_times(code, halvings):
    """The FP4 code, 0 to 7, that is nearest to a code's value times 2^-halvings; ties to even."""
    exponent = code >> 1
    mantissa = tl.where(code > 1, 2 + (code & 1), code)
    value = (mantissa << tl.where(code > 1, exponent - 1, 0)).to(tl.float32) * 0.5
    value = value * tl.exp2(-halvings.to(tl.float32))
    found = (value > 0.25).to(tl.int32) + (value >= 0.75).to(tl.int32)
    found += (value > 1.25).to(tl.int32) + (value >= 1.75).to(tl.int32)
    found += (value > 2.5).to(tl.int32) + (value >= 3.5).to(tl.int32)
    return found + (value > 5.0).to(tl.int32)


@triton.jit
def _tile_kernel(
    w_ptr,
    scale_ptr,
    tiled_ptr,
    exponent_bits_ptr,
    row_scale_ptr,
    changed_ptr,
    K,
    rows,
    PAIRED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Convert BLOCK_R rows of K values of an expert; `tile_experts` describes the layout."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.arange(0, BLOCK_G)
    is_group = (group < K // 32)[None, :]
    mask = (group < K // 32)[None, :, None]
    scale_ptrs = scale_ptr + row[:, None] * (K // 32)
    row_ptrs = w_ptr + row[:, None, None] * (K // 2)
    scale = tl.load(scale_ptrs + group[None, :], mask=is_group, other=0).to(tl.int32)
    target = (group[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
    raw = tl.load(row_ptrs + target, mask=mask, other=0).to(tl.int32)
    used = (tl.max(raw & 0x77, axis=2) > 0) & is_group
    largest = tl.max(tl.where(used, scale, 0), axis=1)
    below = largest[:, None] - scale
    exponent_bits = 8 * (SPREAD - tl.where(used, tl.minimum(below, SPREAD), 0))
    # A byte of the result is 64 b + 4 i + t of its row: block b of 128 values, word i, byte t.
    t = target & 3
    start = (target & -64) + ((target >> 1) & 30)
    magnitudes = start + tl.where(t < 2, t, t + 30)
    signs = start + (t >> 1)
    shift = 4 * (t & 1) + 3
    both = tl.load(row_ptrs + magnitudes, mask=mask, other=0).to(tl.int32) & 0x77
    first = (tl.load(row_ptrs + signs, mask=mask, other=0).to(tl.int32) >> shift) & 1
    second = (tl.load(row_ptrs + signs + 32, mask=mask, other=0).to(tl.int32) >> shift) & 1
    # Round values whose group's exponent is too far below the row's largest.
    exponent = tl.load(scale_ptrs[:, :, None] + magnitudes // 16, mask=mask, other=0).to(tl.int32)
    halvings = tl.maximum(largest[:, None, None] - exponent - SPREAD, 0)
    halvings = tl.where(both > 0, halvings, 0)
    low, high = both & 7, both >> 4
    changed = tl.where(halvings > 0, (low > 0).to(tl.int32) + (high > 0).to(tl.int32), 0)
    low = tl.where(halvings > 0, _code_times(low, halvings), low)
    high = tl.where(halvings > 0, _code_times(high, halvings), high)
    tiled = low | (high << 4) | (first << 7) | (second << 3)
    if PAIRED:
        half = rows // 2
        i = row % half
        tile = i // 32
        tile_row = (i % 32) // 8 * 16 + row // half * 8 + i % 8
    else:
        tile = row // 64
        tile_row = row % 64
    chunk = (tile * (K // 128))[:, None, None] + target // 64
    tiled_ptrs = tiled_ptr + (chunk * 64 + tile_row[:, None, None]) * 64 + target % 64
    tl.store(tiled_ptrs, tiled.to(tl.uint8), mask=mask)
    chunk = (tile * (K // 128))[:, None] + group[None, :] // 4
    exponent_bits_ptrs = (
        exponent_bits_ptr + (chunk * 64 + tile_row[:, None]) * 4 + group[None, :] % 4
    )
    tl.store(exponent_bits_ptrs, exponent_bits.to(tl.uint8), mask=is_group)
    bits = tl.where(largest == 255, 0x7FC00000, tl.maximum(largest - 6, 1) << 23)
    tl.store(row_scale_ptr + tile * 64 + tile_row, bits.to(tl.float32, bitcast=True))
    tl.store(changed_ptr + row, tl.sum(tl.sum(changed, axis=2), axis=1))


def finish_experts(w: ExpertWeight) -> TiledExperts:
    """Call `tile_experts`, and log a warning if it had to round values."""
    tiled, rounded = tile_experts(w)
    # Without weights (the meta device), nothing was rounded.
    count = 0 if rounded.is_meta else int(rounded)
    if count:
        logger.warning(
            "rounded %d values of FP4 experts: the exponents of their rows differ too much", count
        )
    return tiled


def tile_experts(w: ExpertWeight) -> tuple[TiledExperts, Tensor]:
    """Convert the checkpoint's layout to the kernels' layout, in place.

    Takes w13 uint8 [E,2I,D/2], scale13 uint8 [E,2I,D/32], w2 [E,D,I/2], scale2 [E,D,I/32], all
    contiguous, D and I multiples of 128. The shapes do not change. Afterwards, an expert's memory
    has tiles of 64 rows, and a tile has blocks of 128 columns: [tiles, blocks, 64, 64 bytes] and
    [tiles, blocks, 64, 4 groups], so that a program reads memory in order. A tile of w13 has eight
    rows of w1, then the same eight rows of w3, and so on. Word i of a block's row has the
    magnitudes of values 4 i to 4 i + 3 and 64 + 4 i to 64 + 4 i + 3 in bits 0-2, 4-6, .. The signs
    are bits 7, 15, 23, 31 for the first four values, and 3, 11, 19, 27 for the others.

    A group keeps every value exactly if its exponent is at most 11 less than the row's largest
    (groups of zeros do not count). Values of other groups are rounded to a step of 2^-12 of the
    largest group's. Returns the weights and the number of rounded values, an int64 on the device.
    """
    row_scale13, changed13 = _tile(w.w13, w.scale13, paired=True)
    row_scale2, changed2 = _tile(w.w2, w.scale2, paired=False)
    scales = w.scale13, w.scale2, w.scale_block, row_scale13, row_scale2
    tiled = TiledExperts(w.w13, w.w2, w.input_group, *scales)
    return tiled, changed13 + changed2


def _tile(w: Tensor, scale: Tensor | None, *, paired: bool) -> tuple[Tensor, Tensor]:
    experts, rows, row_bytes = w.shape
    scale = check_fp4(w, scale)
    if row_bytes % 64 or rows % 128:
        raise ValueError(
            f"weights must have rows and values in a row multiples of 128, got {w.shape}"
        )
    row_scale = torch.empty((experts, rows), dtype=torch.float32, device=w.device)
    changed = torch.empty((experts, rows), dtype=torch.int32, device=w.device)
    tiled, exponent_bits = torch.empty_like(w[0]), torch.empty_like(scale[0])
    block_g = triton.next_power_of_2(row_bytes // 16)
    block_r = max(1, min(128, 256 // block_g))
    for e in range(experts):
        _tile_kernel[(rows // block_r,)](
            *(w[e], scale[e], tiled, exponent_bits, row_scale[e], changed[e]),
            *(row_bytes * 2, rows),
            PAIRED=paired,
            BLOCK_R=block_r,
            BLOCK_G=block_g,
            SPREAD=EXPONENT_SPREAD,
            num_warps=4,
        )
        w[e] = tiled
        scale[e] = exponent_bits
    return row_scale, changed.sum()


def check_fp4(w: Tensor, scale: Tensor | None) -> Tensor:
    """Raise ValueError unless both are contiguous uint8; returns the scale."""
    if w.dtype != torch.uint8 or scale is None or scale.dtype != torch.uint8:
        raise ValueError(f"weights must be FP4 with E8M0 scales, both as uint8, got {w.dtype}")
    if not (w.is_contiguous() and scale.is_contiguous()):
        raise ValueError(f"weights and scales must be contiguous, got strides {w.stride()}")
    return scale


def check_inputs(
    x_ND: Tensor, weights_NK: Tensor, pairs: Dispatched, w: ExpertWeight
) -> TiledExperts:
    """Raise ValueError if the kernels do not support these arguments; returns the weights."""
    if not isinstance(w, TiledExperts):
        raise ValueError("these kernels read FP4 weights in the layout of `finish_experts`")
    check_rows(x_ND, weights_NK, pairs, w, GROUP)
    return w


def check_rows(
    x_ND: Tensor, weights_NK: Tensor, pairs: Dispatched, w: ExpertWeight, group: int
) -> None:
    """Raise ValueError unless the inputs fit FP4 weights, whose columns are whole groups."""
    experts, width, row_bytes = w.w2.shape
    if x_ND.dtype != torch.bfloat16 or x_ND.stride(1) != 1:
        raise ValueError(f"x must be bfloat16 rows, got {x_ND.dtype}, strides {x_ND.stride()}")
    if x_ND.shape[1] != width or width % group or row_bytes * 2 % group:
        raise ValueError(
            f"x {tuple(x_ND.shape)} does not fit w2 {tuple(w.w2.shape)} in groups of {group}"
        )
    if not (pairs.ids.is_contiguous() and weights_NK.is_contiguous()):
        raise ValueError("ids and weights must be contiguous")
    if w.w13.shape != (experts, 4 * row_bytes, width // 2):
        raise ValueError(f"w13 {tuple(w.w13.shape)} does not fit w2 {tuple(w.w2.shape)}")
