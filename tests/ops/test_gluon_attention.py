"""Attention's kernel for Hopper GPUs on the CPU, against the reference, and the emulator's checks.

gluon_interpreter.py says what it checks: each case here would fail for a race or a missing fence.
"""

from dataclasses import replace

import pytest
import torch
from tests.support.op_case import CONFIGS, Args, Chunks, ModelDraw, rounded_heads
from tests.support.operator_checks import model_case
from tests.support.packing import plain_args
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from finwhale.ops.attention import TopkEntries, ref
from finwhale.ops.attention import sparse_attention_hopper as hopper
from finwhale.ops.attention import sparse_attention_hopper_parts as parts
from finwhale.ops.attention.sparse_attention_triton import AttendPlan, AttentionProblem
from finwhale.ops.rounding import scaled_e4m3

from . import kernels_support as kernels_support
from .gluon_interpreter import emulated_launches
from .gluon_programs import Schedule
from .gluon_values import KernelFault

# Tokens with the window's first row, a part of it, and 3, 5 and 8 tiles of keys with C4.
STEP = ((0, 1), (37, 38), (259, 260), (703, 704), (1500, 1501))
KINDS = ("window", "C4", "C128")


def arguments(kind: str, heads: int, chunks: Chunks = STEP, padding: int | None = None) -> Args:
    """Arguments of sparse_attention; the token `padding` is one of padding."""
    sizes = replace(CONFIGS["flash"], num_attention_heads=heads)
    args = model_case(sizes, ModelDraw("cpu"), "sparse_attention", kind, chunks).args()
    if padding is not None:
        args[3].positions[padding] = -1
        if isinstance(args[5], TopkEntries):
            args[5].slots[padding] = -1
    return args


def plan(heads: int, splits: int = 1, share: int = 0, num_tokens: int = 5) -> AttendPlan:
    block_h, block_k, num_warps = hopper.tiles(num_tokens, heads, False)
    return AttendPlan(
        block_h=block_h, block_k=block_k, splits=splits, num_warps=num_warps, share=share
    )


def attend(args: Args, plan: AttendPlan, schedule: Schedule | None = None) -> Tensor:
    """Run the kernel; returns the output."""
    # The interpreter, which combines parts, has no instructions for an early launch.
    early = plan.splits == 1
    problem = replace(AttentionProblem(*args), early_launch=early, inline_asm=True)
    assert hopper.takes(problem)
    with emulated_launches(schedule):
        hopper.attend(problem, plan)
    return problem.out


def check(args: Args, plan: AttendPlan, padding: int | None = None) -> None:
    """Compare with the reference: weights and outputs are rounded to bfloat16, 2^-9 each."""
    found = attend(args, plan)
    wanted = torch.empty_like(found)
    ref.sparse_attention(*(*plain_args("sparse_attention", args)[:8], wanted))
    assert found.isfinite().all()
    if padding is not None:
        assert not found[padding].any()
        wanted[padding] = 0
    worst = (found - wanted).float().abs().amax() / wanted.float().abs().amax()
    assert worst < 2.0**-7, worst.item()


def check_rounded(args: Args, plan: AttendPlan) -> None:
    """Bit for bit what rounding the output afterwards gives."""
    values, scales = scaled_e4m3(attend(args, plan).flatten(1), 128)
    rounded = rounded_heads(*args[8].shape)
    attend((*args[:8], *rounded), plan)
    assert torch.equal(rounded[0].flatten(1).view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(rounded[1], scales)


@pytest.mark.parametrize("heads", [64, 32, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_entries(kind: str, heads: int) -> None:
    check(arguments(kind, heads, padding=1), plan(heads), padding=1)


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences(kind: str) -> None:
    check(arguments(kind, 64, ((5000, 5001), (33000, 33001))), plan(64))


@pytest.mark.parametrize("heads", [128, 16])
def test_rounded_output(heads: int) -> None:
    check_rounded(arguments("C4", heads, STEP[:4], padding=1), plan(heads))


@pytest.mark.parametrize(("heads", "splits", "share"), [(64, 2, 0), (64, 3, 2), (8, 3, 0)])
def test_shares_of_the_keys(heads: int, splits: int, share: int) -> None:
    """Some shares have no keys, and with `share` all have the same number of tiles."""
    args = arguments("C4", heads, ((37, 38), (703, 704)), padding=0)
    check(args, plan(heads, splits, share), padding=0)


@pytest.mark.parametrize(("kind", "heads", "splits"), [("C4", 64, 1), ("C128", 32, 2)])
def test_one_token(kind: str, heads: int, splits: int) -> None:
    check(arguments(kind, heads, ((703, 704),)), plan(heads, splits, num_tokens=1))


@pytest.mark.parametrize("heads", [64, 32])
def test_all_schedules_give_the_same_bits(heads: int) -> None:
    args = arguments("C4", heads, STEP[2:4])
    wanted = attend(args, plan(heads)).clone()
    firsts = [(0,), (1,), (2,), (0, 1), (1, 2), (2, 1)]
    for schedule in [Schedule(seed) for seed in range(6)] + [Schedule(9, f) for f in firsts]:
        args[8].fill_(torch.nan)
        assert torch.equal(attend(args, plan(heads), schedule), wanted)


@pytest.mark.parametrize("module", [hopper, parts])
def test_each_fence_is_needed(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fence_async_shared", lambda: None)
    with pytest.raises(KernelFault, match="no fence_async_shared follows the write"):
        attend(arguments("window", 64, ((70, 71),)), plan(64))


# --- The emulator's checks ------------------------------------------------------------------------

LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)


@gluon.jit
def _square(layout: gl.constexpr):
    """Numbers of the elements of a tile [64,64]."""
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    return row * 64 + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _load_tiles(work, x_ptr, NUM: gl.constexpr, FLAW: gl.constexpr):
    tiles, ready, free = work
    for tile in range(NUM):
        buffer = tile & 1
        x = gl.load(x_ptr + tile * 4096 + _square(LAYOUT))
        if FLAW != "no wait for free":
            mbarrier.wait(free.index(buffer), (tile >> 1 & 1) ^ 1)
        tiles.index(buffer).store(x)
        if FLAW != "no fence":
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
        gl.store(out_ptr + _square(MMA), total)


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


@pytest.mark.parametrize("first", [(), (0,), (1,)])
def test_a_kernel_without_a_flaw(first: tuple[int, ...]) -> None:
    sum_of_squares("", Schedule(first=first))


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
