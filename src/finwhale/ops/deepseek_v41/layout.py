"""The record of DeepSeek-V4.1's rows in the cache. No kernel reads it yet."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaledRow:
    """A row of `width` values that are rounded in groups, rope values too.

    A page of P rows is P rows of values, then P rows of scales of one byte each. Window rows are
    E4M3 values with E8M0 scales in groups of 32: 528 bytes for 512 values. Entries are e2m1 values
    with E4M3 scales in groups of 16: 288 bytes.

    Attributes:
        value_bits: 8 (E4M3) or 4 (e2m1).
    """

    width: int
    value_bits: int
    group: int

    def page_bytes(self, rows_per_page: int) -> int:
        return rows_per_page * (self.width * self.value_bits // 8 + self.width // self.group)
