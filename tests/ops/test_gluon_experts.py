"""The experts' kernels for Hopper GPUs on the CPU, against the reference.

gluon_interpreter.py says which races it finds on the paths that run. test_triton_experts.py says
how far results may be from the reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType

import pytest
import torch
from tests.support.v41_weights import assert_near as assert_near_v41
from tests.support.v41_weights import fp4, plain_fp4
from torch import Tensor
from triton.experimental import gluon

from finwhale.ops.deepseek_v41 import experts_hopper as v41
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.launch.sizes import NUM_MULTIPROCESSORS
from finwhale.ops.moe import ExpertWeight, experts_hopper_few, experts_hopper_parts, ref
from finwhale.ops.moe import experts_hopper as hopper
from finwhale.ops.moe.dispatch_triton import OrderedPairs, order_pairs
from finwhale.ops.rounding import scaled_e4m3

from .gluon_interpreter import emulated_launches, fences, without_fences
from .gluon_programs import TMA, Schedule
from .gluon_values import KernelFault
from .kernels_support import Inputs
from .test_triton_experts import LIMIT, assert_near, tiled, weights_of

PLANS = [plan for _, plan in hopper.PLANS]
SMALL, WIDE, LONG = (384, 128), (256, 128), (512, 256)  # D and I
# Partitions and TMA loads that go first: all loads or none, the loader (the last one), a group.
FIRSTS = [(TMA,), (4, 3, 2, 1, 0), (4, TMA), (1, 0), (0, TMA)]


@dataclass
class Problem:
    """Arguments of `ExpertsCompute`, and what it returns."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    w: ExpertWeight
    wanted: Tensor


@cache
def weights(E: int, D: int, I: int) -> tuple[ExpertWeight, ExpertWeight]:  # noqa: E741
    """Tiled and as float32."""
    raw, wanted = weights_of(E, D, I, 3)
    return tiled(raw), wanted


def expert_ids(counts: Sequence[int], topk: int) -> Tensor:
    """The experts [N,topk] of tokens: expert e occurs counts[e] times, and -1 at least 3 times."""
    total = sum(counts) + 3
    ids = torch.full((-(-total // topk) * topk,), -1)
    ids[: total - 3] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[order].view(-1, topk).to(torch.int32)


def problem(
    sizes: tuple[int, int],
    counts: Sequence[int],
    topk: int = 2,
    weights: Callable[..., tuple[ExpertWeight, ExpertWeight]] = weights,
    scale: float = 1.0,
) -> Problem:
    """A problem of random weights.

    Args:
        sizes: D and I.
        counts: number of pairs of each expert.
        weights: makes the weights of E experts, in the kernels' layout and as float32.
        scale: factor of x.
    """
    inputs, ids = Inputs(1), expert_ids(counts, topk)
    x = inputs.outliers(len(ids), sizes[0], dtype=torch.bfloat16) * scale
    routed = inputs.normal(*ids.shape).abs()
    w, wanted_w = weights(len(counts), *sizes)
    wanted = ref.compute(x.float(), routed, ref.dispatch(ids, len(counts)), wanted_w, LIMIT)
    return Problem(x, routed, ids, w, wanted)


def rounded(x: Tensor, rows: Tensor, pairs: OrderedPairs) -> tuple[Tensor, Tensor]:
    """x in E4M3, in these rows, and its scales. Other rows are NaN: no result depends on them."""
    values, scales = scaled_e4m3(x, 128)
    padded, groups = len(pairs.order), scales.shape[1]
    all_values = torch.full((padded, x.shape[1]), 127, dtype=torch.uint8)
    all_scales = torch.full((groups, padded + pairs.block_rows), torch.nan)
    all_values[rows] = values.view(torch.uint8)
    all_scales[:, rows] = scales.T
    return all_values.view(torch.float8_e4m3fn), all_scales


def round_tokens(x: Tensor, pairs: OrderedPairs, early_launch: bool) -> tuple[Tensor, Tensor]:
    """A stand-in for round_rows_triton.py, which takes the interpreter a millisecond per token."""
    used = pairs.pair_rows >= 0
    each = x.repeat_interleave(pairs.ids.shape[1], 0)
    return rounded(each[used], pairs.pair_rows[used].long(), pairs)


def round_hidden(hidden: Tensor, pairs: OrderedPairs, early_launch: bool) -> tuple[Tensor, Tensor]:
    rows = pairs.pair_rows[pairs.pair_rows >= 0].long()
    return rounded(hidden[rows], rows, pairs)


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "round_tokens", round_tokens)
    monkeypatch.setattr(hopper, "round_hidden", round_hidden)
    # The interpreter has no instructions for an early launch.
    monkeypatch.setattr(v41, "launch_options", lambda early: launch_options(False))


def many(
    p: Problem,
    plan: hopper.HopperPlan | v41.ExpertsPlan,
    schedule: Schedule | None = None,
    module: ModuleType = hopper,
) -> Tensor:
    """Run the kernels of many tokens; returns the outputs [pairs,D]."""
    pairs = order_pairs(p.ids, len(p.w.w2), plan.block_rows, early_launch=False)
    each = p.x.new_full((*p.ids.shape, p.x.shape[1]), torch.nan)
    with emulated_launches(schedule):
        module.launch(p.x, p.weights, pairs, p.w, LIMIT, plan, each)
    assert each[p.ids < 0].isnan().all(), "a skipped pair is written"
    return each[p.ids >= 0]


def few(p: Problem, schedule: Schedule | None = None) -> Tensor:
    """Run the kernels of few tokens; returns the outputs [pairs,D]."""
    each = p.x.new_full((*p.ids.shape, p.x.shape[1]), torch.nan)
    with emulated_launches(schedule):
        rest = p.ids, p.w, LIMIT, each, NUM_MULTIPROCESSORS
        experts_hopper_few.launch(p.x, p.weights, *rest)  # type: ignore[arg-type]
    assert each[p.ids < 0].isnan().all(), "a skipped pair is written"
    return each[p.ids >= 0]


def schedules() -> list[Schedule]:
    return [Schedule(1), *(Schedule(9, first) for first in FIRSTS)]


# --- Many tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.block_rows))
def test_every_plan(plan: hopper.HopperPlan) -> None:
    """Programs with rings that they fill several times; two blocks of an expert, and none."""
    p = problem(LONG, (plan.block_rows + 5, 0, 7))
    assert_near(many(p, plan), p.wanted[p.ids >= 0])


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        (PLANS[3], (8, 64, 65, 96)),
        (PLANS[3], (97, 128, 129, 0)),
        (PLANS[4], (1, 64, 65, 128)),
        (PLANS[4], (129, 160, 161, 192)),
        (PLANS[4], (193, 224, 225, 256)),
    ],
    ids=str,
)
def test_every_width_of_a_program(plan: hopper.HopperPlan, counts: tuple[int, ...]) -> None:
    """The most pairs of a width, and one more. Rows of x that no pair needs are not loaded."""
    p = problem(WIDE, counts, topk=1)
    assert_near(many(p, plan), p.wanted[p.ids >= 0])


def test_a_token_has_the_same_bits_by_every_plan_and_among_few() -> None:
    """Skewed routing. Six tiles of rows of w2: four groups cannot share them, but two can."""
    p = problem(SMALL, (19, 0, 9))
    wanted = many(p, PLANS[0])
    assert_near(wanted, p.wanted[p.ids >= 0])
    for plan in PLANS[1:]:
        assert torch.equal(many(p, plan), wanted), plan
    some = Problem(p.x[:3], p.weights[:3], p.ids[:3], p.w, p.wanted[:3])
    assert torch.equal(few(some), wanted[: (some.ids >= 0).sum()])


@pytest.mark.parametrize("plan", PLANS[2:], ids=lambda plan: str(plan.block_rows))
def test_schedules_give_the_same_bits(plan: hopper.HopperPlan) -> None:
    p = problem(LONG, (20, 0, 0))
    wanted = many(p, plan)
    for schedule in schedules():
        assert torch.equal(many(p, plan, schedule), wanted)


@pytest.mark.parametrize("fence", fences(experts_hopper_parts))
def test_each_fence_is_needed(fence: str) -> None:
    match = r"no fence_async_shared follows (mbarrier\.init|the read)"
    with without_fences(fence), pytest.raises(KernelFault, match=match):
        many(problem(LONG, (40, 0, 9)), PLANS[0])


@gluon.jit
def _keep(empty, slot):
    """A stand-in for `release` that does not free the slot."""


def test_a_slot_that_is_not_freed_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "release", _keep)
    with pytest.raises(KernelFault, match=r"deadlock: .*\(_load\) waits for phase 0 of empty\[0\]"):
        many(problem(LONG, (5, 0, 0)), PLANS[0])


# --- Few tokens -----------------------------------------------------------------------------------


def shorten_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give rings room for one load of four blocks, so that short rows refill them."""
    monkeypatch.setattr(experts_hopper_few, "LOADS", {2: 1, 3: 1, 5: 1})


# D, I and the number of pairs of each expert. Together, these cases have loads of one, two and four
# blocks, programs that hold a row in parts or whole, and programs of the down GEMM with one or
# several tiles.
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [(SMALL, (1,)), ((256, 384), (1, 1)), ((1280, 128), (0, 1)), ((128, 1024), (0, 1))],
    ids=str,
)
def test_few_tokens(
    sizes: tuple[int, int], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(sizes, counts)
    wanted = few(p)
    assert_near(wanted, p.wanted[p.ids >= 0])
    shorten_rings(monkeypatch)
    for first in ((TMA,), (0,)):
        assert torch.equal(few(p, Schedule(first=first)), wanted)


@pytest.mark.parametrize("fence", fences(experts_hopper_few))
def test_each_fence_of_few_tokens_is_needed(fence: str) -> None:
    match = r"no fence_async_shared follows (mbarrier\.init|the write)"
    with without_fences(fence), pytest.raises(KernelFault, match=match):
        few(problem(SMALL, (1,)))


# --- DeepSeek-V4.1 --------------------------------------------------------------------------------

V41_PLANS = [plan for _, plan in v41.PLANS]


@cache
def v41_weights(E: int, D: int, I: int) -> tuple[ExpertWeight, ExpertWeight]:  # noqa: E741
    """In the kernels' layout and as float32; scales up to 16."""
    generator = torch.Generator().manual_seed(0)
    w13, scale13 = fp4(generator, E, 2 * I, D, largest=131)
    w2, scale2 = fp4(generator, E, D, I, largest=131)
    wanted = ExpertWeight(plain_fp4(w13, scale13), plain_fp4(w2, scale2), 32)
    return v41.finish_experts(ExpertWeight(w13, w2, 32, scale13, scale2)), wanted


v41_problem = partial(problem, weights=v41_weights, scale=2.0**-10)


# Rings that are filled several times; blocks of 32 columns of w2; three groups.
@pytest.mark.parametrize(
    ("sizes", "counts"), [((512, 384), (9, 0)), ((128, 96), (17, 0, 3))], ids=str
)
def test_v41_gives_a_token_the_same_bits_by_every_plan(
    sizes: tuple[int, int], counts: tuple[int, ...]
) -> None:
    p = v41_problem(sizes, counts)
    wanted = many(p, V41_PLANS[0], module=v41)
    assert_near_v41(wanted, p.wanted[p.ids >= 0])
    for plan in V41_PLANS[1:]:
        assert torch.equal(many(p, plan, module=v41), wanted), plan


def test_v41_widths() -> None:
    p = v41_problem((128, 96), (32, 33, 65, 129))
    assert_near_v41(many(p, V41_PLANS[-1], module=v41), p.wanted[p.ids >= 0])


@pytest.mark.parametrize(
    ("plan", "sizes"), [(V41_PLANS[1], (512, 384)), (V41_PLANS[-1], (640, 128))], ids=str
)
def test_v41_schedules_give_the_same_bits(plan: v41.ExpertsPlan, sizes: tuple[int, int]) -> None:
    """Rings that down and gate and up fill several times."""
    p = v41_problem(sizes, (9, 0))
    wanted = many(p, plan, module=v41)
    for schedule in schedules():
        assert torch.equal(many(p, plan, schedule, v41), wanted)
