"""The Hopper plans of the routed experts."""

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
from finwhale.ops.moe.experts_hopper import PLANS, _cut
from finwhale.ops.moe.experts_hopper_few import (
    PROGRAM_BYTES,
    STAGES,
    _stages,
    takes_one_launch,
)
from finwhale.ops.moe.experts_hopper_parts import down_steps

from .conftest import Compile


def test_programs_share_all_rows() -> None:
    """No rest, whatever the width: tiles of rows come in pairs."""
    for rows in range(2, 130, 2):
        for groups, tiles in ((1, 1), (2, 1), (2, 4), (4, 2)):
            found, steps, programs = _cut(rows, groups, tiles)
            assert found * steps * programs == rows
            assert found <= groups and steps <= tiles and found >= min(2, groups)


def test_a_rank_of_several_has_as_long_programs_as_one_rank() -> None:
    """Blocks of weights that a program of the down GEMM loads, with I of 1, 2, 4 and 8 ranks."""
    for _, plan in PLANS:
        for inners in ((2048, 1024, 512, 256), (3072, 1536, 768, 384)):
            steps = plan.down[0]
            whole, *ranks = [down_steps(steps, inner) * inner // 128 for inner in inners]
            assert whole == steps * inners[0] // 128
            assert all(whole / 4 <= blocks <= whole for blocks in ranks)


def test_one_token_has_as_many_bytes_in_flight_on_every_rank() -> None:
    """Tiles of all rings together, of gate and up for six experts; at most 24 for a program."""
    for blocks, rows in ((32, 64), (56, 96)):
        tiles = [rows // n * 6 * _stages(rows // n * 6, blocks) for n in (1, 2, 4, 8)]
        assert tiles[0] == rows * 6 * STAGES
        assert min(tiles) >= tiles[0] // 2


def test_one_launch_only_where_all_programs_run_at_once() -> None:
    """Programs wait for each other, so they would wait for ever for programs that never start."""
    assert takes_one_launch(4096, 2048, 6, 132)  # Flash
    assert not takes_one_launch(4096, 2048, 6, 114)  # Flash on an H100 PCIe
    assert not takes_one_launch(7168, 3072, 6, 132)  # Pro
    assert not takes_one_launch(4096, 1024, 6, 132)  # Flash on one of two ranks
    assert takes_one_launch(256, 512, 2, 132)  # the embedded model


def test_shared_memory_of_one_launch(sm90: Compile) -> None:
    """`programs_at_once` assumes at least what the compiler reports, and 1 KiB that CUDA takes."""
    for call, blocks in (("flash-hopper-16-1", 32), ("demo-hopper-16-1", 4)):
        (found,) = (
            report["shared"]
            for report in sm90("sm90_experts", call)
            if report["kernel"].endswith("._one_token_kernel")
        )
        assumed = blocks * (128 + 4) * 8 + STAGES * (64 * 64 + 64 * 4) + PROGRAM_BYTES
        assert assumed - 2048 < found <= assumed - 1024, call
