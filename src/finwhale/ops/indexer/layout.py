"""Packed index keys: how kernels and DeepGEMM's paged logits read a page of them.

A page of P keys of C values is P x C bytes of E4M3, then P float32 scales, each a power of two:
value = E4M3 * scale. Pools are uint8 [num_pages, page_bytes], a key a slot: slot s lies in page
s // P at row s % P.
"""

import torch
from torch import Tensor

from finwhale.ops.rounding import E4M3_MAX, MIN_AMAX, power_of_two_at_least

SCALE_BYTES = 4


def page_bytes(rows_per_page: int, width: int) -> int:
    """Bytes of a page of keys of `width` values."""
    return rows_per_page * (width + SCALE_BYTES)


def pack_keys(keys: Tensor, rows_per_page: int) -> Tensor:
    """Keys [rows, C] of a float dtype, rows a multiple of rows_per_page -> uint8 [pages, bytes].

    A key that is rounded already (one scale for all of it) is kept exactly.
    """
    values = keys.float()
    amax = values.abs().amax(-1, keepdim=True).clamp_(min=MIN_AMAX)
    scale = power_of_two_at_least(amax.mul_(1.0 / E4M3_MAX))
    rounded = (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    pages = keys.shape[0] // rows_per_page
    parts = (rounded.view(pages, -1), scale.view(torch.uint8).view(pages, -1))
    return torch.cat(parts, 1)


def unpack_keys(pool: Tensor, rows_per_page: int, width: int) -> Tensor:
    """Keys of packed pages uint8 [pages, bytes], as float32 [pages * rows_per_page, width]."""
    end = rows_per_page * width
    values = pool[:, :end].contiguous().view(torch.float8_e4m3fn).float().view(-1, width)
    scales = pool[:, end : end + rows_per_page * SCALE_BYTES].contiguous().view(torch.float32)
    return values * scales.view(-1, 1)
