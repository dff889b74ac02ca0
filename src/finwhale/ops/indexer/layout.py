"""The layout of a page of packed index keys.

A key of C values is FP4: words of four bytes, each with the e2m1 codes of eight values, and an E8M0
byte for each 32 values: value = e2m1 * 2^(byte - 127). A page of P keys is P x C/2 bytes of codes,
then P x C/32 bytes of exponents: 68 bytes for a key of 128 values. Pools are uint8 [num_pages,
page_bytes] with a stride; slot s is the key of row s % P in page s // P.

Byte j of a word with the values 0 .. 7 holds, from its lowest bit on: the magnitude of value 2j in
three bits, the sign of value 4 + j, the magnitude of value 2j + 1, the sign of value j. So the
magnitudes are in the order in which a GPU's byte permutation reads them, and the signs of four
values are the highest bits of four bytes (after a shift for the last four).

No scale of a key is less than 2^-11 of the key's largest scale, so e2m1 * 2^(byte - largest byte)
is exact in E4M3 for all values. A group whose own scale would be less is rounded with that least
scale, which costs less than 2^-14 of the key's largest value. In rotated keys, only groups of zeros
have such small scales.
"""

from dataclasses import dataclass

from finwhale.ops.rounding import fp4_group

# The largest difference between the exponents of a key.
MAX_SPREAD = 11


@dataclass(frozen=True, slots=True)
class IndexKey:
    """The record of a key of `width` values."""

    width: int

    @property
    def code_bytes(self) -> int:
        """Bytes of a key's codes."""
        return -(-self.width // 2)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a key's exponents: one for each group."""
        return -(-self.width // fp4_group(self.width))

    def page_bytes(self, rows_per_page: int) -> int:
        """Bytes of a page of keys."""
        return rows_per_page * (self.code_bytes + self.scale_bytes)
