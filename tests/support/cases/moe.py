"""Mixture of experts: no token, one, few and many pairs, skipped experts, rounded inputs.

"experts" is dispatch, compute and combine together, because the value that dispatch passes to
compute differs between tables. Both GEMMs round their inputs. The input of the second is a result
of the first, so some of its values may be on the other side of a rounding boundary.
"""

import torch
from tests.support.cases.linear import rounding
from tests.support.checked_case import CheckedCase
from tests.support.op_arguments import outliers
from tests.support.op_case import Args, Draw

from finwhale.ops.moe import ExpertWeight

LIMIT = 0.7
# N, D, E, K, I. The last has three blocks of I, like each of eight ranks of Pro.
SIZES = (
    (0, 64, 4, 2, 32),
    (1, 256, 16, 4, 128),
    (3, 130, 5, 1, 17),
    (16, 64, 8, 4, 32),
    (17, 64, 8, 4, 32),
    (90, 64, 8, 2, 130),
    (5, 256, 4, 2, 384),
)


def _route(N: int, D: int, E: int, K: int, I: int) -> tuple[CheckedCase, ...]:  # noqa: E741
    def by_score() -> Args:
        draw = Draw()
        x, gate = draw.normal(N, D), draw.normal(E, D, scale=3 * D**-0.5)
        return x, gate, draw.normal(E), K, 1.5, draw.integers(1000, N)

    def by_hash() -> Args:
        x, gate, _, _, scaling, positions = by_score()
        draw = Draw(1)
        table = torch.stack([draw.distinct(E, K) for _ in range(50)])
        return x, gate, table, draw.integers(50, N), scaling, positions

    name = str((N, D, E, K))
    return (
        CheckedCase(operator="route_by_score", name=name, args=by_score, by_token=(0, 5)),
        CheckedCase(operator="route_by_hash", name=name, args=by_hash, by_token=(0, 3, 5)),
    )


def _experts(N: int, D: int, E: int, K: int, I: int, group: int) -> tuple[CheckedCase, ...]:  # noqa: E741
    def experts() -> Args:
        draw = Draw()
        w13 = draw.normal(E, 2 * I, D, scale=D**-0.5)
        w = ExpertWeight(w13, draw.normal(E, D, I, scale=I**-0.5), group)
        ids = torch.stack([draw.distinct(E, K) for _ in range(N)]) if N else draw.integers(E, 0, K)
        ids[N // 2 :: 5, 0] = -1
        return outliers(draw, N, D), ids, draw.normal(N, K).abs(), w, LIMIT

    def with_shared() -> Args:
        return *experts(), Draw(1).normal(N, D)

    def combine() -> Args:
        _, ids, *_ = experts()
        return Draw(2).normal(N, K, D), ids, Draw(1).normal(N, D)

    def shared() -> Args:
        x, _, _, w, limit = experts()
        return x, ExpertWeight(w.w13[0], w.w2[0], group), limit

    name = f"{(N, D, E, K, I)}{rounding(group)}"
    combine_case = CheckedCase(
        operator="experts_combine", name=name, args=combine, by_token=(0, 1, 2)
    )
    flips = 0.05 if group else 0.0
    return (
        CheckedCase(operator="experts", name=name, args=experts, by_token=(0, 1, 2), flips=flips),
        CheckedCase(
            operator="experts",
            name=f"{name} with the shared expert's",
            args=with_shared,
            by_token=(0, 1, 2, 5),
            flips=flips,
        ),
        CheckedCase(operator="swiglu_mlp", name=name, args=shared, by_token=(0,), flips=flips),
        *(() if group else (combine_case,)),
    )


CASES = (
    *(case for size in SIZES for case in _route(*size)),
    *(case for size in SIZES for group in (0, 128) for case in _experts(*size, group)),
    *_experts(5, 64, 8, 2, 96, 32),
)
