"""Linear layers: one and many rows, widths that no tile divides, rounded and unrounded inputs.

Every implementation rounds an input to the same bits, so the tolerance covers only the order of
sums.
"""

from dataclasses import replace

from tests.support.checked_case import CheckedCase
from tests.support.op_arguments import outliers, strided
from tests.support.op_case import Args, Draw

from finwhale.ops.linear import LinearWeight

# N, K, M: no rows, the embedded model's sizes, odd sizes, numbers of rows around which BLAS changes
# kernels, a size of Flash, and one large enough to be split over threads.
PLAIN = (
    (0, 256, 128),
    (1, 256, 128),
    (1, 1, 1),
    (2, 130, 17),
    (5, 320, 200),
    (13, 128, 256),
    (33, 200, 33),
    (3, 4096, 512),
    (300, 256, 256),
)
STRIDED = ((1, 256, 128), (5, 320, 200), (33, 200, 33))
# N, G, K, M. The last has one group, like each of eight ranks of Flash.
GROUPED = ((0, 2, 64, 16), (1, 2, 512, 128), (3, 1, 130, 7), (17, 8, 64, 16), (5, 1, 512, 128))


def rounding(group: int) -> str:
    """The end of a case's name: how inputs are rounded."""
    return {0: "", 128: " rounded"}.get(group, f" rounded by {group}")


def _linear(N: int, K: int, M: int, group: int) -> CheckedCase:
    def args() -> Args:
        draw = Draw()
        w = LinearWeight(draw.normal(M, K, scale=K**-0.5), group)
        return outliers(draw, N, K), w

    name = f"{(N, K, M)}{rounding(group)}"
    return CheckedCase(operator="linear", name=name, args=args, by_token=(0,))


def _grouped(N: int, G: int, K: int, M: int, group: int) -> CheckedCase:
    def args() -> Args:
        draw = Draw()
        w = LinearWeight(draw.normal(G, M, K, scale=K**-0.5), group)
        return outliers(draw, N, G, K), w

    name = f"{(N, G, K, M)}{rounding(group)}"
    return CheckedCase(operator="grouped_linear", name=name, args=args, by_token=(0,))


def _strided(N: int, K: int, M: int, group: int) -> CheckedCase:
    """Rows that lie in a wider tensor."""
    case = _linear(N, K, M, group)

    def args() -> Args:
        x, w = case.args()
        return strided(x), w

    return replace(case, name=f"{case.name} strided", args=args)


CASES = (
    *(_linear(*size, group) for size in PLAIN for group in (0, 128)),
    *(_strided(*size, group) for size in STRIDED for group in (0, 128)),
    *(_grouped(*size, group) for size in GROUPED for group in (0, 128)),
    _linear(5, 320, 200, 32),
    _grouped(3, 2, 96, 16, 32),
)
