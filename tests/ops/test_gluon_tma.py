"""The emulator's checks of TMA loads and of the barriers that they signal: kernels with flaws.

gluon_interpreter.py says what it checks, and test_gluon_interpreter.py has the other flaws.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from finwhale.ops.launch.gluon_functions import async_load, reinterpret

from . import kernels_support as kernels_support
from .gluon_interpreter import emulated_launches
from .gluon_programs import TMA, Schedule
from .gluon_values import KernelFault
from .test_gluon_interpreter import LAYOUT, MMA, square

TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WORDS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _load_tiles(work, desc, NUM: gl.constexpr, FLAW: gl.constexpr):
    tiles, ready, free = work
    for tile in range(NUM + 1 if FLAW == "load for nobody" else NUM):
        buffer = tile & 1
        if FLAW != "no wait for free" and FLAW != "load first":
            mbarrier.wait(free.index(buffer), (tile >> 1 & 1) ^ 1)
        if FLAW == "load first":
            async_load(desc, [tile * 64, 0], ready.index(buffer), tiles.index(buffer))
        if FLAW == "fewer bytes":
            mbarrier.expect(ready.index(buffer), 4096)
        elif FLAW == "more bytes":
            mbarrier.expect(ready.index(buffer), 8192 + 128)
        elif FLAW == "no bytes":
            mbarrier.arrive(ready.index(buffer), count=1)
        elif FLAW == "two loads":
            mbarrier.expect(ready.index(buffer), 2 * 8192)
        else:
            mbarrier.expect(ready.index(buffer), 8192)
        if FLAW != "load first":
            async_load(desc, [tile * 64, 0], ready.index(buffer), tiles.index(buffer))
        async_load(
            desc,
            [tile * 64, 0],
            ready.index(buffer),
            tiles.index(buffer),
            pred=FLAW == "two loads",
        )


@gluon.jit
def _square_tiles(work, out_ptr, NUM: gl.constexpr, FLAW: gl.constexpr):
    tiles, ready, free = work
    total = gl.full([64, 64], 0.0, gl.float32, MMA)
    for tile in range(NUM):
        buffer = tile & 1
        if FLAW != "no wait for ready":
            mbarrier.wait(ready.index(buffer), tile >> 1 & 1)
        x = tiles.index(buffer)
        total = warpgroup_mma(x, x, total, is_async=True)
        if FLAW == "arrival before the wait":
            mbarrier.arrive(free.index(buffer), count=1)
        total = warpgroup_mma_wait(0, deps=[total])
        if FLAW == "store" or FLAW == "store and fence":
            x.store(gl.full([64, 64], 0.0, gl.bfloat16, LAYOUT))
        if FLAW == "store and fence":
            fence_async_shared()
        if FLAW == "load" or FLAW == "load and fence":
            total += 0.0 * x.load(LAYOUT)
        if FLAW == "load and fence":
            fence_async_shared()
        if FLAW != "arrival before the wait":
            mbarrier.arrive(free.index(buffer), count=1)
        if FLAW == "load after arrival":
            total += 0.0 * x.load(LAYOUT)
    gl.store(out_ptr + square(MMA), total)


@gluon.jit
def _sum_of_squares(desc, out_ptr, NUM: gl.constexpr, FLAW: gl.constexpr):
    """out [64,64] = the sum of x[i] @ x[i] over tiles x [NUM,64,64]."""
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=1)
    if FLAW != "no fence of barriers":
        fence_async_shared()
    work = (tiles, ready, free)
    gl.warp_specialize(
        [(_square_tiles, (work, out_ptr, NUM, FLAW)), (_load_tiles, (work, desc, NUM, FLAW))],
        [1],
        [24],
    )


def sum_of_squares(flaw: str, schedule: Schedule) -> None:
    """The last tile has 56 rows in the tensor, and eight of zeros."""
    x = torch.randn(5 * 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[-8:] = 0
    out = torch.full((64, 64), torch.nan)
    desc = TensorDescriptor.from_tensor(x[:-8], [64, 64], TILE)
    with emulated_launches(schedule):
        _sum_of_squares[(1,)](desc, out, NUM=5, FLAW=flaw, num_warps=4)
    tiles = x.float().view(5, 64, 64)
    assert (out - (tiles @ tiles).sum(0)).abs().amax() < 1e-3


@pytest.mark.parametrize("flaw", ["", "store and fence", "load and fence"])
@pytest.mark.parametrize("first", [(), (0, 1), (1, 0), (TMA,), (1, TMA), (0, TMA)])
def test_a_kernel_without_a_flaw(flaw: str, first: tuple[int, ...]) -> None:
    sum_of_squares(flaw, Schedule(first=first))


SQUARE, LOAD = r"partition 0 \(_square_tiles\)", r"partition 1 \(_load_tiles\)"
TMA_LOAD = r"a TMA load of ready\[[01]\], test_gluon_tma.py:\d+"


# Flaw of the kernel, what goes first, and what is reported.
@pytest.mark.parametrize(
    ("flaw", "first", "message"),
    [
        ("more bytes", (), r"deadlock: .* needs 0 of 1 arrivals and 128 bytes"),
        ("fewer bytes", (TMA,), rf"{TMA_LOAD}: more bytes than expected at ready\[0\]"),
        ("fewer bytes", (1, 0), rf"{TMA_LOAD}: more bytes than expected at ready\[0\]"),
        ("no bytes", (), rf"{LOAD}.* a TMA load is not ordered .* of ready\[0\], whose phase 1"),
        (
            "two loads",
            (),
            rf"{TMA_LOAD}: .*this write is not ordered after the write by {TMA_LOAD}",
        ),
        ("no wait for ready", (TMA, 1), f"{SQUARE}.* this read .* after the write by {TMA_LOAD}"),
        ("no wait for ready", (0,), f"{SQUARE}.* tiles is read before it is written"),
        ("no wait for free", (TMA, 1), rf"{LOAD}.* too many arrivals: .* ended: 0 phases"),
        (
            "load first",
            (TMA, 1),
            rf"{LOAD}.* a TMA load is not ordered after the last phase of ready",
        ),
        ("arrival before the wait", (1, TMA), f"{TMA_LOAD}: .* this write .* an MMA in flight"),
        ("store", (), f"{TMA_LOAD}: .* no fence_async_shared follows the write by {SQUARE}"),
        ("load", (), f"{TMA_LOAD}: .* no fence_async_shared follows the read by {SQUARE}"),
        ("load after arrival", (0,), f"{TMA_LOAD}: .* this write .* after the read by {SQUARE}"),
        ("load after arrival", (TMA, 1), f"{SQUARE}.* this read .* after the write by {TMA_LOAD}"),
        ("no fence of barriers", (), rf"{LOAD}.* follows mbarrier.init of ready\[0\]"),
        ("load for nobody", (), r"nobody has waited for a TMA load of ready\[1\]"),
    ],
)
def test_a_flaw_is_found(flaw: str, first: tuple[int, ...], message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        sum_of_squares(flaw, Schedule(first=first))


@gluon.jit
def _copy(desc, out_ptr, FLAW: gl.constexpr):
    """out int32 [32] = the first words of a tensor, through row 1 of memory [2,32]."""
    width: gl.constexpr = 16 if FLAW == "row of 64 bytes" else 32
    words = gl.allocate_shared_memory(gl.int32, [2, 1, width], desc.layout)
    tile = gl.allocate_shared_memory(gl.int32, [1, width], gl.NVMMASharedLayout(128, 32, rank=2))
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(0), 128)
    target = words.index(1)
    if FLAW == "other shape":
        target = words.index(1).slice(0, 16, 1)
    if FLAW == "other swizzle":
        target = tile
    async_load(desc, [0, 1 if FLAW == "column 1" else 0], ready.index(0), target)
    mbarrier.wait(ready.index(0), 0)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    value = reinterpret(target, gl.int32, [32], plain).load(layout)
    gl.store(out_ptr + gl.arange(0, 32, layout), value)


def copy(flaw: str) -> None:
    x, out = torch.arange(64, dtype=torch.int32).view(1, 64), torch.empty(32, dtype=torch.int32)
    desc = TensorDescriptor.from_tensor(x, [1, 16 if flaw == "row of 64 bytes" else 32], WORDS)
    with emulated_launches():
        _copy[(1,)](desc, out, FLAW=flaw, num_warps=1)
    assert torch.equal(out, x[0, :32])


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("other shape", r"TMA load of int32 \(1, 32\) to words, int32 \(1, 16\)"),
        ("other swizzle", "to tile, which has another swizzle"),
        ("row of 64 bytes", "to byte 64 of words, not a multiple of 128"),
        ("column 1", r"from \[0, 1\] of int32, not a multiple of 16 bytes"),
    ],
)
def test_a_load_that_tma_cannot_do(flaw: str, message: str) -> None:
    copy("")
    with pytest.raises(KernelFault, match=message):
        copy(flaw)


@gluon.jit
def _multiply_part(out_ptr, WRITTEN: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr):
    """Multiply a tile by itself of which only some rows or columns are written.

    Another view of the tile does not know that it is swizzled: row ROW is stored through it.
    """
    tile = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ones = gl.full([64, 64], 1.0, gl.bfloat16, LAYOUT)
    tile.store(ones)
    rows = reinterpret(tile, gl.bfloat16, [8, 512], plain).slice(ROW * 64, 64, 1)
    rows.store(gl.full([8, 64], 1.0, gl.bfloat16, LAYOUT))
    part = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    if COLUMNS:
        part.slice(0, WRITTEN, 1).store(gl.full([64, WRITTEN], 1.0, gl.bfloat16, LAYOUT))
    else:
        part.slice(0, WRITTEN, 0).store(gl.full([WRITTEN, 64], 1.0, gl.bfloat16, LAYOUT))
    fence_async_shared()
    total = gl.full([64, 64], 0.0, gl.float32, MMA)
    total = warpgroup_mma(tile, part, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])
    gl.store(out_ptr + square(MMA), total)


def test_parts_of_an_operand() -> None:
    """Columns of the result may have no meaning; a sum over unwritten values is an error."""
    out = torch.zeros(64, 64)
    with emulated_launches():
        _multiply_part[(1,)](out, WRITTEN=32, COLUMNS=True, ROW=0, num_warps=4)
        assert (out[:, :32] == 64).all() and out[:, 32:].isnan().all()
        with pytest.raises(KernelFault, match="part is read before it is written"):
            _multiply_part[(1,)](out, WRITTEN=32, COLUMNS=False, ROW=0, num_warps=4)


def test_rows_of_swizzled_memory() -> None:
    with emulated_launches(), pytest.raises(KernelFault, match="tile is swizzled, but"):
        _multiply_part[(1,)](torch.zeros(64, 64), WRITTEN=64, COLUMNS=True, ROW=1, num_warps=4)
