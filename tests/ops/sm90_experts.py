"""Calls of the routed experts' kernels, which sm90_compile.py compiles for SM90."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from finwhale.ops.moe import (
    ExpertWeight,
    combine_triton,
    dispatch_triton,
    experts_hopper,
    experts_hopper_few,
    experts_triton,
)
from finwhale.ops.moe.experts_hopper import HopperPlan
from finwhale.ops.moe.experts_layout import tile_experts
from finwhale.ops.moe.experts_triton import ExpertsPlan

from .sm90_compile import f32, meta

# D, I, E, K.
MODELS = {"flash": (4096, 2048, 256, 6), "pro": (7168, 3072, 384, 6), "demo": (256, 512, 6, 2)}
# (model, I of a rank of several, tokens): every length of the rings of few tokens.
RANKS = (
    ("flash", 1024, 1),
    ("flash", 1024, 8),
    ("flash", 512, 1),
    ("flash", 512, 4),
    ("flash", 512, 6),
    ("flash", 256, 1),
    ("flash", 256, 8),
    ("pro", 384, 1),
    ("pro", 384, 8),
)
# Every plan that plan() makes for Hopper, and one of those for other GPUs.
PLANS = (
    HopperPlan(16, 1, (1, 4), (1, 4)),
    HopperPlan(32, 1, (1, 6), (1, 6)),
    HopperPlan(64, 1, (1, 3), (1, 4)),
    HopperPlan(128, 4, (2, 4), (2, 4)),
    HopperPlan(256, 2, (2, 4), (4, 4)),
    ExpertsPlan(16, (128, 4, 8), (64, 4, 4)),
)


def u8(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.uint8)


def call(D: int, I: int, E: int, K: int, N: int, plan: HopperPlan | ExpertsPlan) -> None:  # noqa: E741
    w = ExpertWeight(u8(E, 2 * I, D // 2), u8(E, D, I // 2), 128)
    w = ExpertWeight(w.w13, w.w2, 128, u8(E, 2 * I, D // 32), u8(E, D, I // 32))
    tiled, _ = tile_experts(w)
    x, ids, weights, each = meta(N, D), meta(N, K, dtype=torch.int32), f32(N, K), meta(N, K, D)
    if (
        N <= experts_hopper_few.FEW_TOKENS
        and isinstance(plan, HopperPlan)
        and plan.block_rows == 16
    ):
        experts_hopper_few.launch(x, weights, ids, tiled, 10.0, each, 132)
    else:
        pairs = dispatch_triton.order_pairs(ids, E, plan.block_rows, early_launch=True)
        if isinstance(plan, HopperPlan):
            experts_hopper.launch(x, weights, pairs, tiled, 10.0, plan, each)
        else:
            experts_triton.launch(x, weights, pairs, tiled, 10.0, plan, each)
    combine_triton.combine(each, ids, meta(N, D), early_launch=True)


def calls() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for name, (D, I, E, K) in MODELS.items():  # noqa: E741
        for plan in PLANS:
            if plan.block_rows > 64 and name == "demo":
                continue  # Flash's with fewer steps; they take longest to compile
            for N in (1, 8, 8192) if plan.block_rows in (16, 256) else (1024,):
                kind = "hopper" if isinstance(plan, HopperPlan) else "portable"
                key = f"{name}-{kind}-{plan.block_rows}-{N}"
                found[key] = partial(call, D, I, E, K, N, plan)
    for name, inner, N in RANKS:
        D, _, E, K = MODELS[name]
        key = f"{name}-rank-{inner}-{N}"
        found[key] = partial(call, D, inner, E, K, N, PLANS[0])
    return found


CALLS = calls()
