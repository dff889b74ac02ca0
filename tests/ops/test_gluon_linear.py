"""The linear layers of few tokens on Hopper GPUs, on the CPU, against the other kernels' bits.

gluon_interpreter.py says what it checks.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from finwhale.ops.linear import few_tokens_hopper
from finwhale.ops.linear import linear_triton as kernels

from .gluon_interpreter import emulated_launches, fences, without_fences
from .gluon_programs import TMA, Schedule
from .gluon_values import KernelFault
from .kernels_support import Inputs, assert_close
from .test_triton_linear import e4m3_weight, product

TILES = kernels.LinearOptions(num_multiprocessors=8)
FEW = replace(TILES, few_tokens=few_tokens_hopper.launch)


def run(p: kernels.LinearProblem, schedule: Schedule | None = None) -> Tensor:
    assert kernels.few_plan(p) is not None
    with emulated_launches(schedule):
        return kernels.run(p)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels divide K so that a GPU has hundreds of programs. Small problems have fewer."""
    monkeypatch.setattr(kernels, "MIN_PROGRAMS", 4)


def problem(
    groups: int, rows: int, width: int, num_tokens: int
) -> tuple[kernels.LinearProblem, Tensor]:
    """A problem of E4M3 weights and strided tokens, and the result in float32."""
    inputs = Inputs()
    w, wide = e4m3_weight(inputs, groups, rows, width)
    x = inputs.outliers(num_tokens, groups, width + 64, dtype=torch.bfloat16)[..., :width]
    wanted = [product(x[:, g], wide[g], True) for g in range(groups)]
    p = kernels.LinearProblem(x, w.weight, w.scale, True, torch.bfloat16, options=FEW)
    return p, torch.stack(wanted, 1)


# Groups, rows, width, steps of a part. Some programs have a part of K, of which the last has fewer
# steps; some have more steps than they request early, and than one barrier announces.
@pytest.mark.parametrize(
    ("groups", "rows", "width", "steps"),
    [(1, 256, 1024, 4), (1, 192, 384, 1), (2, 128, 640, 3), (1, 1088, 1024, 8), (1, 64, 128, 1)],
)
@pytest.mark.parametrize("num_tokens", [2, 8, 9])
def test_e4m3_weights(groups: int, rows: int, width: int, steps: int, num_tokens: int) -> None:
    p, wanted = problem(groups, rows, width, num_tokens)
    plan = kernels.few_plan(p)
    assert plan is not None and plan.steps(p) == steps
    found = run(p)
    assert_close(found, wanted.bfloat16())
    assert torch.equal(found, kernels.run(replace(p, options=TILES)))


def plain_problem(groups: int, rows: int, num_tokens: int) -> tuple[kernels.LinearProblem, Tensor]:
    """A problem of bfloat16 weights, and the result in float32.

    Each barrier announces several chunks of the weights, and K is divided into two parts.
    """
    inputs, width = Inputs(), 2 * kernels.PLAIN_STEPS * 128
    weight = inputs.normal(groups, rows, width, dtype=torch.bfloat16)
    x = inputs.normal(num_tokens, groups, width + 64, dtype=torch.bfloat16)[..., :width]
    p = kernels.LinearProblem(x, weight, None, False, torch.float32, options=FEW)
    wanted = [product(x[:, g], weight[g], False) for g in range(groups)]
    return p, torch.stack(wanted, 1)


@pytest.mark.parametrize(("groups", "rows", "num_tokens"), [(1, 128, 3), (2, 64, 8)])
def test_plain_weights(groups: int, rows: int, num_tokens: int) -> None:
    p, wanted = plain_problem(groups, rows, num_tokens)
    assert_close(run(p), wanted)


@pytest.mark.parametrize("early_steps", [0, 2])
def test_schedules_give_the_same_bits(early_steps: int) -> None:
    p, _ = problem(1, 1088, 1024, 3)
    p = replace(p, options=replace(FEW, early_steps=early_steps))
    wanted = run(p)
    for schedule in (Schedule(1), Schedule(first=(0,)), Schedule(first=(TMA,))):
        assert torch.equal(run(p, schedule), wanted)


@pytest.mark.parametrize("fence", fences(few_tokens_hopper))
def test_each_fence_is_needed(fence: str) -> None:
    match = r"no fence_async_shared follows (mbarrier\.init|the write)"
    with without_fences(fence), pytest.raises(KernelFault, match=match):
        run(problem(1, 64, 128, 2)[0])
        run(plain_problem(1, 128, 3)[0])
