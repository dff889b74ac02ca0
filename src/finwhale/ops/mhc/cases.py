"""Cases of mHC: no token, one token, sizes around each implementation's thresholds, outliers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from finwhale.ops.case import MODEL_TOLERANCE, Chunks, Draw, ModelDraw, OpCase, OpSizes, num_tokens
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight

PARAMS = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)
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


def weight(draw: Draw, width: int, scale: float) -> MhcWeight:
    return MhcWeight(
        fn=draw.normal(24, 4 * width, scale=(4 * width) ** -0.5),
        scale=draw.normal(24, scale=scale).abs(),
        base=draw.normal(24),
        norm=draw.normal(width),
    )


def state(draw: Draw, num_tokens: int, width: int) -> tuple[Tensor, ...]:
    """(x, post, res, residual)."""
    return (
        draw.normal(num_tokens, width),
        draw.normal(num_tokens, 4).abs(),
        draw.normal(num_tokens, 4, 4).softmax(-1),
        draw.outliers(num_tokens, 4, width),
    )


def _cases(N: int, D: int, scale: float) -> tuple[OpCase, ...]:
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

    def case(operator: str, args: Args, num_by_token: int, name: str = "") -> OpCase:
        by_token = tuple(range(num_by_token))
        return OpCase(operator=operator, name=f"{(N, D)} {name}", args=args, by_token=by_token)

    return (
        case("mhc_pre", pre, 1),
        case("mhc_pre", expanded, 1, "of the first layer"),
        case("mhc_post", post, 4),
        case("mhc_post_pre", post_pre, 4),
        case("hc_head", head, 1),
    )


CASES = tuple(case for size in SIZES for case in _cases(*size))


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    N, D, size = num_tokens(chunks), s.hidden_size, draw.dtype.itemsize
    fn_bytes = 24 * 4 * D * 4

    def post() -> tuple[Any, ...]:
        res = draw.normal(N, 4, 4).softmax(-1)
        return draw.activation(N, D), draw.normal(N, 4).abs(), res, draw.activation(N, 4, D)

    def head() -> tuple[Any, ...]:
        fn = draw.normal(4, 4 * D, scale=(4 * D) ** -0.5)
        w = HcHeadWeight(fn, draw.normal(1).abs(), draw.normal(4), draw.normal(D))
        return draw.activation(N, 4, D), w, PARAMS

    yield OpCase(
        operator="mhc_post_pre",
        args=lambda: (*post(), weight(draw, D, 1.0), PARAMS),
        by_token=(0, 1, 2, 3),
        # A residual stream that is rounded the other way changes the mixes computed from it, and
        # the block's input: one of the 5.7 million values of 1,400 tokens by 2.3e-4, on an H200.
        tolerance=1e-4 if draw.dtype == torch.bfloat16 else MODEL_TOLERANCE,
        flips=1e-6 if draw.dtype == torch.bfloat16 else 0.0,
        flip=2.0**-9,
        bytes=N * (10 * D * size + 160) + fn_bytes + 4 * D,
    )
    yield OpCase(
        operator="mhc_pre",
        args=lambda: (draw.activation(N, 4, D), weight(draw, D, 1.0), PARAMS),
        by_token=(0,),
        tolerance=MODEL_TOLERANCE,
        bytes=N * (5 * D * size + 80) + fn_bytes + 4 * D,
    )
    yield OpCase(
        operator="mhc_post",
        args=post,
        by_token=(0, 1, 2, 3),
        tolerance=MODEL_TOLERANCE,
        bytes=N * (9 * D * size + 80),
    )
    yield OpCase(
        operator="hc_head",
        args=head,
        by_token=(0,),
        tolerance=MODEL_TOLERANCE,
        bytes=N * 5 * D * size + fn_bytes // 6 + 4 * D,
    )
