"""Linear layers: one and many rows, widths that no tile divides, rounded and unrounded inputs.

Every implementation rounds an input to the same bits, so the tolerance covers only the order of
sums.
"""

from dataclasses import replace

from tests.support.checked_case import CheckedCase
from tests.support.op_arguments import outliers, strided

from finwhale.ops.case import Args, Draw
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


def _linear(N: int, K: int, M: int, round_input: bool) -> CheckedCase:
    def args() -> Args:
        draw = Draw()
        w = LinearWeight(draw.normal(M, K, scale=K**-0.5), round_input)
        return outliers(draw, N, K), w

    name = f"{(N, K, M)} rounded" if round_input else str((N, K, M))
    return CheckedCase(operator="linear", name=name, args=args, by_token=(0,))


def _grouped(N: int, G: int, K: int, M: int, round_input: bool) -> CheckedCase:
    def args() -> Args:
        draw = Draw()
        w = LinearWeight(draw.normal(G, M, K, scale=K**-0.5), round_input)
        return outliers(draw, N, G, K), w

    name = f"{(N, G, K, M)} rounded" if round_input else str((N, G, K, M))
    return CheckedCase(operator="grouped_linear", name=name, args=args, by_token=(0,))


def _strided(N: int, K: int, M: int, round_input: bool) -> CheckedCase:
    """Rows that lie in a wider tensor."""
    case = _linear(N, K, M, round_input)

    def args() -> Args:
        x, w = case.args()
        return strided(x), w

    return replace(case, name=f"{case.name} strided", args=args)


CASES = (
    *(_linear(*size, rounded) for size in PLAIN for rounded in (False, True)),
    *(_strided(*size, rounded) for size in STRIDED for rounded in (False, True)),
    *(_grouped(*size, rounded) for size in GROUPED for rounded in (False, True)),
)
