"""Cases of RMSNorm: rows of one value, odd widths, the model's widths, outliers, rows of zeros."""

from typing import Any

from tests.support.checked_case import CheckedCase
from tests.support.model_cases.norm import EPS
from tests.support.op_arguments import outliers
from tests.support.op_case import Draw

SHAPES = ((0, 64), (1, 1), (1, 256), (3, 100), (2, 3, 7), (5, 130), (33, 128), (2, 4096))


def _case(shape: tuple[int, ...]) -> CheckedCase:
    def args() -> tuple[Any, ...]:
        draw = Draw()
        return outliers(draw, *shape), draw.normal(shape[-1]), EPS

    return CheckedCase(operator="rms_norm", name=str(shape), args=args, by_token=(0,))


CASES = tuple(_case(shape) for shape in SHAPES)
