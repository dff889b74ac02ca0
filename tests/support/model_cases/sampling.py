"""Calls of sampling at the models' sizes."""

from collections.abc import Iterator

from tests.support.op_case import Chunks, ModelDraw, OpCase, OpSizes

from finwhale.ops.sampling import SamplingBatch


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    yield OpCase(
        operator="sample",
        name="greedy",
        args=lambda: (draw.normal(max(1, len(chunks)), s.vocab_size), SamplingBatch()),
        bytes=len(chunks) * 4.0 * s.vocab_size,
    )
