"""Calls of mHC at the models' sizes."""

from collections.abc import Iterator
from typing import Any

from tests.support.op_case import Chunks, Draw, ModelDraw, OpCase, OpSizes, num_tokens

from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight

PARAMS = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)


def weight(draw: Draw, width: int, scale: float) -> MhcWeight:
    return MhcWeight(
        fn=draw.normal(24, 4 * width, scale=(4 * width) ** -0.5),
        scale=draw.normal(24, scale=scale).abs(),
        base=draw.normal(24),
        norm=draw.normal(width),
    )


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
        bytes=N * (10 * D * size + 160) + fn_bytes + 4 * D,
    )
    yield OpCase(
        operator="mhc_pre",
        args=lambda: (draw.activation(N, 4, D), weight(draw, D, 1.0), PARAMS),
        bytes=N * (5 * D * size + 80) + fn_bytes + 4 * D,
    )
    yield OpCase(operator="mhc_post", args=post, bytes=N * (9 * D * size + 80))
    yield OpCase(operator="hc_head", args=head, bytes=N * 5 * D * size + fn_bytes // 6 + 4 * D)
