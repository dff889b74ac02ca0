"""The layout of packed rows for attention: the window's rows and the entries.

A packed pool is uint8 [num_pages, page_bytes]. With N = C - R nope values, R rope values and
G = ceil(N / 64) groups, a page of P rows is

    P rows of N + 2 R bytes: N E4M3 values, then R bfloat16 values (after rope);
    P rows of S bytes, S = G rounded up to 8: G exponents (E8M0: 2^(byte - 127)), one for each 64
    nope values, then zeros;
    zeros up to a multiple of 16 bytes.

Row r of the pool is row r % P of page r // P. A nope value is its E4M3 value times its group's
scale, which is exact in bfloat16. With C 512 and R 64, a row has 448 + 128 + 8 = 584 bytes, and a
page has the layout that FlashMLA reads on SM90 as [num_pages, P, 1, 584] with the pool's stride
(any multiple of 16). With C 128 and R 64, a row has 64 + 128 + 8 = 200 bytes.
"""

from dataclasses import dataclass

from finwhale.ops.attention import NOPE_GROUP

PAGE_ALIGN = 16


@dataclass(frozen=True, slots=True)
class RopeRow:
    """The record of a row of `width` values, of which the last `rope` are not rounded to E4M3."""

    width: int
    rope: int

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's values: E4M3 nope and bfloat16 rope.

        Raises ValueError unless a row's parts begin at multiples of 16 bytes.
        """
        nope = self.width - self.rope
        if nope < 0 or nope % 16 or self.rope % 8:
            raise ValueError(
                "a packed row needs a multiple of 16 nope values and of 8 rope values, got "
                f"{nope} (head_dim {self.width} - rope_dim {self.rope}) and {self.rope}"
            )
        return nope + 2 * self.rope

    @property
    def num_groups(self) -> int:
        """Number of groups of nope values that share a scale."""
        return -(-(self.width - self.rope) // NOPE_GROUP)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, padding included."""
        return -(-self.num_groups // 8) * 8

    def page_bytes(self, rows_per_page: int) -> int:
        """Bytes of one page of one layer: the second dimension of a packed pool."""
        row = self.value_bytes + self.scale_bytes
        return -(-rows_per_page * row // PAGE_ALIGN) * PAGE_ALIGN
