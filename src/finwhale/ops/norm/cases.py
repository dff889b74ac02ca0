"""Cases of RMSNorm: rows of one value, odd widths, the model's widths, outliers, rows of zeros."""

from collections.abc import Iterator
from typing import Any

from finwhale.ops.case import MODEL_TOLERANCE, Chunks, Draw, ModelDraw, OpCase, OpSizes, num_tokens

EPS = 1e-6
SHAPES = ((0, 64), (1, 1), (1, 256), (3, 100), (2, 3, 7), (5, 130), (33, 128), (2, 4096))


def _case(shape: tuple[int, ...]) -> OpCase:
    def args() -> tuple[Any, ...]:
        draw = Draw()
        return draw.outliers(*shape), draw.normal(shape[-1]), EPS

    return OpCase(operator="rms_norm", name=str(shape), args=args, by_token=(0,))


CASES = tuple(_case(shape) for shape in SHAPES)


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    N, D = num_tokens(chunks), s.hidden_size
    yield OpCase(
        operator="rms_norm",
        args=lambda: (draw.activation(N, D), draw.normal(D), EPS),
        by_token=(0,),
        tolerance=MODEL_TOLERANCE,
        bytes=2 * N * D * draw.dtype.itemsize + 4 * D,
    )
