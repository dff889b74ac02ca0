"""DeepSeek-V4.1's experts for one token in the interpreter, against the definition."""

import pytest
import torch
from tests.support.v41_weights import assert_near, fp4, plain_fp4

from finwhale.ops.deepseek_v41 import experts_hopper as experts
from finwhale.ops.deepseek_v41 import experts_row_triton as row
from finwhale.ops.moe import Dispatched, ExpertWeight
from finwhale.ops.moe import ref as moe_ref

from .kernels_support import Inputs


# Widths of the ranks of 1, 2, 4 and 8, and the demo's. D has one block, and parts of 1, 3 and 10.
@pytest.mark.parametrize(
    "width, inner", ((64, 2304), (128, 1152), (384, 576), (128, 288), (64, 64), (1280, 32))
)
@pytest.mark.parametrize("largest", (126, 131))
def test_one_token(width: int, inner: int, largest: int) -> None:
    """Scales up to 1/2 and 16; one expert is absent, and one occurs twice."""
    inputs = Inputs()
    w13, scale13 = fp4(inputs.generator, 3, 2 * inner, width, largest=largest)
    w2, scale2 = fp4(inputs.generator, 3, width, inner, largest=largest)
    wanted_w = ExpertWeight(plain_fp4(w13, scale13), plain_fp4(w2, scale2), 32)
    w = experts.finish_experts(ExpertWeight(w13, w2, 32, scale13, scale2))
    x = inputs.outliers(1, width, dtype=torch.bfloat16) / 1024
    ids = torch.tensor([[2, -1, 0, 2]], dtype=torch.int32)
    weights = torch.rand((1, 4), generator=inputs.generator)
    limit = 3.0
    pairs = experts.dispatch(ids, 3)
    assert type(pairs) is Dispatched
    found = experts.compute(x, weights, pairs, w, limit)
    wanted = moe_ref.compute(x.float(), weights, moe_ref.dispatch(ids, 3), wanted_w, limit)
    for k in (0, 2, 3):
        assert_near(found[0, k], wanted[0, k])
    for cuts in (((4, 1, 1, 99), (2, 2, 2, 1)), ((2, 1, 4, 1), (2, 1, 1, 20))):
        again = torch.empty_like(found)
        arguments = x, weights, ids, w, w.expert_scale, limit, again
        row.launch(*arguments, cuts=cuts)
        assert_near(again[0, 3], wanted[0, 3])
