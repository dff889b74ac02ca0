"""Cases of mHC: no token, one token, sizes around each implementation's thresholds, outliers."""

from collections.abc import Callable
from typing import Any

from tests.support.checked_case import CheckedCase
from tests.support.model_cases.mhc import PARAMS, weight
from tests.support.op_arguments import outliers
from tests.support.op_case import Draw
from torch import Tensor

from finwhale.ops.mhc import HcHeadWeight

# N, D, scale of the mixes. With a large scale the mixes are close to permutations, for which
# Sinkhorn converges most slowly.
SIZES = (
    (0, 64, 1.0),
    (1, 256, 1.0),
    (1, 7, 8.0),
    (3, 100, 1.0),
    (6, 32, 3.0),
    (7, 32, 3.0),
    (300, 16, 1.0),
    (2, 4096, 1.0),
)
Args = Callable[[], tuple[Any, ...]]


def state(draw: Draw, num_tokens: int, width: int) -> tuple[Tensor, ...]:
    """(x, post, res, residual)."""
    return (
        draw.normal(num_tokens, width),
        draw.normal(num_tokens, 4).abs(),
        draw.normal(num_tokens, 4, 4).softmax(-1),
        outliers(draw, num_tokens, 4, width),
    )


def _cases(N: int, D: int, scale: float) -> tuple[CheckedCase, ...]:
    def post_pre() -> tuple[Any, ...]:
        draw = Draw()
        return *state(draw, N, D), weight(draw, D, scale), PARAMS

    def pre() -> tuple[Any, ...]:
        return post_pre()[3:]

    def expanded() -> tuple[Any, ...]:
        x, _, _, _, w, params = post_pre()
        return x[:, None].expand(-1, 4, -1), w, params

    def post() -> tuple[Any, ...]:
        return post_pre()[:4]

    def head() -> tuple[Any, ...]:
        streams, w, params = pre()
        return streams, HcHeadWeight(w.fn[:4], w.scale[:1], w.base[:4], w.norm), params

    def case(operator: str, args: Args, num_by_token: int, name: str = "") -> CheckedCase:
        by_token = tuple(range(num_by_token))
        return CheckedCase(operator=operator, name=f"{(N, D)} {name}", args=args, by_token=by_token)

    return (
        case("mhc_pre", pre, 1),
        case("mhc_pre", expanded, 1, "of the first layer"),
        case("mhc_post", post, 4),
        case("mhc_post_pre", post_pre, 4),
        case("hc_head", head, 1),
    )


CASES = tuple(case for size in SIZES for case in _cases(*size))
