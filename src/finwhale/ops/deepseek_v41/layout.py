"""The records of DeepSeek-V4.1's rows in the cache: window rows, entries and index keys.

    record       values                              scales                          bytes
    window row   512 of E4M3                         E8M0, one for each 32 values      528
    entry        512 of e2m1                         E4M3, one for each 16 values      288
    index key    128 of e2m1                         E8M0, one for each 32 values       68

A page of P rows is P rows of values, then P rows of scales of one byte each. A byte of two e2m1
codes has the value with the even number in its low bits. E8M0 means 2^(byte - 127). Row r of a pool
uint8 [num_pages, page_bytes] is row r % P of page r // P. Pages begin at multiples of 16 bytes.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from finwhale.ops.paging import CacheRows

PAGE_ALIGN = 16


@dataclass(frozen=True, slots=True)
class ScaledRow:
    """A row of `width` values that are rounded in groups, rope values too.

    Attributes:
        value_bits: 8 (E4M3) or 4 (e2m1).
        group: number of values that share a scale.
    """

    width: int
    value_bits: int
    group: int

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.width * self.value_bits // 8

    def page_bytes(self, rows_per_page: int) -> int:
        return rows_per_page * (self.value_bytes + self.width // self.group)


window_row = partial(ScaledRow, value_bits=8, group=32)
entry = partial(ScaledRow, value_bits=4, group=16)
index_key = partial(ScaledRow, value_bits=4, group=32)


def check_pool(rows: CacheRows, *records: ScaledRow) -> ScaledRow:
    """The one of the records that a pool's pages have.

    Raises:
        ValueError: the pages have none of these records, or do not begin at multiples of 16 bytes.
    """
    pool, rows_per_page = rows.pool, rows.table.rows_per_page
    wanted = [record.page_bytes(rows_per_page) for record in records]
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] not in wanted:
        sizes = " or ".join(map(str, wanted))
        raise ValueError(
            f"pages of {rows_per_page} rows of {records[0].width} values must be uint8 "
            f"[num_pages, {sizes}], got {pool.dtype} {list(pool.shape)}"
        )
    if pool.stride(1) != 1 or pool.stride(0) % PAGE_ALIGN:
        raise ValueError(
            f"a pool's pages must begin at multiples of {PAGE_ALIGN} bytes, got {pool.stride()}"
        )
    return records[wanted.index(pool.shape[1])]


def check_widths(values: Tensor, rotary_LR: Tensor, least: int) -> None:
    """Raise ValueError unless the rows are a power of two of values, at least `least`, contiguous.

    Args:
        values: [..., C].
    """
    width, rope = values.shape[-1], 2 * rotary_LR.shape[1]
    if width & (width - 1) or width < least or rope > width:
        raise ValueError(
            f"a row must have a power of two of values, {least} or more, and no more rope values: "
            f"got {width} and {rope}"
        )
    if values.stride(-1) != 1 or not rotary_LR.is_contiguous():
        raise ValueError(
            "a row's values and the rotary table must be contiguous, got strides "
            f"{values.stride()} and {rotary_LR.stride()}"
        )
