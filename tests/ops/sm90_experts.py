"""Calls of the routed experts' kernels, which sm90_compile.py compiles for SM90."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from finwhale.ops.moe import ExpertWeight, hopper_experts, hopper_one, triton_fold, triton_order
from finwhale.ops.moe import triton_experts as kernels
from finwhale.ops.moe.hopper_experts import HopperPlan

from .sm90_compile import f32, meta

# D, I, E, K.
MODELS = {"flash": (4096, 2048, 256, 6), "pro": (7168, 3072, 384, 6), "demo": (256, 128, 16, 4)}
# Every plan that plan() makes for Hopper, and one of those for other GPUs.
PLANS = (
    kernels.Plan(16, hopper=HopperPlan(1, (1, 4), (1, 4))),
    kernels.Plan(32, hopper=HopperPlan(1, (1, 6), (1, 6))),
    kernels.Plan(64, hopper=HopperPlan(1, (1, 3), (1, 4))),
    kernels.Plan(128, hopper=HopperPlan(4, (2, 4), (2, 4))),
    kernels.Plan(256, hopper=HopperPlan(2, (1, 4), (4, 4))),
    kernels.Plan(16, (128, 4, 8), (64, 4, 4)),
)


def u8(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.uint8)


def call(D: int, I: int, E: int, K: int, N: int, plan: kernels.Plan) -> None:  # noqa: E741
    w = ExpertWeight(u8(E, 2 * I, D // 2), u8(E, D, I // 2), True)
    w = ExpertWeight(w.w13, w.w2, True, u8(E, 2 * I, D // 32), u8(E, D, I // 32))
    folded, _ = triton_fold.finish(w)
    ids, weights = meta(N, K, dtype=torch.int32), f32(N, K)
    each = kernels._launch(meta(N, D), ids, weights, folded, 10.0, plan)
    kernels._sum(each, ids, meta(N, D), N)


def early(x: Tensor, pays: bool = True) -> dict[str, bool]:
    return {"PDL": pays, "launch_pdl": pays}


def call_as_on_a_gpu(*args: Any) -> None:
    """No tensor here is on one."""
    with ExitStack() as stack:
        for module in (kernels, triton_order, hopper_experts, hopper_one):
            stack.enter_context(patch.object(module, "early_launch", early))
        call(*args)


def calls() -> dict[str, Callable[[], None]]:
    found = {}
    for name, (D, I, E, K) in MODELS.items():  # noqa: E741
        for plan in PLANS:
            if plan.block_n > 64 and name == "demo":
                continue  # Flash's with fewer steps; they take longest to compile
            for N in (1, 8, 8192) if plan.block_n in (16, 256) else (1024,):
                kind = "hopper" if plan.hopper else "portable"
                key = f"{name}-{kind}-{plan.block_n}-{N}"
                found[key] = partial(call_as_on_a_gpu, D, I, E, K, N, plan)
    return found


CALLS = calls()
