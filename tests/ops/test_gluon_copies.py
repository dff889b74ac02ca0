"""The emulator's checks of asynchronous copies by threads (cp.async): kernels with flaws."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import kernels_support as kernels_support
from .gluon_interpreter import emulated_launches
from .gluon_programs import TMA, Schedule
from .gluon_values import KernelFault
from .test_gluon_interpreter import LAYOUT, MMA, square


@gluon.jit
def _copy_tiles(work, x_ptr, rows, NUM: gl.constexpr, FLAW: gl.constexpr):
    tiles, ready, free, _ = work
    zeros = gl.full([64, 64], 0.0, gl.bfloat16, LAYOUT)
    for tile in range(NUM):
        buffer = tile & 1
        if FLAW != "no wait for free":
            mbarrier.wait(free.index(buffer), (tile >> 1 & 1) ^ 1)
        place = tile * 4096 + square(LAYOUT)
        x = tiles.index(buffer)
        if FLAW == "store before copy" and tile == 0:
            tiles.index(2).store(zeros)
        async_copy.async_copy_global_to_shared(x, x_ptr + place, mask=place < rows * 64)
        if FLAW == "store after copy" and tile == 0:
            tiles.index(2).store(zeros)
        if FLAW == "store over a copy":
            x.store(zeros)
        if FLAW == "copy over a copy":
            async_copy.async_copy_global_to_shared(x, x_ptr + place, mask=place < rows * 64)
        if FLAW == "group" or FLAW == "no wait for group" or FLAW == "fence before group":
            async_copy.commit_group()
            if FLAW == "fence before group":
                fence_async_shared()
            async_copy.wait_group(1 if FLAW == "no wait for group" else 0)
            if FLAW != "fence before group":
                fence_async_shared()
            mbarrier.arrive(ready.index(buffer), count=128)
        elif FLAW == "arrival before the copy ends":
            mbarrier.arrive(ready.index(buffer), count=128)
        else:
            async_copy.mbarrier_arrive(ready.index(buffer), increment_count=False)
        if FLAW == "second arrival":
            async_copy.mbarrier_arrive(ready.index(buffer), increment_count=False)
        if FLAW == "copy for nobody" and tile == NUM - 1:
            mbarrier.wait(free.index(buffer), tile >> 1 & 1)
            async_copy.async_copy_global_to_shared(x, x_ptr + place, mask=place < rows * 64)


@gluon.jit
def _square_tiles(work, out_ptr, NUM: gl.constexpr, FENCE: gl.constexpr, FLAW: gl.constexpr):
    tiles, ready, free, relay = work
    total = gl.full([64, 64], 0.0, gl.float32, MMA)
    for tile in range(NUM):
        buffer = tile & 1
        if FLAW == "fence before wait":
            fence_async_shared()
        if FLAW == "relay" or FLAW == "relay without fence":
            mbarrier.wait(relay.index(buffer), tile >> 1 & 1)
        elif FLAW != "no wait for ready":
            mbarrier.wait(ready.index(buffer), tile >> 1 & 1)
        if FENCE:
            fence_async_shared()
        if FLAW == "store before copy" or FLAW == "store after copy":
            tiles.index(2).load(LAYOUT)
        x = tiles.index(buffer)
        total = warpgroup_mma(x, x, total, is_async=True)
        if FLAW == "arrival before the MMA ends":
            mbarrier.arrive(free.index(buffer), count=128)
        total = warpgroup_mma_wait(0, deps=[total])
        if FLAW != "arrival before the MMA ends":
            mbarrier.arrive(free.index(buffer), count=128)
    gl.store(out_ptr + square(MMA), total)


@gluon.jit
def _relay(work, NUM: gl.constexpr, FLAW: gl.constexpr):
    """Pass on that a tile is there."""
    _, ready, _, relay = work
    for tile in range(NUM):
        if FLAW == "relay" or FLAW == "relay without fence":
            mbarrier.wait(ready.index(tile & 1), tile >> 1 & 1)
            if FLAW == "relay":
                fence_async_shared()
            mbarrier.arrive(relay.index(tile & 1), count=1)


@gluon.jit
def _sum_of_squares(
    x_ptr,
    out_ptr,
    rows,
    NUM: gl.constexpr,
    COUNT: gl.constexpr,
    FENCE: gl.constexpr,
    FLAW: gl.constexpr,
):
    """out [64,64] = the sum of x[i] @ x[i] over tiles x [NUM,64,64]; `rows` exist, others are 0."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 64], layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    relay = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(ready.index(buffer), count=COUNT)
        mbarrier.init(free.index(buffer), count=128)
        mbarrier.init(relay.index(buffer), count=1)
    work = (tiles, ready, free, relay)
    gl.warp_specialize(
        [
            (_square_tiles, (work, out_ptr, NUM, FENCE, FLAW)),
            (_copy_tiles, (work, x_ptr, rows, NUM, FLAW)),
            (_relay, (work, NUM, FLAW)),
        ],
        [4, 1],
        [104, 24],
    )


# Without a fence of the partition that multiplies, between its wait and its MMA.
GROUPS, RELAYS = ("group", "fence before group"), ("relay", "relay without fence")
OTHER_FENCE = {*GROUPS, *RELAYS, "no fence", "fence before wait"}


def sum_of_squares(flaw: str, schedule: Schedule, count: int = 128) -> None:
    """The last tile has 56 rows in the tensor, and eight of zeros."""
    x = torch.randn(5 * 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[-8:] = 0
    out = torch.full((64, 64), torch.nan)
    with emulated_launches(schedule):
        args = x[:-8].clone(), out, len(x) - 8
        fence = flaw not in OTHER_FENCE
        _sum_of_squares[(1,)](*args, NUM=5, COUNT=count, FENCE=fence, FLAW=flaw, num_warps=4)
    tiles = x.float().view(5, 64, 64)
    torch.testing.assert_close(out, (tiles @ tiles).sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("flaw", ["", "group", "relay", "store before copy"])
@pytest.mark.parametrize("first", [(), (0, 1, 2), (1, 0, 2), (TMA,), (1, TMA), (0, TMA)])
def test_a_kernel_without_a_flaw(flaw: str, first: tuple[int, ...]) -> None:
    sum_of_squares(flaw, Schedule(first=first))


SQUARE, COPY = r"partition 0 \(_square_tiles\)", r"partition 1 \(_copy_tiles\)"
FENCE = f"{SQUARE}.* no fence_async_shared follows the write by a copy of {COPY}"
READ = f"{SQUARE}.* this read is not ordered after the write by a copy of {COPY}"
WRITE = f"a copy of {COPY}.* this write is not ordered after the"


# Flaw of the kernel, what goes first, and what is reported.
@pytest.mark.parametrize(
    ("flaw", "first", "message"),
    [
        ("no fence", (), FENCE),
        ("fence before wait", (), FENCE),
        ("fence before group", (), FENCE),
        ("relay without fence", (), FENCE),
        ("no wait for ready", (1, TMA), READ),
        ("no wait for ready", (0,), f"{SQUARE}.* tiles is read before it is written"),
        ("no wait for group", (TMA, 1), READ),
        ("arrival before the copy ends", (TMA, 1), READ),
        ("arrival before the copy ends", (1, 0), "tiles is read before it is written"),
        ("no wait for free", (1,), f"{WRITE} write by a copy of {COPY}"),
        ("arrival before the MMA ends", (1, TMA), f"{WRITE} read by {SQUARE}, an MMA in flight"),
        ("store after copy", (TMA, 1), f"{SQUARE}.* this read .* after the write by {COPY}"),
        ("store over a copy", (TMA,), f"{COPY}.* this write .* the write by a copy of {COPY}"),
        ("store over a copy", (1, 0, 2), f"{WRITE} write by {COPY}"),
        ("copy over a copy", (), f"{WRITE} write by a copy of {COPY}"),
        ("second arrival", (TMA,), rf"{COPY}.* too many arrivals: 128 at ready\[0\]"),
        ("second arrival", (1, 0, 2), rf"a copy of {COPY}.* too many arrivals: 128 at ready\[0\]"),
        ("copy for nobody", (), f"nobody has waited for a copy of {COPY}"),
    ],
)
def test_a_flaw_is_found(flaw: str, first: tuple[int, ...], message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        sum_of_squares(flaw, Schedule(first=first))


@pytest.mark.parametrize("first", [(TMA,), (1, 0, 2)])
@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, r"too many arrivals: 128 at ready\[0\]"),
        (256, r"deadlock: .* ready\[0\], whose phase 0 needs 128 of 256 arrivals"),
    ],
)
def test_a_barrier_with_another_count(first: tuple[int, ...], count: int, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        sum_of_squares("", Schedule(first=first), count)


@gluon.jit
def _copy(x_ptr, out_ptr, FLAW: gl.constexpr):
    """out [64,64] = x, and other accesses of the partition that copies."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], layout)
    other = gl.allocate_shared_memory(gl.bfloat16, [64, 64], layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=128)
    zeros = gl.full([64, 64], 0.0, gl.bfloat16, LAYOUT)
    tile.store(zeros)
    if FLAW == "shape":
        tile = tile.slice(0, 32)
    if FLAW == "dtype":
        x_ptr = x_ptr.to(gl.pointer_type(gl.float32))
    async_copy.async_copy_global_to_shared(tile, x_ptr + square(LAYOUT))
    if FLAW == "load":
        tile.load(LAYOUT)
    async_copy.mbarrier_arrive(ready.index(0), FLAW == "increment")
    mbarrier.wait(ready.index(0), 0)
    gl.store(out_ptr + square(LAYOUT), tile.load(LAYOUT))
    async_copy.async_copy_global_to_shared(other, x_ptr + square(LAYOUT))
    async_copy.commit_group()
    async_copy.wait_group(0)
    other.store(zeros)


@pytest.mark.parametrize("first", [(TMA,), (0,)])
@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("shape", r"copy of bf16 \(64, 64\) to tile, bf16 \(32, 64\)"),
        ("dtype", r"copy of fp32 \(64, 64\) to tile, bf16 \(64, 64\)"),
        ("load", "data race: this (read|write) is not ordered after the (read|write) by"),
        ("increment", "needs increment_count=False"),
    ],
)
def test_copies_within_a_partition(first: tuple[int, ...], flaw: str, message: str) -> None:
    x, out = torch.ones(2, 64, 64, dtype=torch.bfloat16), torch.zeros(64, 64)
    with emulated_launches(Schedule(first=first)):
        _copy[(1,)](x, out, FLAW="", num_warps=4)
        assert (out == 1).all()
        with pytest.raises((KernelFault, NotImplementedError), match=message):
            _copy[(1,)](x, out, FLAW=flaw, num_warps=4)
