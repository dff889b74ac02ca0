"""The emulator's checks of partitions, mbarriers and MMAs: kernels with flaws.

test_gluon_tma.py has the flaws of TMA loads.
"""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import kernels_support as kernels_support
from .gluon_interpreter import emulated_launches
from .gluon_programs import Schedule
from .gluon_values import KernelFault

LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)


@gluon.jit
def square(layout: gl.constexpr):
    """Numbers of the elements of a tile [64,64]."""
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    return row * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _load_tiles(work, x_ptr, NUM: gl.constexpr, FLAW: gl.constexpr):
    tiles, ready, free = work
    for tile in range(NUM):
        buffer = tile & 1
        x = gl.load(x_ptr + tile * 4096 + square(LAYOUT))
        if FLAW != "no wait for free":
            mbarrier.wait(free.index(buffer), (tile >> 1 & 1) ^ 1)
        tiles.index(buffer).store(x)
        if FLAW != "no fence" and FLAW != "fence by the reader":
            fence_async_shared()
        mbarrier.arrive(ready.index(buffer), count=2 if FLAW == "arrival of 2" else 1)
        if FLAW == "store after arrival":
            tiles.index(buffer).store(x)


@gluon.jit
def _square_tiles(work, out_ptr, NUM: gl.constexpr, FLAW: gl.constexpr):
    tiles, ready, free = work
    total = gl.full([64, 64], 0.0, gl.float32, MMA)
    for tile in range(NUM):
        buffer = tile & 1
        if FLAW == "arrival of both":
            mbarrier.arrive(ready.index(buffer), count=1)
        if FLAW != "no wait for ready":
            mbarrier.wait(ready.index(buffer), tile >> 1 & 1)
        if FLAW == "fence by the reader":
            fence_async_shared()
        x = tiles.index(buffer)
        total = warpgroup_mma(x, x, total, is_async=True)
        if FLAW == "arrival before the wait":
            mbarrier.arrive(free.index(buffer), count=1)
        if FLAW == "result before the wait":
            total = total * 1.0
        if FLAW != "no wait":
            total = warpgroup_mma_wait(1 if FLAW == "wait for another" else 0, deps=[total])
        if FLAW != "no arrival" and FLAW != "arrival before the wait":
            mbarrier.arrive(free.index(buffer), count=1)
        if FLAW == "second arrival":
            mbarrier.arrive(free.index(buffer), count=1)
    if FLAW != "no wait":
        gl.store(out_ptr + square(MMA), total)


@gluon.jit
def _sum_of_squares(x_ptr, out_ptr, NUM: gl.constexpr, FLAW: gl.constexpr):
    """out [64,64] = the sum of x[i] @ x[i] over tiles x [NUM,64,64]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(ready.index(buffer), count=2 if FLAW == "count of 2" else 1)
        if FLAW != "no init":
            mbarrier.init(free.index(buffer), count=1)
    work = (tiles, ready, free)
    gl.warp_specialize(
        [(_square_tiles, (work, out_ptr, NUM, FLAW)), (_load_tiles, (work, x_ptr, NUM, FLAW))],
        [4],
        [104],
    )


def sum_of_squares(flaw: str, schedule: Schedule, num_tiles: int = 5) -> None:
    x = torch.randn(5, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.full((64, 64), torch.nan)
    with emulated_launches(schedule):
        _sum_of_squares[(1,)](x, out, NUM=num_tiles, FLAW=flaw, num_warps=4)
    torch.testing.assert_close(out, (x.float() @ x.float()).sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("flaw", ["", "fence by the reader"])
@pytest.mark.parametrize("first", [(), (0,), (1,)])
def test_a_kernel_without_a_flaw(flaw: str, first: tuple[int, ...]) -> None:
    sum_of_squares(flaw, Schedule(first=first))


SQUARE, LOAD = r"partition 0 \(_square_tiles\)", r"partition 1 \(_load_tiles\)"


# Flaw of the kernel, the partition that goes first, and what is reported of partition and barrier.
@pytest.mark.parametrize(
    ("flaw", "first", "message"),
    [
        ("no fence", 0, rf"{SQUARE}.* tiles.* no fence_async_shared follows the write by {LOAD}"),
        ("store after arrival", 1, f"{SQUARE}.* data race: this read .* the write by {LOAD}"),
        ("store after arrival", 0, f"data race: this write .* the read by {SQUARE}, test_gluon"),
        ("no wait for ready", 1, f"{SQUARE}.* data race: this read .* the write by {LOAD}"),
        ("no wait for ready", 0, f"{SQUARE}.* tiles is read before it is written"),
        ("arrival before the wait", 1, f"{LOAD}.* data race: this write .* an MMA in flight"),
        ("no wait for free", 1, rf"{SQUARE} misses phase 0 of ready\[0\]"),
        ("second arrival", 0, rf"{LOAD} misses phase 0 of free\[0\]"),
        ("arrival of 2", 0, rf"{LOAD}.* too many arrivals: 2 at ready\[0\]"),
        ("arrival of both", 1, rf"{SQUARE}.* too many arrivals: 1 at ready\[0\], whose phase 1"),
        ("count of 2", 0, rf"deadlock: .* {LOAD} waits for phase 0 of free\[0\]"),
        ("no arrival", 0, r"program \(0, 0, 0\).* deadlock: .* ready\[0\].* free\[0\]"),
        ("result before the wait", 0, f"{SQUARE}.* is used before the wait"),
        ("no init", 0, rf"{LOAD}.* free\[0\] is used before mbarrier.init"),
    ],
)
def test_a_flaw_is_found(flaw: str, first: int, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        sum_of_squares(flaw, Schedule(first=(first,)))


@pytest.mark.parametrize(
    ("flaw", "message"), [("wait for another", "is used before the wait"), ("no wait", "2 MMAs")]
)
def test_a_flaw_in_the_last_tiles_is_found(flaw: str, message: str) -> None:
    with pytest.raises(KernelFault, match=f"{SQUARE}.* {message}"):
        sum_of_squares(flaw, Schedule(), num_tiles=2)


def test_access_outside_of_a_tensor() -> None:
    with pytest.raises(KernelFault, match=r"access to 40960..49152 of 40960"):
        sum_of_squares("", Schedule(), num_tiles=6)


@gluon.jit
def _misuse(x_ptr, FLAW: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    zeros = gl.full([64, 64], 0.0, gl.float32, MMA)
    tile.store(zeros.to(gl.bfloat16))
    fence_async_shared()
    if FLAW == "second init":
        mbarrier.init(ready.index(0), count=1)
    if FLAW == "parity":
        mbarrier.wait(ready.index(0), 2)
    if FLAW == "slice":
        tile.slice(32, 64)
    if FLAW == "dtype":
        tile.store(zeros)
    if FLAW == "shape":
        tile.slice(0, 32).store(zeros.to(gl.bfloat16))
    if FLAW == "MMA":
        warpgroup_mma(tile, tile.slice(0, 32), zeros)
    if FLAW == "address":
        gl.load((x_ptr.to(gl.pointer_type(gl.int8)) + 1).to(gl.pointer_type(gl.int32)))
    if FLAW == "ranks":
        zeros + gl.arange(0, 64, gl.SliceLayout(0, MMA))


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("second init", r"ready\[0\] has a second mbarrier.init"),
        ("parity", r"wait for the phase of parity 2 of ready\[0\]"),
        ("slice", r"tile \(64, 64\) has no 32:96"),
        ("dtype", r"store of fp32 \(64, 64\) to bf16"),
        ("shape", r"store of bf16 \(64, 64\) to bf16 \(32, 64\)"),
        ("MMA", "warpgroup_mma of shapes"),
        ("address", "an address is not a multiple of 4"),
        ("ranks", "operands of shapes"),
    ],
)
def test_misuse_is_found(flaw: str, message: str) -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with emulated_launches(Schedule()):
        _misuse[(1,)](x, FLAW="", num_warps=4)
        with pytest.raises(KernelFault, match=message):
            _misuse[(1,)](x, FLAW=flaw, num_warps=4)


def test_an_argument_that_the_kernel_lacks() -> None:
    with emulated_launches(), pytest.raises(AssertionError, match="no parameters"):
        _misuse[(1,)](torch.zeros(4), FLAW="", TYPO=1)
