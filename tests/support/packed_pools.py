"""Packs rows and index keys as the cache stores them (the layouts of attention and indexer)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.indexer.layout import MAX_SPREAD
from finwhale.ops.rounding import scaled_e4m3, scaled_fp4


def pack_rows(rows_PC: Tensor, rows_per_page: int, rope_dim: int) -> Tensor:
    """rows [P,C] of a float dtype as a packed pool [ceil(P / rows_per_page), page_bytes] uint8.

    The nope part is rounded as rounding.round_e4m3 does, the rope part to bfloat16. In the last
    page, rows past P are zeros.
    """
    num_rows, head_dim = rows_PC.shape
    record = RopeRow(head_dim, rope_dim)
    values, groups = record.value_bytes, record.num_groups
    num_pages = -(-num_rows // rows_per_page)
    rows = F.pad(rows_PC.float(), (0, 0, 0, num_pages * rows_per_page - num_rows))
    nope = F.pad(rows[:, :-rope_dim], (0, groups * NOPE_GROUP - (head_dim - rope_dim)))
    rounded, scale = scaled_e4m3(nope, NOPE_GROUP)
    rope = rows[:, -rope_dim:].to(torch.bfloat16).view(torch.uint8)
    exponent = (scale.view(torch.int32) >> 23).to(torch.uint8)

    pool = torch.zeros(
        num_pages,
        record.page_bytes(rows_per_page),
        dtype=torch.uint8,
        device=rows_PC.device,
    )
    value_part, scale_part = page_parts(pool, rows_per_page, values, record.scale_bytes)
    packed = torch.cat((rounded.view(torch.uint8)[:, : head_dim - rope_dim], rope), 1)
    value_part.copy_(packed.view(num_pages, rows_per_page, values))
    scale_part[..., :groups].copy_(exponent.view(num_pages, rows_per_page, groups))
    return pool


def page_parts(pool: Tensor, rows_per_page: int, values: int, scales: int) -> tuple[Tensor, Tensor]:
    """Views of a pool: [pages, rows, value bytes] and [pages, rows, scale bytes]."""
    middle, end = rows_per_page * values, rows_per_page * (values + scales)
    return (
        pool[:, :middle].unflatten(1, (rows_per_page, values)),
        pool[:, middle:end].unflatten(1, (rows_per_page, scales)),
    )


def pack_keys(keys: Tensor, rows_per_page: int) -> Tensor:
    """Keys [rows, C] of a float dtype, rows a multiple of rows_per_page -> uint8 [pages, bytes].

    The keys are rounded to FP4, not rotated. A key that is already rounded stays exact if its
    exponents differ by at most MAX_SPREAD.
    """
    scale = scaled_fp4(keys)[1]
    least = scale.amax(-1, keepdim=True) * 2.0**-MAX_SPREAD
    codes, scale = scaled_fp4(keys, least)
    pages = keys.shape[0] // rows_per_page
    size, sign = codes & 7, (codes >> 3).unflatten(1, (-1, 2, 4))
    signs = (sign[:, :, 1] << 3 | sign[:, :, 0] << 7).flatten(1)
    words = size[:, 0::2] | size[:, 1::2] << 4 | signs
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return torch.cat((words.view(pages, -1), exponents.view(pages, -1)), 1)
