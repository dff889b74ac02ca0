"""The packed rows of attention: sizes, bytes, and what comes back."""

import pytest
import torch
from tests.support.op_case import Draw
from tests.support.packed_pools import pack_rows
from tests.support.packing import unpack_rows

from finwhale.ops.attention import ref
from finwhale.ops.attention.layout import RopeRow


def test_sizes_of_pages() -> None:
    assert RopeRow(512, 64).page_bytes(64) == 64 * 584
    assert RopeRow(512, 64).page_bytes(2) == 2 * 584
    assert RopeRow(128, 64).page_bytes(64) == 64 * 200
    assert RopeRow(512, 64).page_bytes(1) == 592
    with pytest.raises(ValueError, match="multiple of 16 nope values"):
        RopeRow(70, 64).page_bytes(64)


@pytest.mark.parametrize("rows, rows_per_page", [(0, 4), (5, 4), (128, 64), (3, 1)])
@pytest.mark.parametrize("width, rope", [(512, 64), (128, 64), (80, 16), (224, 32)])
def test_rows_come_back_as_the_reference_rounds_them(
    rows: int, rows_per_page: int, width: int, rope: int
) -> None:
    values = (Draw().normal(rows, width) * 30).to(torch.bfloat16)
    pool = pack_rows(values, rows_per_page, rope)
    assert pool.shape == (-(-rows // rows_per_page), RopeRow(width, rope).page_bytes(rows_per_page))
    found = unpack_rows(pool, rows_per_page, width, rope)
    assert torch.equal(found[:rows], ref.round_row(values, rope).float())
    assert not found[rows:].any()


def test_offsets_of_a_page_s_parts() -> None:
    """Row 3 of a page of 4: nope 1.5 and 2^9 in its second group, rope 3."""
    rows = torch.zeros(8, 512)
    rows[7, 0], rows[7, 64], rows[7, 448] = 1.5, 512.0, 3.0
    page = pack_rows(rows, 4, 64)[1]
    values, scales = page[3 * 576 : 4 * 576], page[4 * 576 + 3 * 8 : 4 * 576 + 4 * 8]
    # 1.5 / 448 rounds up to 2^-8; 1.5 * 2^8 is 384, E4M3 exponent 15 and mantissa 4.
    assert values[0] == 15 << 3 | 4
    # 512 / 448 rounds up to 2; 256 is exponent 15, mantissa 0.
    assert values[64] == 15 << 3
    assert values[448:450].tolist() == [0x40, 0x40]
    assert scales.tolist()[:2] == [127 - 8, 128]
    assert scales[7] == 0
