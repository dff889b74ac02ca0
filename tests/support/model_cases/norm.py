"""Calls of RMSNorm at the models' sizes."""

from collections.abc import Iterator

from tests.support.op_case import Chunks, ModelDraw, OpCase, OpSizes, num_tokens

EPS = 1e-6


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    N, D = num_tokens(chunks), s.hidden_size
    yield OpCase(
        operator="rms_norm",
        args=lambda: (draw.activation(N, D), draw.normal(D), EPS),
        bytes=2 * N * D * draw.dtype.itemsize + 4 * D,
    )
