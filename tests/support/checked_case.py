"""Cases of operators with what their checks need, and the checks of the models' cases."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from tests.support.op_case import OpCase

# The largest step between neighbouring rounded values, in units of the largest value. A step of
# E4M3 is at most 2^-3 of the value. FP4 steps from 4 to 6 times the scale, and the largest value
# before rounding may be just above 5 times the scale.
E4M3_FLIP, FP4_FLIP = 2.0**-3, 0.4
# At the models' sizes, sums in float32 have up to 2^15 terms.
MODEL_TOLERANCE = 2e-5
# Some values lie so close to the middle of two E4M3 values that the order of a sum, or rounding the
# weights to bfloat16, decides: a step is 2^-3 to 2^-4 of a value, the error up to 2^-8.
ROUNDED_FLIPS = 0.06
# Kernels may round hidden values to bfloat16 before E4M3. About one value in thirty is then off by
# one E4M3 step, a tenth of the value, and sums of thousands of values differ by one or two percent
# of the largest. On an H200, one of the 5.7 million values of 1,400 tokens differed by 0.034.
HIDDEN_TOLERANCE = 3 * 2.0**-6
# Kernels round the normalised, rotated query to bfloat16, which moves scores of up to 10. Where two
# entries share most of the weight, a result can differ by 1% of the largest: on an H200, the worst
# of all tokens, 0.8%, was reproduced to 0.1% by rounding the query in the reference.
ATTENTION_TOLERANCE = 3 * 2.0**-8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCase(OpCase):
    """A case, and how its results are compared.

    Attributes:
        by_token: positions of the arguments that have rows for each token or its sequence. Empty
            if a token's result depends on other tokens' rows.
        written: positions of the arguments that the operator writes.
        tolerance: the largest difference of float results, in units of the largest value. The
            default is for implementations that add the same terms in another order: they differ by
            a few units of 2^-24 of the largest term, times at most the root of the number of terms
            (2^6 here).
        flips: fraction of the values that may differ by up to `flip` units. A value close to a
            rounding boundary may be rounded the other way, and then differs by one step.
        batch_invariant: whether a token's bits must not depend on the rest of the batch.
    """

    by_token: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    tolerance: float = 8e-6
    flips: float = 0.0
    flip: float = E4M3_FLIP
    batch_invariant: bool = True


def checked(case: OpCase, dtype: torch.dtype) -> CheckedCase:
    """A model's case with its checks. dtype: of the activations."""
    checks = _MODEL_CHECKS[case.operator] | _NAMED_CHECKS.get((case.operator, case.name), {})
    if case.operator == "mhc_post_pre" and dtype == torch.bfloat16:
        # A residual stream that is rounded the other way changes the mixes computed from it, and
        # the block's input: one of the 5.7 million values of 1,400 tokens by 2.3e-4, on an H200.
        checks |= {"tolerance": 1e-4, "flips": 1e-6, "flip": 2.0**-9}
    given = {field.name: getattr(case, field.name) for field in fields(OpCase)}
    return CheckedCase(**given, **{"tolerance": MODEL_TOLERANCE} | checks)


_ALL_STREAMS = (0, 1, 2, 3)
_HIDDEN = {"tolerance": HIDDEN_TOLERANCE, "batch_invariant": False}
# The last bit of a tensor core's sum of FP8 products is 2^-13 of the largest product.
_FP8 = {"by_token": (0,), "tolerance": 1e-3, "batch_invariant": False}
_MODEL_CHECKS: dict[str, dict[str, Any]] = {
    "rms_norm": {"by_token": (0,)},
    "mhc_post_pre": {"by_token": _ALL_STREAMS},
    "mhc_pre": {"by_token": (0,)},
    "mhc_post": {"by_token": _ALL_STREAMS},
    "hc_head": {"by_token": (0,)},
    "linear": _FP8,
    "grouped_linear": _FP8,
    "prepare_qkv": {"by_token": (0, 2, 4, 5), "written": (5,), "flips": 0.01},
    "store_window_rows": {"by_token": (0, 2, 3), "written": (3,), "flips": 0.01},
    "sparse_attention": {
        "by_token": (0, 3, 4, 5, 8, 9),
        "written": (8,),
        "tolerance": ATTENTION_TOLERANCE,
        "batch_invariant": False,
    },
    "compress": {"written": (0,), "tolerance": 1e-4, "flips": 0.01},
    "select_entries": {"by_token": (0, 1, 2, 4)},
    "route_by_score": {"by_token": (0, 5)},
    "route_by_hash": {"by_token": (0, 3, 5)},
    "experts": {"by_token": (0, 1, 2, 5), **_HIDDEN},
    "swiglu_mlp": {"by_token": (0,), **_HIDDEN},
    "sample": {},
}
_NAMED_CHECKS: dict[tuple[str, str], dict[str, Any]] = {
    ("sparse_attention", "C128 rounded"): {"written": (8, 9), "flips": ROUNDED_FLIPS},
    ("compress", "C4"): {"flip": FP4_FLIP},
    # Their weights are bfloat16.
    ("linear", "compress C4"): {"tolerance": 1e-4},
    ("linear", "compress C128"): {"tolerance": 1e-4},
    ("linear", "head"): {"tolerance": 1e-4},
}
