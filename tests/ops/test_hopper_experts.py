"""The Hopper plans of the routed experts."""

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
from finwhale.models.deepseek_v4.kernel_sizes import launch_sizes
from finwhale.models.deepseek_v4.presets import published
from finwhale.ops.moe.experts_hopper import PLANS, HopperPlan, _options, launch_tokens
from finwhale.ops.moe.experts_hopper_few import FEW_TOKENS, LOADS, _down_tiles, _launches, _loads
from finwhale.ops.moe.experts_hopper_parts import down_steps

from .conftest import Compile


def test_programs_share_all_rows() -> None:
    """No rest, whatever the width: tiles of rows come in pairs."""
    for rows in range(2, 130, 2):
        for groups, tiles in ((1, 1), (2, 1), (2, 4), (4, 2)):
            plan = HopperPlan(16, groups, (tiles, 4), (tiles, 4))
            programs, options = _options(plan, rows, plan.gate_up)
            found, steps = options["GROUPS"], options["TILES"]
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


@pytest.mark.parametrize("inner", [2048, 1024, 512, 256, 768, 384])
def test_every_kind_of_launch_is_compiled(inner: int) -> None:
    """Each number of tokens with other constants than the next one is in `launch_tokens`."""

    def kind(num_tokens: int) -> list[object]:
        return [constants for _, constants in _launches(num_tokens, 4096, inner, 6, 132)]

    listed = launch_tokens(launch_sizes(published("flash")), FEW_TOKENS + 1)
    for n in range(1, FEW_TOKENS):
        assert kind(n) == kind(n + 1) or n in listed, n
    assert FEW_TOKENS in listed


def test_tiles_of_a_program_of_down() -> None:
    assert [_down_tiles(6, 4096, inner) for inner in (2048, 1024, 512, 256)] == [1, 1, 2, 4]
    assert [_down_tiles(6, 7168, inner) for inner in (3072, 768, 384)] == [1, 1, 2]
    assert _down_tiles(1, 4096, 512) == 1
    assert _down_tiles(6, 192, 256) == 1  # three tiles


def test_rings_leave_room_for_as_many_programs_as_there_are() -> None:
    assert _loads(96, 132) == _loads(264, 132) == LOADS[2]  # one token on one of four ranks: 96
    assert _loads(384, 132) == LOADS[3]  # one token on one GPU: 2.9 programs on each multiprocessor
    assert _loads(576, 132) == LOADS[5]  # six tokens on one of four ranks: 4.4
    assert _loads(396, 132) == LOADS[3] and _loads(397, 132) == LOADS[5]
    assert _loads(768, 132) == _loads(792, 132) == LOADS[3]  # eight tokens: twice 2.9
    assert _loads(660, 132) == _loads(793, 132) == LOADS[5]
    assert _loads(2304, 132) == LOADS[5]  # six tokens on one GPU
    assert _loads(396, 114) == LOADS[5]  # an H100 PCIe has fewer multiprocessors


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("tokens", "per_multiprocessor"),
    [(1, (2, 3)), (4, (3, 3)), (6, (5, 5))],
    ids=["one", "four", "six"],
)
def test_as_many_programs_fit_a_multiprocessor(
    sm90: Compile, tokens: int, per_multiprocessor: tuple[int, int]
) -> None:
    """The programs of gate and up, and of down, on one of four ranks.

    A multiprocessor has 227 KiB of shared memory and 65,536 registers. Of the memory, CUDA takes
    1 KiB for each program. A warp has a multiple of 256 registers.
    """
    reports = sm90("sm90_experts", f"flash-rank-512-{tokens}")
    few = [report for report in reports if "._few_" in report["kernel"]]
    assert len(few) == 2
    for report, wanted in zip(few, per_multiprocessor, strict=True):
        assert 227 * 1024 // (report["shared"] + 1024) == wanted, report["kernel"]
        registers = -(-report["registers"] // 8) * 8
        assert 65536 // (registers * 128) >= wanted
        assert not report["spilled"]
