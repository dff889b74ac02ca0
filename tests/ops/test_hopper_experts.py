"""The Hopper plans of the routed experts."""

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
from finwhale.ops.moe.experts_hopper import _cut


def test_programs_share_all_rows() -> None:
    """No rest, whatever the width: tiles of rows come in pairs."""
    for rows in range(2, 130, 2):
        for groups, tiles in ((1, 1), (2, 1), (2, 4), (4, 2)):
            found, steps, programs = _cut(rows, groups, tiles)
            assert found * steps * programs == rows
            assert found <= groups and steps <= tiles and found >= min(2, groups)
